"""Short fingerprints of images, to find out whether two sets share images without storing any."""

import hashlib
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

_BATCH_BYTES = 64 * 2**20
"""pixels in memory at a time, where images are decoded when they are read"""


class ImageBatches(Protocol):
    """N images (N, H, W, C) that are read in slices: an array, or images that are decoded when they are read."""

    @property
    def shape(self) -> tuple[int, ...]: ...  # noqa: D102
    def __len__(self) -> int: ...
    def __getitem__(self, key: slice, /) -> NDArray[np.uint8]: ...


def fingerprints(images: ImageBatches) -> NDArray[np.uint64]:
    """(N,) the first 64 bits of the SHA-256 of each image's pixels (N, H, W, C).

    Files with the same pixels have the same fingerprint, whatever their format; an image that was encoded with losses has
    another one.
    """
    step = max(1, _BATCH_BYTES // max(1, int(np.prod(images.shape[1:]))))
    digests = [
        hashlib.sha256(np.ascontiguousarray(image).data).digest()[:8]
        for start in range(0, len(images), step)
        for image in images[start : start + step]
    ]
    return np.frombuffer(b"".join(digests), "<u8").astype(np.uint64)


def first_of_each(values: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Indices of the first image with each fingerprint, ascending: repetitions of an image are not independent."""
    return np.sort(np.unique(values, return_index=True)[1]).astype(np.int64)
