"""Golden vectors: test images drawn with integer arithmetic, identical on every machine, and the graph's outputs for them.

A bundle stores the number of these images, their digest and the graph's outputs at export. The service compares its own
outputs with the stored ones before it is ready, which detects a runtime, provider or platform that computes different
results.
"""

import hashlib

import numpy as np
from numpy.typing import NDArray

from qualms.images.input_spec import InputSpec

COUNT = 8


def draw(spec: InputSpec, count: int = COUNT) -> NDArray[np.uint8]:
    """Draw images (count, H, W, C) that cycle through flat, ramp, stripes, checks, disc and hash noise."""
    y, x, c = np.indices(
        spec.shape, dtype=np.int64, sparse=True
    )  # each with one axis, so that patterns need little memory
    y256, x256 = y * 256 // spec.height, x * 256 // spec.width
    radius = (y256 - 128) ** 2 + (x256 - 128) ** 2
    images = np.empty((count, *spec.shape), np.uint8)
    for index in range(count):
        salt = 37 * index + 61 * c
        match index % 6:
            case 0:
                pattern = np.full_like(x, 255 * (index // 6 % 2))
            case 1:
                pattern = x256 + salt
            case 2:
                pattern = 255 * ((y256 // 32 + salt) % 2)
            case 3:
                pattern = 255 * ((y256 // 64 + x256 // 64 + c) % 2)
            case 4:
                pattern = np.where(radius < 4000 + 911 * index, 255 - salt % 97, 0)
            case _:
                pattern = _hash(x + spec.width * (y + spec.height * (c + 3 * index)))
        images[index] = pattern % 256
    return images


def digest(images: NDArray[np.uint8]) -> str:
    """SHA-256 of shape and pixels, to distinguish changed inputs from changed outputs."""
    return hashlib.sha256(repr(images.shape).encode() + images.tobytes()).hexdigest()


def _hash(value: NDArray[np.int64]) -> NDArray[np.int64]:
    """32-bit integer hash; every intermediate value is below 2^63."""
    value = (value * 2654435761 + 104729) % (1 << 32)
    value ^= value >> 15
    value = value * 73244475 % (1 << 32)
    return value >> 13
