"""Golden inputs: images drawn by integer arithmetic alone, the same on every machine and for all time.

A bundle keeps only their number, their digest and the outputs they gave when the file was exported, so a
runtime, a provider or a platform that computes something else is found out before it answers anybody.
"""

import hashlib

import numpy as np
from numpy.typing import NDArray

from qualms.images.input_spec import InputSpec

COUNT = 8


def draw(spec: InputSpec, count: int = COUNT) -> NDArray[np.uint8]:
    """`count` images (count, H, W, C): flat, ramps, stripes, checks, discs and hash noise, in turn."""
    y, x, c = np.indices(spec.shape, dtype=np.int64)
    y256, x256 = y * 256 // spec.height, x * 256 // spec.width
    radius = (y256 - 128) ** 2 + (x256 - 128) ** 2
    images = []
    for index in range(count):
        salt = 37 * index + 61 * c
        patterns = (
            np.full_like(x, 255 * (index // 6 % 2)),
            x256 + salt,
            255 * ((y256 // 32 + salt) % 2),
            255 * ((y256 // 64 + x256 // 64 + c) % 2),
            np.where(radius < 4000 + 911 * index, 255 - salt % 97, 0),
            _hash(x + spec.width * (y + spec.height * (c + 3 * index))),
        )
        images.append(patterns[index % len(patterns)])
    return (np.stack(images) % 256).astype(np.uint8)


def digest(images: NDArray[np.uint8]) -> str:
    """SHA-256 of shape and pixels, so that a change of the drawing cannot pass for a change of the model."""
    return hashlib.sha256(repr(images.shape).encode() + images.tobytes()).hexdigest()


def _hash(value: NDArray[np.int64]) -> NDArray[np.int64]:
    """A 32-bit integer mix; every step stays below 2^63."""
    value = (value * 2654435761 + 104729) % (1 << 32)
    value ^= value >> 15
    value = value * 73244475 % (1 << 32)
    return value >> 13
