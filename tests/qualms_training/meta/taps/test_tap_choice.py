"""Taps of real architectures with random weights, and the reasons for their choice."""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qualms_training.meta.extractor import Reduce
from qualms_training.meta.taps.tapped import Tapped, choose_taps, describe_taps, tap_shapes
from qualms_training.models.libraries.torchvision_compat import import_torchvision

IMAGES = torch.linspace(-1, 1, 2 * 3 * 64 * 64).reshape(2, 3, 64, 64)


def torchvision(name: str, **options: Any) -> nn.Module:
    model: nn.Module = import_torchvision().models.get_model(name, weights=None, num_classes=10, **options)
    return model.eval()


def small_vit() -> nn.Module:
    vit: nn.Module = import_torchvision().models.VisionTransformer(64, 16, 6, 2, 16, 32, num_classes=10)
    return vit.eval()


def small_swin(side: int = 2) -> nn.Module:
    swin: nn.Module = import_torchvision().models.SwinTransformer(
        [side, side], 8, [2, 2, 2], [1, 2, 4], [4, 4], num_classes=10
    )
    return swin.eval()


def timm(name: str, **options: Any) -> nn.Module:
    import_torchvision()
    model: nn.Module = pytest.importorskip("timm").create_model(name, pretrained=False, num_classes=10, **options)
    return model.eval()


def hugging_face(kind: str, **options: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{kind}Config")(num_labels=10, image_size=64, **options)
    model: nn.Module = getattr(transformers, f"{kind}ForImageClassification")(config)
    model.register_forward_hook(lambda _, __, output: output.logits)
    return model.eval()


HF_VIT = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "patch_size": 16,
}
HF_CNN = {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 2, 1]}
HF_SWIN = {"embed_dim": 8, "depths": [1, 1, 1], "num_heads": [1, 2, 4], "patch_size": 2, "window_size": 4}


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (
            small_vit,
            [*(f"encoder.layers.encoder_layer_{block}" for block in (1, 2, 4, 5)), "heads.head:input"],
        ),
        (small_swin, ["features.1", "features.3", "norm", "flatten"]),
        (functools.partial(hugging_face, "ViT", **HF_VIT), ["vit.layers.0", "vit.layers.1", "classifier:input"]),
        (
            functools.partial(hugging_face, "ResNet", embedding_size=8, **HF_CNN),
            [*(f"resnet.encoder.stages.{stage}" for stage in range(4)), "classifier.0"],
        ),
        (
            functools.partial(hugging_face, "ConvNext", **HF_CNN),
            [*(f"convnext.encoder.stages.{stage}" for stage in range(4)), "convnext.layernorm"],
        ),
        (
            functools.partial(hugging_face, "Swin", **HF_SWIN),
            ["swin.embeddings", "swin.encoder.layers.0", "swin.layernorm", "swin.pooler"],
        ),
        (
            functools.partial(timm, "vit_tiny_patch16_224", img_size=64, depth=4, embed_dim=24),
            [*(f"blocks.{block}" for block in range(4)), "head:input"],
        ),
        (
            functools.partial(timm, "deit_tiny_distilled_patch16_224", img_size=64, depth=4, embed_dim=24),
            [*(f"blocks.{block}" for block in range(4)), "head:input", "head_dist:input"],
        ),
        (
            functools.partial(timm, "mixer_s16_224", img_size=64),
            [*(f"blocks.{block}" for block in (1, 3, 5, 7)), "head:input"],
        ),
    ],
)
@pytest.mark.slow
def test_choice_for_small_networks_of_every_layout(make: Callable[[], nn.Module], expected: list[str]) -> None:
    assert_chosen(make(), expected, IMAGES)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (
            functools.partial(torchvision, "densenet121"),
            [*(f"features.denseblock{block}" for block in (1, 2, 3)), "features", "classifier:input"],
        ),
        (
            functools.partial(torchvision, "squeezenet1_1"),
            ["features.1", "features.4", "features.7", "features"],  # its head is a convolution of `features`
        ),
        (
            functools.partial(torchvision, "mobilenet_v3_small"),
            ["features.1", "features.3", "features.8", "features", "classifier.1"],
        ),
        (
            functools.partial(torchvision, "vgg11"),
            ["features.9", "features.14", "features.19", "avgpool", "classifier.4"],  # not classifier.5, a dropout
        ),
        (functools.partial(torchvision, "maxvit_t"), [*(f"blocks.{block}" for block in range(4)), "classifier.4"]),
        (
            functools.partial(timm, "swin_tiny_patch4_window7_224"),
            ["layers.0", "layers.1", "layers.2", "norm", "head.global_pool"],
        ),
        (
            functools.partial(timm, "convnext_tiny"),
            ["stages.0", "stages.1", "stages.2", "stages", "head.flatten"],
        ),
    ],
)
def test_choice_for_networks_at_224_pixels(make: Callable[[], nn.Module], expected: list[str]) -> None:
    assert_chosen(make(), expected, torch.zeros(2, 3, 224, 224))


def assert_chosen(base: nn.Module, expected: list[str], images: Tensor) -> None:
    names = choose_taps(base, images)
    assert names == expected
    shapes = tap_shapes(base, names, images)
    with torch.no_grad():
        _, features = Tapped(base, names)(images)
    reduce = Reduce()
    assert [tuple(reduce(feature).shape[1:]) for feature in features] == [
        reduce.output_shape(shape) for shape in shapes
    ]


def test_convolutional_blocks_of_one_resolution_are_evenly_spaced() -> None:
    blocks = nn.Sequential(*(nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()) for _ in range(8)))
    base = nn.Sequential(nn.Conv2d(3, 8, 8, stride=8), blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))
    assert choose_taps(base, IMAGES) == ["1.1", "1.3", "1.5", "1.7", "3"]


def test_padding_layers_are_not_chosen() -> None:
    stage = [nn.Conv2d(4, 4, 3, stride=2), nn.ReLU(), nn.ZeroPad2d(1)]
    base = nn.Sequential(
        nn.Conv2d(3, 4, 3, stride=2), nn.ReLU(), nn.ZeroPad2d(1), *stage, nn.Flatten(), nn.LazyLinear(3)
    )
    base(IMAGES)
    described = {tap.name: tap for tap in describe_taps(base, IMAGES)}
    assert choose_taps(base, IMAGES) == [name for name, tap in described.items() if tap.chosen]
    assert not described["2"].chosen
    assert described["2"].reason == "padding"


class Head(nn.Module):
    """A linear layer after `activate`, which is not a module, or by keyword."""

    def __init__(self, activate: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.activate, self.last = nn.Linear(3 * 64 * 64, 8), activate, nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.last(input=self.activate(self.first(x.flatten(1))))
        return logits


@pytest.mark.parametrize("activate", [torch.relu, torch.relu_])
def test_the_penultimate_feature_is_the_input_of_the_last_layer_if_no_module_returns_it(
    activate: Callable[[Tensor], Tensor],
) -> None:
    base = Head(activate).eval()
    assert choose_taps(base, IMAGES) == ["last:input"]
    logits, (feature,) = Tapped(base, ["last:input"])(IMAGES)
    assert (feature >= 0).all()
    assert torch.equal(base.last(feature), logits)


def test_a_module_that_returns_the_penultimate_feature_is_preferred() -> None:
    assert choose_taps(Head(lambda x: x).eval(), IMAGES) == ["first"]


def test_a_stage_whose_output_is_flattened_for_the_last_layer_is_chosen_once() -> None:
    pools = [nn.Conv2d(3, 4, 3, padding=1), nn.MaxPool2d(4), nn.Conv2d(4, 4, 3, padding=1), nn.MaxPool2d(4)]
    base = nn.Sequential(*pools, nn.Flatten(), nn.Linear(4 * 4 * 4, 3))
    assert choose_taps(base, IMAGES) == ["2", "3"]


class Repeated(nn.Module):
    """Runs `pool` twice and returns a dict from `pack`."""

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.drop, self.last = nn.AvgPool2d(4), nn.Dropout(), nn.Linear(3 * 4 * 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.last(self.drop(self.pool(self.pool(x))).flatten(1))
        return logits


def test_every_module_is_described_with_the_reason_for_which_it_is_not_chosen() -> None:
    described = describe_taps(Repeated(), IMAGES)
    assert [(tap.name, tap.shape, tap.layout, tap.chosen, tap.reason) for tap in described] == [
        ("pool", (), "other", False, "runs 2 times"),
        ("drop", (3, 4, 4), "channels-first", False, "dropout: the same values as its input"),
        ("last:input", (48,), "flat", True, "penultimate: the input of last"),
        ("last", (3,), "flat", False, "the logits"),
    ]


def test_reasons_name_the_chosen_stage_or_block() -> None:
    vit = {tap.name: tap.reason for tap in describe_taps(small_vit(), IMAGES)}
    assert vit["encoder.layers.encoder_layer_1"] == "block 2 of 6"
    assert vit["encoder.layers.encoder_layer_0.mlp"] == "in block 1 of 6, of which 4 are chosen"
    assert vit["encoder.layers.encoder_layer_1.mlp"] == "inside encoder.layers.encoder_layer_1, which is chosen"
    assert vit["encoder.dropout"] == "dropout: the same values as its input"
    assert vit["heads.head:input"] == "penultimate: the input of heads.head"
    swin = {tap.name: tap for tap in describe_taps(small_swin(), IMAGES)}
    assert (swin["features.1"].shape, swin["features.1"].layout) == ((32, 32, 8), "channels-last")
    assert swin["features.1"].reason == "end of the resolution 32 x 32"
    assert swin["features.0"].reason == "features.1 is chosen for the resolution 32 x 32"


def test_nothing_is_chosen_in_the_description_of_a_base_without_suitable_taps() -> None:
    (tap,) = describe_taps(nn.Sequential(nn.Flatten()), IMAGES)
    assert (tap.name, tap.chosen) == ("0", False)


def test_tracing_does_not_keep_activations() -> None:
    trace = importlib.import_module("qualms_training.meta.taps.tap_trace").trace
    traced = trace(small_vit(), IMAGES)
    alive = [call.name for call in traced.calls if call.output and not call.output.storage.expired()]
    assert set(alive) <= {"heads", "heads.head"}  # the logits
