"""Fast decoding of plain files: JPEG by libjpeg-turbo (simplejpeg), PNG by libspng (pyspng).

The pixels are those of `qualms.images.pillow_decoder`.
"""

import numpy as np
import pyspng
import simplejpeg
from numpy.typing import NDArray
from PIL import Image

from qualms.images.input_spec import InputSpec
from qualms.images.pillow_decoder import TRANSPOSE_FOR_ORIENTATION, jpeg_scale, to_target
from qualms.images.plain_files import PlainFile

_PNG_FORMATS = {"L": "L", "RGB": "RGB", "P": "RGB", "LA": "LA", "RGBA": "RGBA"}


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
    """Pixels (H, W, 1|3|4); the fourth band is unused, and spares a copy before pixels are converted or resized."""
    scale = jpeg_scale(plain.width, plain.height, spec.min_jpeg_side)
    width, height = -(-plain.width // scale), -(-plain.height // scale)
    in_colour = "RGB" if (height, width, 3) == spec.shape else "RGBX"
    size = {} if scale == 1 else {"min_height": height, "min_width": width}
    pixels: NDArray[np.uint8] = simplejpeg.decode_jpeg(data, "GRAY" if plain.mode == "L" else in_colour, **size)
    return pixels


def _decode_png(data: bytes, plain: PlainFile) -> NDArray[np.uint8]:
    """Pixels (H, W, 1|2|3|4)."""
    pixels: NDArray[np.uint8] = pyspng.load(data, _PNG_FORMATS[plain.mode])
    return pixels if pixels.ndim == 3 else pixels[..., np.newaxis]


def _to_input(pixels: NDArray[np.uint8], plain: PlainFile, spec: InputSpec) -> NDArray[np.uint8]:
    """Turn, convert and resize decoded pixels."""
    if plain.kind == "jpeg" and pixels.shape[2] == 4:
        image = _rgb_image(pixels)
    else:
        image = Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels)
    if plain.orientation != 1:
        image = image.transpose(TRANSPOSE_FOR_ORIENTATION[plain.orientation])
    return np.array(to_target(image, spec)).reshape(spec.shape)


def _mapped(pixels: NDArray[np.uint8]) -> Image.Image:
    """An RGB image that uses the memory of RGBX pixels, (H, W, 4): Pillow stores RGB in the same way.

    `Image.frombuffer` uses the same function, but only for modes in which files store pixels as Pillow does.
    """
    size = pixels.shape[1], pixels.shape[0]
    return Image.new("RGB", (0, 0))._new(Image.core.map_buffer(pixels, size, "raw", 0, ("RGB", 0, 1)))  # type: ignore[attr-defined]


def _copied(pixels: NDArray[np.uint8]) -> Image.Image:
    """The same with a copy, by documented functions."""
    return Image.fromarray(np.ascontiguousarray(pixels[..., :3]))


def _mapping_works() -> bool:
    """Whether this version of Pillow has the undocumented function, and stores pixels as expected."""
    pixels = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
    try:
        return np.array_equal(np.asarray(_mapped(pixels)), pixels[..., :3])
    except (AttributeError, TypeError, ValueError):
        return False


_rgb_image = _mapped if _mapping_works() else _copied
