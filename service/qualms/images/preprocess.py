"""Preprocessing from an image file or array to a model's input, the same for training and serving.

Plain PNG and JPEG files are decoded by fast decoders, all others by Pillow; the pixels are the same. See
`qualms.images.pillow_decoder` for how transparency, orientation, 16-bit values and colour profiles are treated.
"""

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from qualms.errors import ImageError
from qualms.images.fast_decoders import decode_plain
from qualms.images.input_spec import InputSpec
from qualms.images.pillow_decoder import MAX_PIXELS, MAX_SIDE, check_size, decode, to_target
from qualms.images.plain_files import PlainFile, read_plain

ImageInput: TypeAlias = bytes | NDArray[np.uint8]
"""the bytes of an image file, or pixels of shape (H, W) or (H, W, 1|3|4)"""

_KEPT_BLOCKS = 4
"""blocks of 16 MB that Pillow keeps"""


def warm_up() -> None:
    """Load Pillow's decoders now, so that the first image is not delayed, and let Pillow keep some memory.

    Without that, the kernel clears the memory of every large image anew, and for tens of milliseconds no other thread runs.
    """
    Image.init()
    Image.core.set_blocks_max(_KEPT_BLOCKS)  # type: ignore[attr-defined]  # documented, but not typed


def preprocess(
    data: bytes, spec: InputSpec, *, max_pixels: int = MAX_PIXELS, max_side: int = MAX_SIDE
) -> NDArray[np.uint8]:
    """Convert the bytes of an image file to a model's input, (H, W, C)."""
    plain = read_plain(data)
    pixels = None if plain is None else preprocess_plain(data, plain, spec, max_pixels=max_pixels, max_side=max_side)
    return preprocess_with_pillow(data, spec, max_pixels=max_pixels, max_side=max_side) if pixels is None else pixels


def preprocess_plain(
    data: bytes, plain: PlainFile, spec: InputSpec, *, max_pixels: int = MAX_PIXELS, max_side: int = MAX_SIDE
) -> NDArray[np.uint8] | None:
    """As `preprocess`, for the result of `read_plain`; None if the fast decoder refuses the file."""
    check_size(plain.width, plain.height, max_pixels, max_side)
    return decode_plain(data, plain, spec)


def preprocess_with_pillow(
    data: bytes, spec: InputSpec, *, max_pixels: int = MAX_PIXELS, max_side: int = MAX_SIDE
) -> NDArray[np.uint8]:
    """As `preprocess`, with Pillow alone: the reference for the fast decoders."""
    return conform(decode(data, max_pixels=max_pixels, max_side=max_side, min_jpeg_side=spec.min_jpeg_side), spec)


def conform(image: Image.Image, spec: InputSpec) -> NDArray[np.uint8]:
    """Convert an image of any mode and size to a model's colour mode and size, (H, W, C)."""
    return np.array(to_target(image, spec)).reshape(spec.shape)


def preprocess_array(
    array: NDArray[np.uint8], spec: InputSpec, *, max_pixels: int = MAX_PIXELS, max_side: int = MAX_SIDE
) -> NDArray[np.uint8]:
    """Convert pixels, (H, W) or (H, W, 1|3|4), to a model's input, (H, W, C); an array that already fits is returned."""
    _check_array(array, "An image", "(H, W) or (H, W, C)", dimensions=2)
    check_size(array.shape[1], array.shape[0], max_pixels, max_side)
    return array if _fits(array.shape, spec) else conform(from_array(array), spec)


def preprocess_batch(images: NDArray[np.uint8], spec: InputSpec) -> NDArray[np.uint8]:
    """Convert N images, (N, H, W) or (N, H, W, 1|3|4), to (N, H, W, C); an array that already fits is returned.

    The pixels are the same as those of `preprocess_array` for each image.
    """
    _check_array(images, "A batch of images", "(N, H, W) or (N, H, W, C)", dimensions=3)
    planes = images if images.ndim == 4 else images[..., np.newaxis]
    if _fits(planes.shape[1:], spec):
        return planes
    if _fits((*planes.shape[1:3], spec.channels), spec) and planes.shape[3] == 1:
        return np.repeat(planes, spec.channels, axis=-1)
    result = np.empty((len(images), *spec.shape), np.uint8)
    for index, image in enumerate(images):
        result[index] = conform(from_array(image), spec)
    return result


def from_array(array: NDArray[np.uint8]) -> Image.Image:
    """The image of pixels of shape (H, W) or (H, W, 1|3|4)."""
    return Image.fromarray(array[..., 0] if array.ndim == 3 and array.shape[-1] == 1 else array)


def _fits(shape: tuple[int, ...], spec: InputSpec) -> bool:
    return shape == spec.shape and spec.shorter_side is None


def _check_array(array: NDArray[np.uint8], thing: str, accepted: str, *, dimensions: int) -> None:
    fits = array.ndim == dimensions or (array.ndim == dimensions + 1 and array.shape[-1] in (1, 3, 4))
    if array.dtype != np.uint8 or not fits or 0 in array.shape[dimensions - 2 :]:
        raise ImageError(
            f"{thing} is {array.dtype} of shape {array.shape}; "
            f"accepted is uint8 of shape {accepted} with C = 1, 3 or 4 and no empty side.",
            reason="shape",
        )
