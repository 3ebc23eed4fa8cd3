"""Networks of every kind: the exported graph has PyTorch's classes on 500 images, and its probabilities within 1e-4."""

from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qualms_training.bench.network_table import CLASSES, IMAGES, compare_with_graph, with_different_classes
from qualms_training.models.libraries.torchvision_compat import import_torchvision
from qualms_training.models.source import base_of_module, load_base

pytestmark = pytest.mark.slow

Pair = namedtuple("Pair", ["features", "scores"])


class Small(nn.Module):
    """A small convolutional network with an output of any form."""

    def __init__(
        self, form: Callable[[Tensor, Tensor], Any] = lambda features, logits: logits, channels: int = 3
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 8, 3, stride=2, padding=1)
        self.conv2 = nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.head = nn.Linear(16, CLASSES)
        self.form = form

    def forward(self, x: Tensor) -> Any:
        features = torch.relu(self.conv2(torch.relu(self.conv1(x)))).mean((2, 3))
        return self.form(features, self.head(features))


def torchvision_network(name: str, **sizes: Any) -> nn.Module:
    model: nn.Module = getattr(import_torchvision().models, name)(num_classes=CLASSES, **sizes)
    return model


def resnet() -> nn.Module:
    models = import_torchvision().models.resnet
    model: nn.Module = models.ResNet(models.Bottleneck, [1, 1, 1, 1], num_classes=CLASSES, width_per_group=8)
    return model


def vision_transformer() -> nn.Module:
    kind = import_torchvision().models.VisionTransformer
    model: nn.Module = kind(32, 8, num_layers=4, num_heads=2, hidden_dim=16, mlp_dim=32, num_classes=CLASSES)
    return model


def swin() -> nn.Module:
    kind = import_torchvision().models.SwinTransformer
    model: nn.Module = kind([4, 4], 8, [2, 2], [2, 2], [4, 4], num_classes=CLASSES)
    return model


def convnext() -> nn.Module:
    models = import_torchvision().models.convnext
    settings = [models.CNBlockConfig(8, 16, 1), models.CNBlockConfig(16, 32, 1), models.CNBlockConfig(32, None, 1)]
    model: nn.Module = models.ConvNeXt(settings, layer_scale=1.0, num_classes=CLASSES)
    return model


def timm_network(name: str, **sizes: Any) -> nn.Module:
    import_torchvision()
    timm = pytest.importorskip("timm")
    model: nn.Module = timm.create_model(name, pretrained=False, num_classes=CLASSES, **sizes)
    return model


def hugging_face_vit() -> nn.Module:
    import_torchvision()
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=4, num_attention_heads=2, intermediate_size=32, image_size=32, patch_size=8
    )
    config.num_labels = CLASSES
    model: nn.Module = transformers.ViTForImageClassification(config)
    return model


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "torchvision resnet": resnet,
    "torchvision vit": vision_transformer,
    "torchvision swin": swin,
    "torchvision convnext": convnext,
    "torchvision mobilenet": lambda: torchvision_network("mobilenet_v3_small"),
    "timm vit": lambda: timm_network("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=4, embed_dim=48),
    "timm convnext": lambda: timm_network("convnext_atto", depths=(1, 1, 1, 1), dims=(8, 16, 24, 32)),
    "timm distilled": lambda: timm_network(
        "deit_tiny_distilled_patch16_224", img_size=32, patch_size=8, depth=2, embed_dim=48
    ),
    "torchvision squeezenet": lambda: torchvision_network("squeezenet1_1"),
    "timm grey": lambda: timm_network("resnet10t", in_chans=1),
    "hugging face vit": hugging_face_vit,
    "dict": lambda: Small(lambda features, logits: {"embedding": features.flatten(), "logits": logits}),
    "tuple": lambda: Small(lambda features, logits: (logits, features[:, 0])),
    "named tuple": lambda: Small(lambda features, logits: Pair(features[:, 0], logits)),
}


def compare(base: nn.Module, side: int = 32) -> None:
    """The exported graph for a base has the classes and probabilities of the base alone."""
    result = compare_with_graph(base, side)
    assert result.taps
    assert result.predicted > 1  # a base that ignores its input would pass trivially
    assert (result.identical, IMAGES) == (500, 500)
    assert result.difference <= 1e-4


@pytest.mark.parametrize("name", NETWORKS)
def test_the_graph_of_a_network_has_its_classes_and_probabilities(name: str) -> None:
    torch.manual_seed(0)
    compare(base_of_module(with_different_classes(NETWORKS[name]().eval())).module)


def test_a_torch_export_file_is_a_base(tmp_path: Path) -> None:
    torch.manual_seed(0)
    batch = torch.export.Dim("batch", min=1)
    program = torch.export.export(
        with_different_classes(Small().eval()), (torch.zeros(2, 3, 32, 32),), dynamic_shapes=({0: batch},)
    )
    torch.export.save(program, tmp_path / "net.pt2")
    loaded = load_base(str(tmp_path / "net.pt2"), channels=3, height=32, width=32)
    assert loaded.opaque is not None
    compare(loaded.module)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", ["traced", "scripted"])
def test_a_torchscript_file_is_a_base(tmp_path: Path, kind: str) -> None:
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, CLASSES)
    ).eval()
    with_different_classes(network)
    example = torch.zeros(2, 3, 32, 32)
    jit: Any = torch.jit  # its functions have no types
    jit.save(jit.trace(network, example) if kind == "traced" else jit.script(network), str(tmp_path / "net.pt"))
    loaded = load_base(str(tmp_path / "net.pt"), channels=3, height=32, width=32)
    assert loaded.opaque is not None
    compare(loaded.module)
