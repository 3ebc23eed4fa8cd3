"""Short fingerprints of images, to find out whether two sets share images without storing any."""

import hashlib

import numpy as np
from numpy.typing import NDArray


def fingerprints(images: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """(N,) the first 64 bits of the SHA-256 of each image's pixels (N, H, W, C).

    Files with the same pixels have the same fingerprint, whatever their format; an image that was encoded with losses has
    another one.
    """
    digests = [hashlib.sha256(np.ascontiguousarray(image).data).digest()[:8] for image in images]
    return np.frombuffer(b"".join(digests), "<u8").astype(np.uint64)


def first_of_each(values: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Indices of the first image with each fingerprint, ascending: repetitions of an image are not independent."""
    return np.sort(np.unique(values, return_index=True)[1]).astype(np.int64)
