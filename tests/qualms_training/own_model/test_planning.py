"""Refusals and choices before a user's network runs over any data."""

import io
from pathlib import Path
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


def plan(model: nn.Module, **options: Any) -> tuple[Recipe, str]:
    """The recipe for a network on images of 16 pixels in the classes cat and dog, and what is displayed."""
    images = ImageSet(
        "given images", "train", np.zeros((4, 16, 16, 3), np.uint8), np.array([0, 1, 0, 1]), ("cat", "dog")
    )
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
