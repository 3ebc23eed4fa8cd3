"""Synthetic data sets: a whole run takes seconds, needs no download, and its model can be shipped.

`shapes` is the in-distribution set; `textures` and `strokes` are OOD sets. All are 16 × 16 RGB. Noise and contrast are
chosen so that a small network misclassifies a few percent of the images, because the scores are also evaluated on errors.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from qualms_training.data.dataset import ImageSet
from qualms_training.errors import DataError

SIDE = 16
_NOISE = (0.02, 0.16)  # standard deviation of the pixel noise, uniform
_BACKGROUND = (0.0, 0.4)  # brightness of the background in each channel, uniform
_CONTRAST = (0.1, 0.6)  # brightness of the figure above the background in each channel, uniform
_ROWS, _COLUMNS = np.mgrid[:SIDE, :SIDE].astype(np.float64)


def draw(name: str, split: str) -> ImageSet:
    """Draw a set by name; the same name and split always give the same images."""
    splits = SETS[name]
    if split not in splits:
        raise DataError(f"Data set {name!r} has no split {split!r}; accepted: {', '.join(splits)}.")
    n, seed = splits[split]
    drawn = _DRAW[name](n, seed)
    return ImageSet(name, split, drawn.images, drawn.labels, drawn.classes)


def draw_shapes(n: int, seed: int) -> ImageSet:
    """Draw n discs, squares, crosses and striped squares of random position, size and colour."""
    rng = _generator("shapes", seed)
    labels = rng.integers(4, size=n)
    down, right = (axis - rng.uniform(5, 10, (n, 1, 1)) for axis in (_ROWS, _COLUMNS))
    radius = rng.uniform(3.5, 6, (n, 1, 1))
    extent = np.maximum(abs(down), abs(right))
    figures = (
        down**2 + right**2 <= radius**2,
        extent <= 0.9 * radius,
        (extent <= radius) & (np.minimum(abs(down), abs(right)) <= 0.3 * radius),
        (extent <= radius) & ((down + SIDE) % 3 < 1.5),
    )
    mask = np.choose(labels[:, None, None], figures).astype(np.float64)
    return _render("shapes", mask, labels, ("disc", "square", "cross", "stripes"), rng)


def draw_textures(n: int, seed: int) -> ImageSet:
    """Draw n textures that fill the image: checkerboards, coarse noise and gradients."""
    rng = _generator("textures", seed)
    labels = rng.integers(3, size=n)
    cell = rng.integers(1, 5, (n, 1, 1))
    blocks = rng.random((n, SIDE // 2, SIDE // 2)).repeat(2, axis=1).repeat(2, axis=2)
    down, right = rng.uniform(-1, 1, (2, n, 1, 1))
    textures = (
        (_ROWS // cell + _COLUMNS // cell) % 2,
        blocks,
        0.5 + (down * (_ROWS / SIDE - 0.5) + right * (_COLUMNS / SIDE - 0.5)),
    )
    mask = np.choose(labels[:, None, None], textures)
    return _render("textures", mask, labels, ("checkerboard", "noise", "gradient"), rng)


def draw_strokes(n: int, seed: int) -> ImageSet:
    """Draw n images of one, two or three straight strokes, thinner than any shape."""
    rng = _generator("strokes", seed)
    labels = rng.integers(3, size=n)
    mask = np.zeros((n, SIDE, SIDE))
    for stroke in range(3):
        start, end = rng.uniform(1, SIDE - 2, (2, 2, n, 1, 1))
        drawn = (stroke <= labels)[:, None, None] & (_distance(start, end) <= 0.8)
        mask = np.maximum(mask, drawn)
    return _render("strokes", mask, labels, ("one", "two", "three"), rng)


def _distance(start: NDArray[np.float64], end: NDArray[np.float64]) -> NDArray[np.float64]:
    """Distance of every pixel from the segment start–end, each (2, N, 1, 1): (N, H, W)."""
    along = end - start
    pixel = np.stack([_ROWS, _COLUMNS])[:, None] - start
    nearest = np.clip((pixel * along).sum(axis=0) / np.maximum((along**2).sum(axis=0), 1e-9), 0, 1)
    return np.asarray(np.sqrt(((pixel - nearest * along) ** 2).sum(axis=0)))


def _render(
    name: str,
    mask: NDArray[np.float64],
    labels: NDArray[np.int64],
    classes: tuple[str, ...],
    rng: np.random.Generator,
) -> ImageSet:
    """Colour background and figure by the mask (N, H, W), add noise and round to uint8."""
    n = len(labels)
    background = rng.uniform(*_BACKGROUND, (n, 1, 1, 3))
    contrast = rng.uniform(*_CONTRAST, (n, 1, 1, 3))
    noise = rng.standard_normal((n, SIDE, SIDE, 3)) * rng.uniform(*_NOISE, (n, 1, 1, 1))
    values = background + contrast * mask[..., None] + noise
    images = np.rint(255 * np.clip(values, 0, 1)).astype(np.uint8)
    return ImageSet(name, "drawn", images, labels, classes)


def _generator(name: str, seed: int) -> np.random.Generator:
    """One random stream per set and seed."""
    return np.random.Generator(np.random.PCG64([*name.encode(), seed]))


_DRAW: Mapping[str, Callable[[int, int], ImageSet]] = MappingProxyType(
    {"shapes": draw_shapes, "textures": draw_textures, "strokes": draw_strokes}
)
SETS: Mapping[str, Mapping[str, tuple[int, int]]] = MappingProxyType(
    {
        "shapes": {"train": (8000, 0), "test": (2000, 1)},
        "textures": {"test": (2000, 1)},
        "strokes": {"test": (2000, 1)},
    }
)
"""splits of each set: number of images and seed"""
