"""LeNet has the size and the taps of the paper."""

import pytest
import torch

from qualms_training.errors import ModelError
from qualms_training.meta.taps.tapped import tap_shapes
from qualms_training.models.architectures.lenet import LeNet


def test_size_and_taps_are_the_published_ones() -> None:
    net = LeNet(10)
    assert sum(weight.numel() for weight in net.parameters()) == 62_006
    shapes = tap_shapes(net, ["pool1", "pool2"], torch.zeros(1, 3, 32, 32))
    assert shapes == [(6, 14, 14), (16, 5, 5)]


@pytest.mark.parametrize(("channels", "height", "width"), [(1, 28, 28), (3, 16, 40)])
def test_other_image_sizes_give_logits(channels: int, height: int, width: int) -> None:
    net = LeNet(7, channels, height, width)
    assert net(torch.zeros(2, channels, height, width)).shape == (2, 7)


def test_too_small_images_are_an_error() -> None:
    with pytest.raises(ModelError, match=r"LeNet was given images of 8x32 pixels; it takes 16x16 or more\."):
        LeNet(10, height=8)
