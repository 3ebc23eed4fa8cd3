"""Layouts follow from the shape of an output and the aspect ratio of the image."""

import pytest
import torch

from qualms_training.meta.taps.tap_layout import Layout, canonical, canonical_shape, grid_of, layout_of


@pytest.mark.parametrize(
    ("shape", "image", "layout", "grid"),
    [
        ((768,), (224, 224), "flat", None),
        ((768, 1), (224, 224), "flat", None),
        ((64, 56, 56), (224, 224), "channels-first", (56, 56)),
        ((2048, 1, 1), (224, 224), "channels-first", (1, 1)),
        ((56, 56, 96), (224, 224), "channels-last", (56, 56)),
        ((96, 96, 128), (384, 384), "channels-last", (96, 96)),  # 96 x 128 is also close to the aspect ratio
        ((56, 56, 56), (224, 224), "channels-first", (56, 56)),
        ((16, 10, 6), (32, 20), "channels-first", (10, 6)),  # 16 x 10 has exactly the image's aspect ratio, by chance
        ((14, 28, 192), (224, 448), "channels-last", (14, 28)),
        ((196, 768), (224, 224), "tokens", (14, 14)),
        ((392, 768), (224, 448), "tokens", (14, 28)),
        ((197, 768), (224, 224), "tokens", None),  # with a class token
        ((4, 8, 16, 16), (64, 64), "other", None),
    ],
)
def test_layout_and_grid(
    shape: tuple[int, ...], image: tuple[int, int], layout: Layout, grid: tuple[int, int] | None
) -> None:
    assert layout_of(shape, image) == layout
    assert grid_of(shape, image) == grid


def test_an_output_larger_than_the_image_has_no_grid() -> None:
    assert grid_of((3, 64, 64), (32, 32)) is None


@pytest.mark.parametrize("shape", [(8, 8, 24), (24, 8, 8), (65, 24), (24,)])
def test_only_channels_last_is_permuted(shape: tuple[int, ...]) -> None:
    feature = torch.randn(2, *shape)
    expected = feature.permute(0, 3, 1, 2) if shape == (8, 8, 24) else feature
    assert torch.equal(canonical(feature, (32, 32)), expected)
    assert canonical_shape(shape, (32, 32)) == expected.shape[1:]
