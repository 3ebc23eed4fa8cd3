"""VGG16 as in the paper: batch normalisation once per block, two linear layers, 14.9 M weights."""

import pytest
import torch
from torch import nn

from qualms_training.errors import ModelError
from qualms_training.meta.taps.tapped import tap_shapes
from qualms_training.models.architectures.vgg import VGG16


def test_size_layers_and_taps_are_the_published_ones() -> None:
    net = VGG16(10)
    assert sum(weight.numel() for weight in net.parameters()) == 14_851_530
    assert sum(isinstance(module, nn.Conv2d) for module in net.modules()) == 13
    assert sum(isinstance(module, nn.BatchNorm2d) for module in net.modules()) == 5
    names = [f"block{number}.pool" for number in range(1, 6)]
    shapes = tap_shapes(net, names, torch.zeros(1, 3, 32, 32))
    assert shapes == [(64, 16, 16), (128, 8, 8), (256, 4, 4), (512, 2, 2), (512, 1, 1)]


def test_batch_normalisation_follows_only_the_last_convolution_of_a_block() -> None:
    with torch.device("meta"):
        block = VGG16(10).block3
    names = [name for name, _ in block.named_children()]
    assert names == ["conv1", "relu1", "conv2", "relu2", "conv3", "bn", "relu3", "pool"]


def test_other_image_sizes_give_logits() -> None:
    with torch.device("meta"):
        assert VGG16(7, 1, 64, 70)(torch.zeros(2, 1, 64, 70)).shape == (2, 7)


def test_too_small_images_are_an_error() -> None:
    with pytest.raises(ModelError, match=r"VGG16 was given images of 28x28 pixels; it takes 32x32 or more\."):
        VGG16(10, height=28, width=28)
