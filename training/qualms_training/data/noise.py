"""The noises that stand in for unknown data: they end training early and make the Corrupted test set.

Permutation, blur and contrast are the paper's. They destroy what is local; shuffle and mosaic keep it and destroy
the figure, which is what strangers that are drawn with the same pen have in common. Blend keeps both and makes the
class unclear, as strangers of a kindred class do.

Each takes uint8 images (N, H, W, C) and returns as many of the same shape, every image with its own draw.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import gaussian_filter

from qualms_training.errors import DataError

BLUR_SIGMA = (1.0, 2.5)  # pixels, uniform
CONTRAST_GAMMA = (5.0, 30.0)  # slope of the sigmoid, uniform
TILES = 4  # to a side


def permutation(images: NDArray[np.uint8], rng: np.random.Generator) -> NDArray[np.uint8]:
    """Shuffle the pixels of each image, all channels of a pixel together: colours stay, structure goes."""
    n, height, width, channels = images.shape
    flat = images.reshape(n, height * width, channels)
    shuffled = np.empty_like(flat)
    for index in range(n):
        shuffled[index] = flat[index, rng.permutation(height * width)]
    return shuffled.reshape(images.shape)


def blur(images: NDArray[np.uint8], rng: np.random.Generator) -> NDArray[np.uint8]:
    """Blur each image with a Gaussian, across its channels too, as the paper's authors do."""
    blurred = np.empty_like(images)
    for index, sigma in enumerate(rng.uniform(*BLUR_SIGMA, size=len(images))):
        blurred[index] = np.rint(gaussian_filter(images[index].astype(np.float32), sigma))
    return blurred


def contrast(images: NDArray[np.uint8], rng: np.random.Generator) -> NDArray[np.uint8]:
    """Push each image towards black and white: x → sigmoid(γ(x − 0.5)) on [0, 1]."""
    levels = np.arange(256) / 255 - 0.5
    pushed = np.empty_like(images)
    for index, gamma in enumerate(rng.uniform(*CONTRAST_GAMMA, size=len(images))):
        table = np.rint(255 / (1 + np.exp(-gamma * levels))).astype(np.uint8)
        pushed[index] = table[images[index]]
    return pushed


def shuffle(images: NDArray[np.uint8], rng: np.random.Generator) -> NDArray[np.uint8]:
    """Shuffle the tiles of each image, four to a side: strokes and textures stay, the figure goes."""
    shuffled = images.copy()
    rows, columns = (_tiles(size, TILES) for size in images.shape[1:3])
    places = [(row, column) for row in rows for column in columns]
    for index in range(len(images)):
        for (row, column), source in zip(places, rng.permutation(len(places)), strict=True):
            shuffled[index, row, column] = images[index][places[source]]
    return shuffled


def mosaic(images: NDArray[np.uint8], rng: np.random.Generator) -> NDArray[np.uint8]:
    """Compose each image of quadrants of other images: every part is right, the whole is not."""
    composed = images.copy()
    for row in _tiles(images.shape[1], 2):
        for column in _tiles(images.shape[2], 2):
            composed[:, row, column] = images[rng.permutation(len(images)), row, column]
    return composed


def blend(images: NDArray[np.uint8], rng: np.random.Generator) -> NDArray[np.uint8]:
    """Lay another image over each, both half transparent: everything is there, twice."""
    others = images[rng.permutation(len(images))]
    return ((images.astype(np.uint16) + others) // 2).astype(np.uint8)


def _tiles(size: int, count: int) -> list[slice]:
    """`count` equal slices from the start of an axis; what is left over at its end stays as it is."""
    width = size // count
    return [slice(start * width, (start + 1) * width) for start in range(count)]


Noise = Callable[[NDArray[np.uint8], np.random.Generator], NDArray[np.uint8]]
NOISES: Mapping[str, Noise] = MappingProxyType(
    {
        "permutation": permutation,
        "blur": blur,
        "contrast": contrast,
        "shuffle": shuffle,
        "mosaic": mosaic,
        "blend": blend,
    }
)


def apply_noise(images: NDArray[np.uint8], kinds: Sequence[str], rng: np.random.Generator) -> NDArray[np.uint8]:
    """Apply the named noises one after the other, in the order given."""
    for kind in kinds:
        if kind not in NOISES:
            raise DataError(f"Noise {kind!r} is not known; accepted are {', '.join(NOISES)}.")
    for kind in kinds:
        images = NOISES[kind](images, rng)
    return images


def corrupt(images: NDArray[np.uint8], rng: np.random.Generator) -> NDArray[np.uint8]:
    """Make the Corrupted set: permutation, then blur, then contrast."""
    return apply_noise(images, ("permutation", "blur", "contrast"), rng)
