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
from typing import overload

import numpy as np
from numpy.typing import NDArray

from qualms_training.data.lazy_images import LazyImages, Pixels, combined_digest

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
    for row, column in _quadrants(images.shape[1:3]):
        composed[:, row, column] = images[rng.permutation(len(images)), row, column]
    return composed


def blend(images: NDArray[np.uint8], rng: np.random.Generator) -> NDArray[np.uint8]:
    """Average each image with another one."""
    return _average(images, images[rng.permutation(len(images))])


def _average(images: NDArray[np.uint8], others: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return ((images.astype(np.uint16) + others) // 2).astype(np.uint8)


def _quadrants(sides: tuple[int, ...]) -> list[tuple[slice, slice]]:
    rows, columns = (_slices(size, 2) for size in sides)
    return [(row, column) for row in rows for column in columns]


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


@overload
def apply_noise(images: NDArray[np.uint8], names: Sequence[str], rng: np.random.Generator) -> NDArray[np.uint8]: ...
@overload
def apply_noise(images: LazyImages, names: Sequence[str], rng: np.random.Generator) -> LazyImages: ...
def apply_noise(images: Pixels, names: Sequence[str], rng: np.random.Generator) -> Pixels:
    """Apply the named noises one after the other, in the given order.

    The noises of a `LazyImages` are applied when an image is read; its draws depend on `rng` and the image's position alone,
    and differ from those of the same images in memory.
    """
    noises = [NOISES[check_noise(name)] for name in names]
    if isinstance(images, LazyImages):
        return _noisy_when_read(images, names, int(rng.integers(2**63)))
    for noise in noises:
        images = noise(images, rng)
    return images


@overload
def corrupt(images: NDArray[np.uint8], rng: np.random.Generator) -> NDArray[np.uint8]: ...
@overload
def corrupt(images: LazyImages, rng: np.random.Generator) -> LazyImages: ...
def corrupt(images: Pixels, rng: np.random.Generator) -> Pixels:
    """Corrupt images as the Corrupted set does."""
    return apply_noise(images, CORRUPTION, rng)


def _noisy_when_read(images: LazyImages, names: Sequence[str], seed: int) -> LazyImages:
    def read(position: int) -> NDArray[np.uint8]:
        return _noisy_image(images, position, names, np.random.default_rng((seed, position)))

    def digest() -> str:
        return combined_digest("noise", images.digest(), repr(list(names)), str(seed))

    _, height, width, channels = images.shape
    return LazyImages(read, np.arange(len(images)), (height, width, channels), digest)


def _noisy_image(
    images: LazyImages, position: int, names: Sequence[str], rng: np.random.Generator
) -> NDArray[np.uint8]:
    """One image (H, W, C) with noises; `mosaic` and `blend` draw other images, with the noises before them in the chain."""
    if not names:
        return images.one(position)
    *earlier, last = names

    def another() -> NDArray[np.uint8]:
        return _noisy_image(images, int(rng.integers(len(images))), earlier, rng)

    image = _noisy_image(images, position, earlier, rng)
    if last == mosaic.__name__:
        composed = image.copy()
        for part in _quadrants(image.shape[:2]):
            composed[part] = another()[part]
        return composed
    if last == blend.__name__:
        return _average(image, another())
    noisy: NDArray[np.uint8] = NOISES[last](image[np.newaxis], rng)[0]
    return noisy
