"""Fast decoding of plain files: JPEG by libjpeg-turbo (simplejpeg), PNG by libspng (pyspng).

The pixels are those of `qualms.images.pillow_decoder`.
"""

import numpy as np
import pyspng
import simplejpeg
from numpy.typing import NDArray
from PIL import Image

from qualms.images.input_spec import InputSpec
from qualms.images.pillow_decoder import (
    TRANSPOSE_FOR_ORIENTATION,
    jpeg_scale,
    resize_to_target,
    to_target,
)
from qualms.images.plain_files import PlainFile

_PNG_FORMATS = {"L": "L", "RGB": "RGB", "P": "RGB", "LA": "LA", "RGBA": "RGBA"}
_COPIED_PIXELS = 2**19
"""Below this size it is faster to copy pixels into an image of three bands than to resize four."""


def decode_plain(data: bytes, plain: PlainFile, spec: InputSpec) -> NDArray[np.uint8] | None:
    """The model's input, (H, W, C), of a plain file; None if the decoder refuses the file.

    Pillow then decides: it accepts some damaged files, and its errors say more.
    """
    try:
        pixels = _decode_jpeg(data, plain, spec) if plain.kind == "jpeg" else _decode_png(data, plain)
    except (ValueError, RuntimeError, MemoryError):
        return None
    if pixels.shape == spec.shape and plain.orientation == 1 and spec.shorter_side is None:
        return pixels
    return _to_input(pixels, plain, spec)


def _decode_jpeg(data: bytes, plain: PlainFile, spec: InputSpec) -> NDArray[np.uint8]:
    """Pixels (H, W, 1|3|4); the fourth band of large images is unused."""
    scale = jpeg_scale(plain.width, plain.height, spec.min_jpeg_side)
    width, height = -(-plain.width // scale), -(-plain.height // scale)
    in_colour = "RGB" if width * height < _COPIED_PIXELS else "RGBX"
    colourspace = "GRAY" if plain.mode == "L" else in_colour
    size = {} if scale == 1 else {"min_height": height, "min_width": width}
    pixels: NDArray[np.uint8] = simplejpeg.decode_jpeg(data, colourspace, **size)
    return pixels


def _decode_png(data: bytes, plain: PlainFile) -> NDArray[np.uint8]:
    """Pixels (H, W, 1|2|3|4)."""
    pixels: NDArray[np.uint8] = pyspng.load(data, _PNG_FORMATS[plain.mode])
    return pixels if pixels.ndim == 3 else pixels[..., np.newaxis]


def _to_input(pixels: NDArray[np.uint8], plain: PlainFile, spec: InputSpec) -> NDArray[np.uint8]:
    """Turn, convert and resize decoded pixels."""
    height, width, bands = pixels.shape
    if plain.kind == "jpeg" and bands == 4:
        image = Image.frombuffer("RGBX", (width, height), pixels, "raw", "RGBX", 0, 1)  # not copied
        if spec.colour == "L":
            image = image.convert("L")
    else:
        image = Image.fromarray(pixels[..., 0] if bands == 1 else pixels)
    if plain.orientation != 1:
        image = image.transpose(TRANSPOSE_FOR_ORIENTATION[plain.orientation])
    if image.mode == "RGBX":
        return np.array(resize_to_target(image, spec))[..., :3].copy()
    return np.array(to_target(image, spec)).reshape(spec.shape)
