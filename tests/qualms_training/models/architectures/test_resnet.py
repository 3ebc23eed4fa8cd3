"""ResNet-20 for CIFAR as in He et al.: 0.27 M weights, and shortcuts without weights."""

import torch

from qualms_training.meta.taps.tapped import tap_shapes
from qualms_training.models.architectures.resnet import BasicBlock, ResNet20


def test_size_and_taps() -> None:
    net = ResNet20(10)
    assert sum(weight.numel() for weight in net.parameters()) == 269_722
    shapes = tap_shapes(net, ["stage1", "stage2", "stage3", "pool"], torch.zeros(1, 3, 32, 32))
    assert shapes == [(16, 32, 32), (32, 16, 16), (64, 8, 8), (64, 1, 1)]


def test_it_has_twenty_layers() -> None:
    names = [name for name, _ in ResNet20(10).named_modules()]
    assert sum(name.rpartition(".")[2] in ("conv", "conv1", "conv2", "fc") for name in names) == 20


def test_shortcut_subsamples_and_pads_with_zero_channels() -> None:
    block = BasicBlock(2, 6, stride=2).eval()
    torch.nn.init.zeros_(block.conv2.weight)  # only the shortcut remains
    images = torch.rand(1, 2, 5, 5)
    out = block(images)
    assert torch.equal(out[:, 2:4], images[:, :, ::2, ::2])
    assert not out[:, :2].any()
    assert not out[:, 4:].any()


def test_any_image_size_gives_logits() -> None:
    assert ResNet20(7, channels=1)(torch.zeros(2, 1, 19, 24)).shape == (2, 7)
