"""The small network has about 4,000 weights and can learn."""

import pytest
import torch
from torch.nn import functional as F

from qualms_training.errors import ModelError
from qualms_training.meta.taps.tapped import tap_shapes
from qualms_training.models.architectures.small import SmallNet


def test_size_and_taps() -> None:
    net = SmallNet(10)
    assert sum(weight.numel() for weight in net.parameters()) == 3_962
    assert tap_shapes(net, ["pool1", "pool2"], torch.zeros(1, 3, 16, 16)) == [(8, 8, 8), (16, 4, 4)]


def test_it_learns_to_separate_two_classes() -> None:
    torch.manual_seed(0)
    labels = torch.arange(64) % 2
    images = 0.5 * torch.randn(64, 1, 16, 16)
    images[labels == 1, :, :8] += 1
    net = SmallNet(2, channels=1)
    optimiser = torch.optim.Adam(net.parameters(), lr=0.01)
    for _ in range(20):
        optimiser.zero_grad()
        torch.autograd.backward(F.cross_entropy(net(images), labels))
        optimiser.step()
    assert (net(images).argmax(1) == labels).all()


def test_too_small_images_are_an_error() -> None:
    with pytest.raises(ModelError, match=r"small net was given images of 3x16 pixels; it takes 4x4 or more\."):
        SmallNet(10, height=3)
