"""Taps read a frozen base without changing it, export to ONNX with it, and refuse unsuitable modules."""

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from qualms.bundle.runtime import GraphRunner
from qualms_training.errors import ModelError
from qualms_training.meta.export.onnx_export import to_onnx
from qualms_training.meta.extractor import Reduce
from qualms_training.meta.meta_model import PooledMeta
from qualms_training.meta.taps.tapped import Tapped, choose_taps, list_taps, open_head, tap_shapes
from qualms_training.models import build, freeze

IMAGES = torch.linspace(-1, 1, 2 * 3 * 32 * 32).reshape(2, 3, 32, 32)


class Scripted(nn.Module):
    """A base whose only submodule, `layer`, is used as a test specifies."""

    def __init__(self, run: Callable[[nn.Module, Tensor], Tensor], layer: nn.Module | None = None) -> None:
        super().__init__()
        self.layer = layer or nn.Flatten()
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self.layer, x)


class ReturnsTuple(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return x.flatten(1), None


class ReturnsDict(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"features": x}


class AcrossTheBatch(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1) @ x.flatten(1).T


def logits(x: Tensor) -> Tensor:
    return x.flatten(1)[:, :3]


def test_features_are_the_outputs_of_the_modules_and_logits_are_unchanged() -> None:
    base = freeze(build("lenet", 10))
    out, (first, second) = Tapped(base, ["pool1", "pool2"])(IMAGES)
    pool1 = base.get_submodule("pool1")(torch.relu(base.get_submodule("conv1")(IMAGES)))
    assert torch.equal(first, pool1)
    assert second.shape == (2, 16, 5, 5)
    assert torch.equal(out, base(IMAGES))


def test_features_are_in_the_order_of_the_names_and_hooks_are_removed() -> None:
    base = freeze(build("lenet", 10))
    _, features = Tapped(base, ["fc1", "pool1"])(IMAGES)
    assert [tuple(feature.shape) for feature in features] == [(2, 120), (2, 6, 14, 14)]
    assert not any(module._forward_hooks for module in base.modules())


def test_a_later_in_place_layer_does_not_change_a_feature() -> None:
    base = nn.Sequential(nn.Flatten(), nn.Linear(3072, 8), nn.ReLU(inplace=True), nn.Linear(8, 3))
    _, (feature,) = Tapped(freeze(base), ["1"])(IMAGES)
    assert torch.equal(feature, base[1](IMAGES.flatten(1)))
    assert (feature < 0).any()


def test_the_base_stays_in_evaluation_mode_inside_a_training_model() -> None:
    tapped = Tapped(build("wrn16-4", 10), ["pool"])
    nn.Sequential(tapped).train()
    assert not any(module.training for module in tapped.modules())


def test_a_copy_is_independent_of_the_original() -> None:
    tapped = Tapped(freeze(build("small", 3, height=32)), ["pool1"])
    again = copy.deepcopy(tapped)
    nn.init.zeros_(tapped.base.get_submodule("conv1").weight)  # type: ignore[arg-type]
    assert not torch.equal(tapped(IMAGES)[1][0], again(IMAGES)[1][0])


@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        (
            ["pol1"],
            "Tap 'pol1' is not a module of LeNet; `qualms taps MODEL` lists the accepted ones; did you mean 'pool1'",
        ),
        ([""], "Tap '' is not a module of LeNet"),
        (["pool1", "pool2", "pool1"], "Tap 'pool1' is listed 2 times; each tap may be listed once"),
        ([], "The list of taps for LeNet is empty; at least one module name is needed"),
    ],
)
def test_invalid_tap_names_are_refused(names: list[str], sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence):
        Tapped(build("lenet", 10), names)


@pytest.mark.parametrize(
    ("base", "sentence"),
    [
        (
            Scripted(lambda _, x: logits(x)),
            "Tap 'layer' ran 0 times in one pass; a tap must run exactly once",
        ),
        (Scripted(lambda layer, x: logits(layer(layer(x)))), "Tap 'layer' ran 2 times in one pass"),
        (
            Scripted(lambda layer, x: logits(layer(x)["features"]), ReturnsDict()),
            "Tap 'layer' returned dict for 2 images",
        ),
        (
            Scripted(lambda layer, x: logits(x) + layer(x).sum(), nn.Flatten(0)),
            r"Tap 'layer' returned a tensor of shape \(6144,\) for 2 images",
        ),
        (Scripted(lambda layer, x: layer(x).sum(1)), r"The base returned a tensor of shape \(2,\); it must"),
    ],
)
def test_modules_without_one_row_per_image_or_called_other_than_once_are_refused(
    base: nn.Module, sentence: str
) -> None:
    with pytest.raises(ModelError, match=sentence):
        Tapped(base, ["layer"])(IMAGES)


def test_a_shape_that_changes_with_the_image_is_refused() -> None:
    tapped = Tapped(Scripted(lambda layer, x: logits(layer(x))), ["layer"])
    tapped(IMAGES)
    with pytest.raises(ModelError, match=r"Tap 'layer' changed its shape from \(3072,\) to \(1536,\)"):
        tapped(IMAGES[:, :, :16])


def test_tap_shapes_refuses_a_shape_that_depends_on_the_batch() -> None:
    base = Scripted(lambda layer, x: logits(x) + layer(x).sum(), AcrossTheBatch())
    with pytest.raises(ModelError, match=r"changed its shape from \(4,\) to \(2,\)"):
        tap_shapes(base, ["layer"], IMAGES)


def test_list_taps_returns_usable_modules_in_running_order() -> None:
    base = build("torchvision:resnet18", 10)
    taps = dict(list_taps(base, IMAGES))
    assert taps["layer1"] == (64, 8, 8)
    assert taps["layer2.0.downsample.1"] == (128, 4, 4)
    assert "layer1.0.relu" not in taps  # it is called twice
    assert list(taps)[:3] == ["conv1", "bn1", "relu"]
    assert list(taps)[-1] == "fc"
    Tapped(base, list(taps))(IMAGES)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "size", "expected"),
    [
        ("lenet", 32, ["pool1", "pool2", "relu4"]),
        ("vgg16", 32, ["block1", "block2", "block3", "block4", "relu"]),
        ("resnet20", 32, ["stage2", "stage3", "pool"]),
        ("wrn16-4", 32, ["group2", "relu", "fc1_relu"]),
        ("small", 16, ["relu2", "pool2"]),
        ("torchvision:resnet18", 224, ["layer1", "layer2", "layer3", "layer4", "avgpool"]),
        (
            "torchvision:convnext_tiny",  # its blocks permute (N, C, H, W) to (N, H, W, C) and back
            224,
            ["features.1", "features.3", "features.5", "features", "classifier.1"],
        ),
    ],
)
def test_automatic_taps_are_the_ends_of_stages_and_the_penultimate_layer(
    spec: str, size: int, expected: list[str]
) -> None:
    base = freeze(build(spec, 10, height=size, width=size))
    assert choose_taps(base, torch.zeros(1, 3, size, size)) == expected


def test_a_perceptron_is_tapped_before_its_last_layer() -> None:
    base = nn.Sequential(nn.Flatten(), nn.Linear(3072, 8), nn.ReLU(), nn.Linear(8, 3))
    assert choose_taps(base, IMAGES) == ["2"]


def test_outputs_larger_than_the_image_are_not_tapped() -> None:
    base = nn.Sequential(nn.Upsample(scale_factor=2), nn.MaxPool2d(4), nn.MaxPool2d(2), nn.Flatten())
    assert choose_taps(base, IMAGES) == ["1", "2"]


def test_the_error_for_a_base_without_suitable_taps_names_the_ways_to_choose() -> None:
    base = Scripted(lambda layer, x: logits(layer(x)))
    with pytest.raises(
        ModelError, match=r"No taps could be .* Scripted: .* taps = \[...\] .* --taps; `qualms taps MODEL`"
    ):
        choose_taps(base, IMAGES)


class Whole(nn.Module):
    """Base, taps, reduction and meta-model."""

    def __init__(self, tapped: Tapped, reduce: Reduce, meta: nn.Module) -> None:
        super().__init__()
        self.tapped, self.reduce = tapped, reduce
        self.head = meta  # torch.export cannot trace a submodule named `meta`

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        out, features = self.tapped(x)
        return out, self.head([self.reduce(feature) for feature in features])


@pytest.mark.slow
@pytest.mark.parametrize("grid", [1, 3])
def test_onnx_runtime_agrees_with_torch_for_every_batch_size(grid: int) -> None:
    torch.manual_seed(0)
    base, names, reduce = freeze(build("lenet", 10)), ["pool1", "pool2", "relu4"], Reduce(grid=grid)
    shapes = [reduce.output_shape(shape) for shape in tap_shapes(base, names, IMAGES)]
    meta = PooledMeta(shapes, 10, [16])
    _, features = Tapped(base, names)(torch.randn(64, 3, 32, 32))
    meta.fit_scales([reduce(feature) for feature in features])
    model = Whole(Tapped(base, names), reduce, meta).eval()
    runner = GraphRunner(to_onnx(model, IMAGES.numpy(), ["logits", "z"]))
    for count in (1, 5):
        images = torch.randn(count, 3, 32, 32)
        with torch.no_grad():
            expected = model(images)
        outputs = runner(images.numpy())
        for name, values in zip(("logits", "z"), expected, strict=True):
            np.testing.assert_allclose(outputs[name], values.numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["lenet", "resnet20", "small"])
def test_open_head_taps_the_input_of_the_last_linear_layer(name: str) -> None:
    base = freeze(build(name, 5))
    before = base(IMAGES)
    opened, tap, layer = open_head(base, IMAGES)
    logits, (feature,) = Tapped(opened, [tap])(IMAGES)
    torch.testing.assert_close(logits, before)
    torch.testing.assert_close(feature @ layer.weight.T + layer.bias, before)
    assert not any(name.endswith(".0.weight") and name.startswith("fc") for name in base.state_dict())  # a copy


def test_open_head_refuses_a_base_whose_logits_are_not_the_output_of_a_linear_layer() -> None:
    base = Scripted(lambda layer, x: layer(x.flatten(1)) * 2, nn.Linear(3 * 32 * 32, 4))
    with pytest.raises(ModelError, match="logits of Scripted must be the output of a linear layer"):
        open_head(base, IMAGES)
