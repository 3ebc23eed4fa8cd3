"""The layout of a tap: which axes of a module's output are space, channels or tokens."""

import math
from typing import Literal

from torch import Tensor

Layout = Literal["flat", "channels-first", "channels-last", "tokens", "other"]
"""(N, D), (N, C, H, W), (N, H, W, C), (N, T, D), and any other number of axes"""

ASPECT = 1.5
"""axes whose aspect ratio differs from the image's by more than this factor are not its height and width"""


def layout_of(shape: tuple[int, ...], image: tuple[int, int]) -> Layout:
    """The layout of an output of this shape, without the batch axis, for images of this height and width.

    Two axes of which one has length 1 are flat. Three axes are channels-last if the first two fit the aspect ratio of
    the image, and fit it better than the last two. Otherwise they are channels-first.
    """
    if len(shape) < 3:
        return "flat" if len(shape) == 1 or 1 in shape else "tokens"
    if len(shape) > 3:
        return "other"
    first, last = (shape[1], shape[2]), (shape[0], shape[1])
    if not fits(last, image) or _differs_by_rounding(first, image):
        return "channels-first"
    is_closer = _stretch(last, image) < _stretch(first, image)
    return "channels-last" if is_closer or not fits(first, image) else "channels-first"


def grid_of(shape: tuple[int, ...], image: tuple[int, int]) -> tuple[int, int] | None:
    """Height and width of an output of this shape, without the batch axis; None if it is not laid out as the image.

    Tokens are laid out as the image if their number is that of a grid of its aspect ratio, so without a class token.
    """
    layout = layout_of(shape, image)
    if layout == "tokens":
        rows = max(1, round(math.sqrt(shape[0] * image[0] / image[1])))
        size = (rows, shape[0] // rows)
        return size if math.prod(size) == shape[0] and fits(size, image) else None
    if layout in ("flat", "other"):
        return None
    size = (shape[0], shape[1]) if layout == "channels-last" else (shape[1], shape[2])
    return size if fits(size, image) else None


def canonical(feature: Tensor, image: tuple[int, int]) -> Tensor:
    """A feature (N, ...) with channels-last permuted to channels-first (N, C, H, W); all other layouts unchanged."""
    is_last = layout_of(tuple(feature.shape[1:]), image) == "channels-last"
    return feature.permute(0, 3, 1, 2) if is_last else feature


def canonical_shape(shape: tuple[int, ...], image: tuple[int, int]) -> tuple[int, ...]:
    """The shape that `canonical` gives an output of this shape, both without the batch axis."""
    return (shape[2], shape[0], shape[1]) if layout_of(shape, image) == "channels-last" else shape


def fits(size: tuple[int, int], image: tuple[int, int]) -> bool:
    """Whether (height, width) has about the aspect ratio of the image and is not larger."""
    return _stretch(size, image) <= math.log(ASPECT) + 1e-9 and size <= image  # some models enlarge their input first


def _stretch(size: tuple[int, int], image: tuple[int, int]) -> float:
    """Absolute logarithm of the ratio of the two aspect ratios; infinite if an axis is empty."""
    return abs(math.log(size[0] * image[1] / (size[1] * image[0]))) if min(size) > 0 else math.inf


def _differs_by_rounding(size: tuple[int, int], image: tuple[int, int]) -> bool:
    """Whether `size` is the image's, scaled and rounded to whole pixels."""
    return abs(size[0] * image[1] - size[1] * image[0]) <= max(image) and fits(size, image)
