"""Noises that corrupt in-distribution images: to stop training early, to weight scores, and to make the Corrupted set.

Permutation, blur and contrast are the paper's; they destroy local structure. Shuffle and mosaic keep local structure
and destroy the arrangement of the parts, so they resemble OOD images drawn in the same style. Blend keeps both and makes
the class ambiguous, so it resembles OOD images of a similar class.

To add a noise, write a function and append it to `NOISES`; its position there is part of its random seed, and all noises
are used to weight the fused score. Add it to `CORRUPTION` only if the Corrupted set is to change: the published figures are
about the present one. After either change delete the saved results of `qualms tables`: their
fingerprint does not contain `NOISES` or the noise of the Corrupted set, so they would be used again.

Each noise takes uint8 images (N, H, W, C) and returns images of the same shape; every image has its own random draw.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

BLUR_SIGMA = (1.0, 2.5)  # pixels, uniform
CONTRAST_GAMMA = (5.0, 30.0)  # slope of the sigmoid, uniform
TILES = 4  # per side


def permutation(images: NDArray[np.uint8], rng: np.random.Generator) -> NDArray[np.uint8]:
    """Shuffle the pixels of each image, moving all channels of a pixel together: colours stay, structure is lost."""
    n, height, width, channels = images.shape
    flat = images.reshape(n, height * width, channels)
    shuffled = np.empty_like(flat)
    for index in range(n):
        shuffled[index] = flat[index, rng.permutation(height * width)]
    return shuffled.reshape(images.shape)


def blur(images: NDArray[np.uint8], rng: np.random.Generator) -> NDArray[np.uint8]:
    """Blur each image with a Gaussian, also across its channels, as in the authors' code."""
    from scipy.ndimage import gaussian_filter  # noqa: PLC0415  # recipes can be listed without scipy

    blurred = np.empty_like(images)
    for index, sigma in enumerate(rng.uniform(*BLUR_SIGMA, size=len(images))):
        blurred[index] = np.rint(gaussian_filter(images[index].astype(np.float32), sigma))
    return blurred


def contrast(images: NDArray[np.uint8], rng: np.random.Generator) -> NDArray[np.uint8]:
    """Raise the contrast of each image: x → sigmoid(γ(x − 0.5)) on [0, 1]."""
    levels = np.arange(256) / 255 - 0.5
    result = np.empty_like(images)
    for index, gamma in enumerate(rng.uniform(*CONTRAST_GAMMA, size=len(images))):
        table = np.rint(255 / (1 + np.exp(-gamma * levels))).astype(np.uint8)
        result[index] = table[images[index]]
    return result


def shuffle(images: NDArray[np.uint8], rng: np.random.Generator) -> NDArray[np.uint8]:
    """Shuffle the 4 × 4 tiles of each image: strokes and textures stay, their arrangement is lost."""
    shuffled = images.copy()
    rows, columns = (_slices(size, TILES) for size in images.shape[1:3])
    tiles = [(row, column) for row in rows for column in columns]
    for index in range(len(images)):
        for (row, column), source in zip(tiles, rng.permutation(len(tiles)), strict=True):
            shuffled[index, row, column] = images[index][tiles[source]]
    return shuffled


def mosaic(images: NDArray[np.uint8], rng: np.random.Generator) -> NDArray[np.uint8]:
    """Compose each image of quadrants of other images: each part is in-distribution, the whole is not."""
    composed = images.copy()
    for row in _slices(images.shape[1], 2):
        for column in _slices(images.shape[2], 2):
            composed[:, row, column] = images[rng.permutation(len(images)), row, column]
    return composed


def blend(images: NDArray[np.uint8], rng: np.random.Generator) -> NDArray[np.uint8]:
    """Average each image with another one."""
    others = images[rng.permutation(len(images))]
    return ((images.astype(np.uint16) + others) // 2).astype(np.uint8)


def _slices(size: int, count: int) -> list[slice]:
    """`count` equal slices of an axis of length `size`; up to `count` − 1 pixels at its end are in no slice."""
    width = size // count
    return [slice(start * width, (start + 1) * width) for start in range(count)]


Noise = Callable[[NDArray[np.uint8], np.random.Generator], NDArray[np.uint8]]
NOISES: Mapping[str, Noise] = MappingProxyType(
    {noise.__name__: noise for noise in (permutation, blur, contrast, shuffle, mosaic, blend)}
)
CORRUPTION = ("permutation", "blur", "contrast")
"""the chain of noises that makes the Corrupted set, and by default the noisy validation images"""


def check_noise(name: str) -> str:
    """`name` unchanged; ValueError if there is no such noise."""
    if name not in NOISES:
        raise ValueError(f"noise {name!r} is not known; accepted are {', '.join(NOISES)}")
    return name


def apply_noise(images: NDArray[np.uint8], names: Sequence[str], rng: np.random.Generator) -> NDArray[np.uint8]:
    """Apply the named noises one after the other, in the given order."""
    for noise in [NOISES[check_noise(name)] for name in names]:
        images = noise(images, rng)
    return images


def corrupt(images: NDArray[np.uint8], rng: np.random.Generator) -> NDArray[np.uint8]:
    """Corrupt images as the Corrupted set does."""
    return apply_noise(images, CORRUPTION, rng)
