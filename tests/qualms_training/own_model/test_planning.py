"""Refusals and choices before a user's network runs over any data."""

import importlib
import io
from pathlib import Path
from threading import Lock
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

from qualms_training.console import Display
from qualms_training.data.dataset import ImageSet
from qualms_training.data.layout import SplitPlan
from qualms_training.errors import DataError, ModelError, RecipeError
from qualms_training.models.source import base_of_module
from qualms_training.own_model.options import FitOptions, InputOptions, data_name
from qualms_training.own_model.planning import plan_recipe, recipe_for
from qualms_training.recipe import Recipe, load_recipe
from qualms_training.stages.base import copied

PLAN = SplitPlan("given images", "test", {"train": 50, "validation": 50, "fit": 32, "calibration": 299}, 50, [])


def network(channels: int = 3, classes: int = 2) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels, 4, 3, stride=2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, classes)
    )


class SixChannels(nn.Module):
    """A network of six channels, the other three of which are computed from RGB."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network(channels=6)

    def forward(self, x: Tensor) -> Any:
        return self.inner(torch.cat([x, 1 - x], dim=1))


def plan(model: nn.Module, names: tuple[str, ...] = ("cat", "dog"), **options: Any) -> tuple[Recipe, str]:
    """The recipe for a network on images of 16 pixels in two classes, and what is displayed."""
    images = ImageSet("given images", "train", np.zeros((4, 16, 16, 3), np.uint8), np.array([0, 1, 0, 1]), names)
    text = io.StringIO()
    display = Display(Console(file=text, width=1000))
    return recipe_for(
        base_of_module(model), FitOptions("object:Net", **options), PLAN, images, display
    ), text.getvalue()


def test_many_channels_are_refused_with_the_way_to_compute_them() -> None:
    with pytest.raises(
        ModelError, match=r"takes images of 6 channels, .* wrap the network in one that takes \(N, 3, H, W\)"
    ):
        plan(network(channels=6))


def test_a_network_that_computes_its_other_channels_is_accepted() -> None:
    assert plan(SixChannels())[0].input.colour == "RGB"


def test_a_colour_that_the_network_does_not_take_is_named() -> None:
    with pytest.raises(ModelError, match="takes images of 3 channels, and images are read with 1: give --colour RGB"):
        plan(network(), input=InputOptions(colour="L"))
    assert plan(network(channels=1))[0].input.colour == "L"


def test_a_network_with_one_logit_is_refused_with_the_way_to_two() -> None:
    with pytest.raises(
        ModelError, match=r"has one logit, .* returns torch\.cat\(\[torch\.zeros_like\(z\), z\], dim=1\)"
    ):
        plan(network(classes=1))


def test_another_number_of_logits_is_announced_as_transfer() -> None:
    recipe, text = plan(network(classes=3))
    assert recipe.prediction == "meta"
    assert "Transfer: the model has 3 logits and the data have 2 classes" in text


def test_probabilities_in_place_of_logits_are_announced() -> None:
    assert "The model returns probabilities" in plan(nn.Sequential(*network(), nn.Softmax(dim=1)))[1]
    assert "The model returns probabilities" not in plan(network())[1]


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (lambda x: dict[str, Any]()["image"], "KeyError: 'image'; its forward must take one tensor"),
        (lambda x: x.image, "has no attribute 'image'; its forward must take one tensor"),
        (lambda x: nn.functional.linear(x, torch.ones(2, 16).half()), "remove conversions to other types"),
        (lambda x: x.reshape(2, 5), "--size gives another input size"),
    ],
)
def test_any_error_of_a_network_is_explained(forward: Any, message: str) -> None:
    model = network()
    model.forward = forward  # type: ignore[method-assign]
    with pytest.raises(ModelError, match=message):
        plan(model)


def test_torchscript_objects_are_refused_with_the_way_to_give_them() -> None:
    jit: Any = torch.jit  # its functions have no types
    with pytest.warns(DeprecationWarning):
        script = jit.script(network())
    with pytest.raises(
        ModelError, match="whose layers cannot be read: .* save it with its method save and run qualms fit"
    ):
        plan(script)


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::UserWarning"
)  # of torch.jit and torch.ao.quantization
def test_scripted_and_quantised_parts_are_refused_with_the_way_to_give_them() -> None:
    jit: Any = torch.jit  # its functions have no types
    with pytest.raises(ModelError, match=r"The part '0' of the model is a \w+ whose layers cannot be read: give the"):
        copied(nn.Sequential(jit.script(network())))
    quantise: Any = importlib.import_module("torch.ao.quantization").quantize_dynamic
    with pytest.raises(ModelError, match=r"Layer '\w+' is quantised .* give the network as it was before quantisation"):
        copied(quantise(network(), {nn.Linear}))


class KeepsFeatures(nn.Module):
    """A network that keeps the features of its last run."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.features = network(), torch.zeros(1)

    def forward(self, x: Tensor) -> Tensor:
        self.features = self.inner[:3](x)
        return self.inner(x)  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of weight_norm
def test_networks_that_keep_tensors_with_gradients_are_copied() -> None:
    images = torch.randn(2, 3, 16, 16)
    for model in (KeepsFeatures(), nn.Sequential(nn.Flatten(), nn.utils.weight_norm(nn.Linear(768, 2)))):
        expected = model(images)
        copy = copied(model)
        assert torch.equal(copy(images), expected)
        copy.get_parameter(next(name for name, _ in copy.named_parameters())).data.zero_()
        assert torch.equal(model(images), expected)


def test_networks_that_cannot_be_copied_are_refused_with_what_to_remove() -> None:
    model = network()
    model.lock = Lock()  # type: ignore[assignment]
    with pytest.raises(
        ModelError, match="cannot be copied .TypeError: cannot pickle .* remove attributes that do not, such"
    ):
        copied(model)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.compile
def test_wrappers_that_compute_the_same_are_not_part_of_the_copy() -> None:
    compiled: Any = torch.compile(network())
    model = nn.DataParallel(compiled)
    assert list(copied(model).state_dict()) == list(network().state_dict())
    part = nn.Sequential(compiled)
    assert list(copied(part).state_dict()) == [f"0.{name}" for name in network().state_dict()]
    assert next(iter(part.state_dict())).startswith("0._orig_mod.")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.compile
def test_exported_programs_are_refused_as_objects_and_compiled_networks_are_not() -> None:
    exported = torch.export.export(network().eval(), (torch.zeros(2, 3, 16, 16),)).module()
    traced = torch.fx.symbolic_trace(network())
    assert plan(copied(traced))[0].prediction == "base"
    with pytest.raises(ModelError, match="save it with torch.export.save and run qualms fit --model FILE"):
        plan(copied(exported))
    assert plan(torch.compile(network()))[0].prediction == "base"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (InputOptions(height=0, width=0), "The input is not valid: input.*height|height"),
        (InputOptions(height=4000, width=4000), "4000 × 4000 pixels is too large"),
        (InputOptions(mean=(0.5,), std=(0.5,)), r"mean and std need 3 value\(s\) for colour 'RGB'"),
        (InputOptions(mean=(0.5,) * 3, std=(0.0, 1.0, 1.0)), "std"),
    ],
)
def test_an_invalid_input_is_refused_before_the_network_runs(given: InputOptions, message: str) -> None:
    class Never(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise AssertionError("ran")

    with pytest.raises(RecipeError, match=message):
        plan(Never(), input=given)


@pytest.mark.parametrize(
    ("names", "order"),
    [
        (("cat", "dog"), "in alphabetical order"),
        (("2", "10"), "of their numbers"),
        (("10", "2"), "as text, such as 10"),
    ],
)
def test_the_order_of_the_classes_is_announced(names: tuple[str, ...], order: str) -> None:
    assert order in plan(network(), names)[1]


def test_names_of_the_model_that_are_not_those_of_the_data_are_announced() -> None:
    model = network()
    model.config = SimpleNamespace(id2label={0: "Dog", 1: "Cat"})  # type: ignore[assignment]
    assert "own names (Dog, Cat, …) are not used: 'cat' is not among them." in plan(model)[1]


def test_labels_that_begin_at_one_are_refused() -> None:
    images = ImageSet("mine", "train", np.zeros((4, 16, 16, 3), np.uint8), np.array([1, 2, 1, 2]), ("0", "1", "2"))
    display = Display(Console(file=io.StringIO()))
    with pytest.raises(
        DataError, match="has labels from 1 to 2, and the model has 2 logits: number the classes from 0"
    ):
        recipe_for(base_of_module(network()), FitOptions("object:Net"), PLAN, images, display)


def test_a_list_of_classes_without_a_class_of_the_data_is_refused() -> None:
    with pytest.raises(DataError, match="has the class 'dog', which is not in the list of the model's 2 classes"):
        plan(network(), classes=("cat", "cow"))
    assert plan(network(), classes=("dog", "cat"))[0].data.classes == ["dog", "cat"]


def test_a_folder_that_does_not_exist_is_named_with_similar_ones(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("QUALMS_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos").mkdir()
    with pytest.raises(DataError, match=r"There is no folder 'phtos'; did you mean 'photos'\? --data takes a folder"):
        plan_recipe(FitOptions("resnet20", weights="w.pt", data="phtos"), None, Display())


def test_ood_folders_need_no_prefix(tmp_path: Path) -> None:
    assert data_name(str(tmp_path)) == f"folder:{tmp_path}"
    assert data_name(f"folder:{tmp_path}") == f"folder:{tmp_path}"
    assert data_name("svhn") == "svhn"


def test_the_folder_of_a_hugging_face_model_is_relative_to_the_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Path(__file__).parents[3] / "training" / "qualms_training" / "recipes" / "tiny.toml"
    recipe = tmp_path / "mine" / "recipe.toml"
    (tmp_path / "mine" / "vit").mkdir(parents=True)
    text = source.read_text(encoding="utf-8")
    model = next(line for line in text.splitlines() if line.startswith("model = "))
    monkeypatch.chdir(tmp_path)
    for name, expected in (("vit", "mine/vit"), ("org/name", "org/name")):
        recipe.write_text(text.replace(model, f'model = "transformers:{name}"'), encoding="utf-8")
        assert load_recipe("mine/recipe.toml").base.model == f"transformers:{expected}"
