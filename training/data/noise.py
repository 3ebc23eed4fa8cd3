"""The noises that stand in for unknown data: they end training early and make the Corrupted test set.

Each takes uint8 images (N, H, W, C) and returns as many of the same shape, every image with its own draw.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import gaussian_filter

from training.errors import DataError

BLUR_SIGMA = (1.0, 2.5)  # pixels, uniform
CONTRAST_GAMMA = (5.0, 30.0)  # slope of the sigmoid, uniform


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


Noise = Callable[[NDArray[np.uint8], np.random.Generator], NDArray[np.uint8]]
NOISES: Mapping[str, Noise] = MappingProxyType(
    {"permutation": permutation, "blur": blur, "contrast": contrast}
)


def apply_noise(
    images: NDArray[np.uint8], kinds: Sequence[str], rng: np.random.Generator
) -> NDArray[np.uint8]:
    """Apply the named noises one after the other, in the order given."""
    for kind in kinds:
        if kind not in NOISES:
            raise DataError(f"Noise {kind!r} is not known; accepted are {', '.join(NOISES)}.")
    for kind in kinds:
        images = NOISES[kind](images, rng)
    return images


def corrupt(images: NDArray[np.uint8], rng: np.random.Generator) -> NDArray[np.uint8]:
    """Make the Corrupted set: permutation, then blur, then contrast."""
    return apply_noise(images, tuple(NOISES), rng)
