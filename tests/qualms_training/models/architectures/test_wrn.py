"""WRN-16-4 as in the paper: 2.8 M weights, dropout, a hidden layer in the head, five taps."""

import torch
from torch import nn

from qualms_training.meta.taps.tapped import tap_shapes
from qualms_training.models.architectures.wrn import WideResNet16x4


def test_size_and_taps_are_the_published_ones() -> None:
    net = WideResNet16x4(100)
    assert sum(weight.numel() for weight in net.parameters()) == 2_837_812
    names = ["group2.0", "group2", "group3.0", "group3", "pool"]
    shapes = tap_shapes(net, names, torch.zeros(1, 3, 32, 32))
    assert shapes == [(128, 16, 16), (128, 16, 16), (256, 8, 8), (256, 8, 8), (256, 1, 1)]


def test_dropout_is_active_in_training_only() -> None:
    torch.manual_seed(0)
    net = WideResNet16x4(10)
    images = torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        assert not torch.equal(net(images), net(images))
        net.eval()
        assert torch.equal(net(images), net(images))


def test_depth_and_width_are_those_of_its_name() -> None:
    with torch.device("meta"):
        net = WideResNet16x4(10, channels=1)
    convolutions = [name for name, module in net.named_modules() if isinstance(module, nn.Conv2d)]
    assert len(convolutions) == 16  # 6n + 4 with n = 2: one first, twelve in blocks, three shortcuts
    widths = [net.get_submodule(name).out_channels for name in ("group1.0.conv1", "group3.1.conv2")]
    assert widths == [4 * 16, 4 * 64]
