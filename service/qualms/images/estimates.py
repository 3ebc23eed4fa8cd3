"""What decoding an image takes, estimated from its headers: memory, so that all decodes together stay within a budget, and
time, so that a request that cannot be answered in time is refused when it arrives.

The memory of files that are decoded in worker processes is enforced there, so it must be enough for every accepted file. The
time is corrected by experience; only the relation between files matters.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from qualms.images.input_spec import InputSpec
from qualms.images.observed import UNKNOWN, read_size
from qualms.images.pillow_decoder import MAX_ASPECT_RATIO, jpeg_scale
from qualms.images.plain_files import PlainFile

_MB = 2**20
_BASE_BYTES = 4 * _MB
"""memory that a thread takes for any file"""
_WORKER_BASE_BYTES = 16 * _MB
"""address space that a worker takes for any file, mostly for libraries and unused parts of its heap"""
_ARRAY_BYTES_PER_PIXEL = 8
_JPEG_BYTES_PER_PIXEL = 4
_COEFFICIENT_BYTES_PER_PIXEL = 6
"""three components of two bytes, if the coefficients of the whole image are kept"""
_WORKER_BYTES_PER_PIXEL = {"png": 10, "jpeg": 14, "webp": 19, "bmp": 8, "gif": 10, "tiff": 18}
"""Pillow's peak for the least favourable kind of file, with conversion to opaque RGB"""
_THREAD_SECONDS = (50e-6, 10e-9)
"""for a file, and for each pixel before and after resizing"""
_BUFFERED_FACTOR = 2.5
"""JPEG files with several scans take so much longer"""
_WORKER_SECONDS = (1e-3, 40e-9)


class Estimate(NamedTuple):
    """What decoding takes."""

    pixels: int
    memory: int
    """bytes"""
    seconds: float
    is_certain: bool = True
    """whether the size of the image could be read from its headers"""


def estimate(image: bytes | NDArray[np.uint8], plain: PlainFile | None, spec: InputSpec, max_pixels: int) -> Estimate:
    """Estimate what an image takes: a file with the result of `read_plain`, or pixels (H, W) or (H, W, C)."""
    if not isinstance(image, bytes):
        pixels = image.shape[0] * image.shape[1]
        seconds = _seconds(_THREAD_SECONDS, pixels + resized_pixels(image, plain, spec))
        return Estimate(pixels, _BASE_BYTES + _ARRAY_BYTES_PER_PIXEL * pixels, seconds)
    if plain is None:
        kind, width, height = read_size(image)
        pixels = width * height or max_pixels
        if kind == UNKNOWN or pixels > max_pixels:  # it will be refused when it is opened
            pixels = 0
        memory = _WORKER_BASE_BYTES + 2 * len(image) + _WORKER_BYTES_PER_PIXEL.get(kind, 0) * pixels
        return Estimate(pixels, memory, _seconds(_WORKER_SECONDS, pixels), is_certain=width * height > 0)
    pixels = plain.width * plain.height
    scale = jpeg_scale(plain.width, plain.height, spec.min_jpeg_side) if plain.kind == "jpeg" else 1
    copies = 1 + (plain.orientation != 1) + (spec.colour == "L") / 4
    memory = _BASE_BYTES + int(copies * _JPEG_BYTES_PER_PIXEL * (pixels // scale**2))
    if plain.is_buffered:
        memory += _COEFFICIENT_BYTES_PER_PIXEL * pixels
    factor = _BUFFERED_FACTOR if plain.is_buffered else 1.0
    return Estimate(pixels, memory, _seconds(_THREAD_SECONDS, factor * pixels + resized_pixels(image, plain, spec)))


def resized_pixels(image: bytes | NDArray[np.uint8], plain: PlainFile | None, spec: InputSpec) -> int:
    """Pixels of the resized image before it is cropped; 0 if nothing is resized, or if the size is not known."""
    if plain is not None:
        width, height = plain.width, plain.height
    elif isinstance(image, bytes):
        return 0
    else:
        height, width = image.shape[:2]
    if spec.shorter_side is not None:
        ratio = min(max(width, height) / min(width, height), MAX_ASPECT_RATIO)
        return int(spec.shorter_side**2 * ratio)
    return 0 if (width, height) == (spec.width, spec.height) else spec.width * spec.height


def _seconds(model: tuple[float, float], pixels: float) -> float:
    return model[0] + model[1] * pixels
