"""Networks of every kind against their exported graphs: `python -m qualms_training.bench.network_table [NAME …]`.

Each network is built with random weights for small images, exported with taps, an untrained meta-model and the flag score, and
compared with PyTorch on 500 drawn images. The table has the taps that were chosen, the images whose class is the same, and the
largest difference of a probability; a network that is refused has the sentence instead.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from qualms.bundle.runtime import GraphRunner
from qualms_training.checks.trial_export import trial_graph
from qualms_training.errors import QualmsError
from qualms_training.meta.export.onnx_export import to_onnx
from qualms_training.meta.extractor import Extractor, Normalise, build_reduce
from qualms_training.meta.meta_model import build_meta
from qualms_training.meta.taps.tapped import Tapped, choose_taps, tap_shapes
from qualms_training.models.channels import expected_channels
from qualms_training.models.libraries.torchvision_compat import import_torchvision
from qualms_training.models.logits import return_logits
from qualms_training.models.source import base_of_module
from qualms_training.recipe import MetaSection

IMAGES, CLASSES = 500, 7
BATCH = 50
LAYER_SCALE = 1e-3
"""largest initial value of layer scales, whose weights are all equal and near 0"""
META = MetaSection.model_validate({"form": "pooled", "epochs": 1, "lr": 0.1})


@dataclass(frozen=True)
class Comparison:
    """A network beside its exported graph."""

    taps: list[str]
    identical: int
    """images with the same class, of IMAGES"""
    difference: float
    """largest difference of a probability"""
    predicted: int
    """classes that are predicted at all: with only one, the comparison would show little"""


def noisy_images(side: int, channels: int, count: int = IMAGES) -> NDArray[np.uint8]:
    """Coarse squares with noise (count, side, side, channels), of which networks with random weights predict several classes."""
    rng = np.random.default_rng(0)
    cells = -(-side // 8)
    coarse = rng.integers(0, 256, (count, cells, cells, channels)).repeat(8, axis=1).repeat(8, axis=2)
    coarse = coarse[:, :side, :side]
    return np.asarray(np.clip(coarse + rng.normal(0, 30, coarse.shape), 0, 255), dtype=np.uint8)


def compare_with_graph(base: nn.Module, side: int = 32) -> Comparison:
    """Export the whole graph for a frozen base and compare it with the base alone on noise of `side` pixels."""
    channels = expected_channels(base) or 3
    pixels = noisy_images(side, channels)
    normalise = Normalise([0.5] * channels, [0.25] * channels)
    example = normalise(torch.from_numpy(pixels[:2]))
    base = return_logits(base, example)
    with torch.inference_mode():
        parts = np.split(pixels, range(BATCH, IMAGES, BATCH))
        expected = torch.cat([base(normalise(torch.from_numpy(part))) for part in parts]).softmax(1).numpy()
    taps = choose_taps(base, example)
    extractor = Extractor(normalise, Tapped(base, taps), build_reduce(META)).eval()
    widths = [extractor.reduce.output_shape(shape) for shape in tap_shapes(base, taps, example)]
    classes = expected.shape[1]
    meta = build_meta(META, widths, classes, 0)
    graph = trial_graph(extractor, meta, pixels, classes=classes, prediction="base", distance=True)
    outputs = GraphRunner(to_onnx(graph, pixels[:2], graph.outputs))(pixels)
    return Comparison(
        taps=taps,
        identical=int((outputs["prediction"] == expected.argmax(axis=1)).sum()),
        difference=float(np.abs(outputs["base_probabilities"] - expected).max()),
        predicted=len(np.unique(expected.argmax(axis=1))),
    )


@torch.inference_mode()
def with_different_classes(base: nn.Module, side: int = 32) -> nn.Module:
    """The network with last layers whose outputs vary about 0, because random networks predict one class for all images.

    Last layers are those with CLASSES outputs; the last linear or convolutional layer if none has so many. Before that, layer
    scales, which start near 0, become 1, and batch normalisation gets the statistics of drawn images: what differs between
    images would otherwise shrink from layer to layer until only rounding errors are left.
    """
    normalise = Normalise([0.5], [0.25])
    pixels = torch.from_numpy(noisy_images(side, expected_channels(base) or 3, 100))
    for parameter in base.parameters():
        if parameter.min() == parameter.max() and 0 < parameter.max() < LAYER_SCALE:
            parameter.fill_(1.0)
    norms = [module for module in base.eval().modules() if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d)]
    for norm in norms:
        norm.train().momentum = 1.0  # of these images alone
    base(normalise(pixels))
    layers = [module for module in base.eval().modules() if isinstance(module, nn.Linear | nn.Conv2d)]
    heads = [layer for layer in layers if layer.weight.shape[0] == CLASSES] or layers[-1:]
    for head in heads:
        outputs = list[Tensor]()
        if not head.weight.any():  # torchvision's ViT starts with zeros
            nn.init.normal_(head.weight)
        with head.register_forward_hook(lambda _, __, output, outputs=outputs: outputs.append(output)):
            base(normalise(pixels))
        if not outputs:  # used in training only
            continue
        values = outputs[0].movedim(1, -1).flatten(0, -2)
        deviation = (values - values.mean(0)).std()  # between images: classes differ more, but alike for all images
        head.weight.copy_(head.weight / deviation)
        if head.bias is not None:
            head.bias.copy_((head.bias - values.mean(0)) / deviation)
    return base


def _torchvision(name: str, **sizes: Any) -> nn.Module:
    models = import_torchvision().models
    model: nn.Module = models.get_model(name, weights=None, num_classes=CLASSES, **sizes)
    return model


def _timm(name: str, **sizes: Any) -> nn.Module:
    import_torchvision()
    model: nn.Module = import_module("timm").create_model(name, pretrained=False, num_classes=CLASSES, **sizes)
    return model


def _transformers(kind: str, **sizes: Any) -> nn.Module:
    import_torchvision()
    transformers = import_module("transformers")
    config = getattr(transformers, f"{kind}Config")(**sizes)
    config.num_labels = CLASSES
    model: nn.Module = getattr(transformers, f"{kind}ForImageClassification")(config)
    return model


_SMALL = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 64}
_TORCHVISION: list[tuple[str, int, dict[str, Any]]] = [
    ("alexnet", 64, {}),
    ("convnext_tiny", 64, {}),
    ("densenet121", 64, {}),
    ("efficientnet_b0", 64, {}),
    ("efficientnet_v2_s", 64, {}),
    ("googlenet", 64, {"init_weights": False}),
    ("inception_v3", 80, {"init_weights": False}),
    ("maxvit_t", 224, {}),
    ("mnasnet0_5", 64, {}),
    ("mobilenet_v2", 64, {}),
    ("mobilenet_v3_small", 64, {}),
    ("regnet_x_400mf", 64, {}),
    ("regnet_y_400mf", 64, {}),
    ("resnet18", 64, {}),
    ("resnext50_32x4d", 64, {}),
    ("shufflenet_v2_x0_5", 64, {}),
    ("squeezenet1_1", 64, {}),
    ("swin_t", 64, {}),
    ("swin_v2_t", 64, {}),
    ("vgg11_bn", 32, {}),
    ("vit_b_16", 64, {"image_size": 64}),
]
_TIMM: list[tuple[str, int, dict[str, Any]]] = [
    ("beit_base_patch16_224", 64, {"img_size": 64, "depth": 4}),
    ("cait_xxs24_224", 64, {"img_size": 64, "depth": 4}),
    ("coat_tiny", 64, {"img_size": 64}),
    ("convmixer_768_32", 56, {}),
    ("convnextv2_atto", 64, {}),
    ("crossvit_9_240", 240, {}),
    ("deit_tiny_distilled_patch16_224", 64, {"img_size": 64}),
    ("deit_tiny_patch16_224", 64, {"img_size": 64}),
    ("edgenext_xx_small", 64, {}),
    ("efficientformer_l1", 224, {}),
    ("efficientformerv2_s0", 224, {}),
    ("efficientvit_b0", 64, {}),
    ("eva02_tiny_patch14_224", 56, {"img_size": 56}),
    ("fastvit_t8", 64, {}),
    ("gcvit_xxtiny", 224, {}),
    ("ghostnet_100", 64, {}),
    ("hrnet_w18_small", 64, {}),
    ("inception_next_tiny", 64, {}),
    ("levit_128s", 224, {}),
    ("maxvit_rmlp_pico_rw_256", 256, {}),
    ("mixer_s32_224", 64, {"img_size": 64}),
    ("mobilenetv4_conv_small", 64, {}),
    ("mobileone_s0", 64, {}),
    ("mobilevit_xxs", 64, {}),
    ("mobilevitv2_050", 64, {}),
    ("naflexvit_base_patch16_gap", 64, {"img_size": 64, "depth": 4}),
    ("nfnet_f0", 64, {}),
    ("pit_ti_224", 224, {}),
    ("poolformer_s12", 64, {}),
    ("pvt_v2_b0", 64, {}),
    ("repvgg_a0", 64, {}),
    ("resmlp_12_224", 64, {"img_size": 64}),
    ("resnet10t", 64, {"in_chans": 1}),
    ("resnetv2_50", 64, {}),
    ("rexnet_100", 64, {}),
    ("swin_tiny_patch4_window7_224", 64, {"img_size": 64, "window_size": 2}),
    ("swinv2_cr_tiny_224", 64, {"img_size": 64, "window_size": 2}),
    ("tiny_vit_5m_224", 224, {}),
    ("tresnet_m", 64, {}),
    ("twins_svt_small", 64, {}),
    (
        "vit_base_patch16_siglip_224",
        64,
        {"img_size": 64, "depth": 4},
    ),
    ("vit_tiny_patch16_224", 64, {"img_size": 64}),
    ("volo_d1_224", 224, {}),
    ("xcit_nano_12_p16_224", 64, {"img_size": 64}),
    ("xception41", 64, {}),
]
_TRANSFORMERS: list[tuple[str, int, dict[str, Any]]] = [
    ("Beit", 32, {**_SMALL, "image_size": 32, "patch_size": 8}),
    ("ConvNext", 64, {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1]}),
    ("ConvNextV2", 64, {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1]}),
    ("DeiT", 32, {**_SMALL, "image_size": 32, "patch_size": 8}),
    ("Dinov2", 28, {**_SMALL, "image_size": 28, "patch_size": 7}),
    ("MobileNetV2", 64, {"image_size": 64}),
    (
        "MobileViT",
        64,
        {"image_size": 64, "hidden_sizes": [16, 24, 32], "neck_hidden_sizes": [8, 16, 16, 24, 32, 40, 64]},
    ),
    ("PoolFormer", 64, {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1]}),
    ("Pvt", 64, {"image_size": 64}),
    (
        "RegNet",
        64,
        {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1], "groups_width": 8, "embedding_size": 8},
    ),
    ("ResNet", 64, {"hidden_sizes": [16, 16, 24, 32], "depths": [1, 1, 1, 1], "embedding_size": 8}),
    ("Segformer", 64, {"image_size": 64}),
    (
        "Swin",
        32,
        {
            "image_size": 32,
            "embed_dim": 16,
            "depths": [2, 2],
            "num_heads": [2, 4],
            "window_size": 4,
            "patch_size": 2,
        },
    ),
    (
        "Swinv2",
        32,
        {
            "image_size": 32,
            "embed_dim": 16,
            "depths": [2, 2],
            "num_heads": [2, 4],
            "window_size": 4,
            "patch_size": 2,
        },
    ),
    ("ViT", 32, {**_SMALL, "image_size": 32, "patch_size": 8}),
]
"""name, pixels of a side, and arguments"""
NETWORKS: dict[str, tuple[int, Callable[[], nn.Module]]] = {
    f"{source}:{name}": (side, partial(build, name, **sizes))
    for source, build, listed in (
        ("torchvision", _torchvision, _TORCHVISION),
        ("timm", _timm, _TIMM),
        ("transformers", _transformers, _TRANSFORMERS),
    )
    for name, side, sizes in listed
}
"""pixels of a side, and a function that builds the network, by name"""


def main(names: list[str] | None = None) -> None:
    """Print the table, a row as soon as it is known."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="parts of names of networks; all without any")
    wanted = parser.parse_args(names).names
    print(f"| network | pixels | taps | same class | largest difference | seconds |\n|{'---|' * 6}")
    for name, (side, build) in NETWORKS.items():
        if not wanted or any(part in name for part in wanted):
            print(f"| `{name}` | {side} | {_row(side, build)} |", flush=True)


def _row(side: int, build: Callable[[], nn.Module]) -> str:
    torch.manual_seed(0)
    start = time.monotonic()
    try:
        result = compare_with_graph(base_of_module(with_different_classes(build(), side)).module, side)
    except QualmsError as error:
        return f"refused: {error} | | |"
    taps = ", ".join(f"`{tap}`" for tap in result.taps)
    same = f"{result.identical} of {IMAGES}, {result.predicted} classes"
    return f"{taps} | {same} | {result.difference:.0e} | {time.monotonic() - start:.0f}"


if __name__ == "__main__":
    main()
