"""Preprocessing from an image file or array to a model's input, the same for training and serving.

- Of an animation, only the first frame is used. EXIF orientation is applied.
- Transparent images are composited over white, as in image viewers, so that dark ink remains legible.
- 16-bit grey values are reduced to their high byte, as Pillow does for 16-bit colour. Floating-point values must lie in
  [0, 1].
- Embedded colour profiles are not applied.
"""

import io
import threading
import warnings
from types import TracebackType

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from qualms.errors import ImageError
from qualms.images.input_spec import InputSpec
from qualms.images.limits import (
    JPEG_SIGNATURE,
    PNG_SIGNATURE,
    check_decoder_limits,
    check_file_limits,
    decodes_quickly,
)

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF")
ACCEPTED = "PNG, JPEG, WebP, BMP, GIF or TIFF"
MAX_PIXELS = 2**26
"""8192 × 8192, more than most cameras have: about 200 MB when decoded."""
MAX_ASPECT_RATIO = 16
"""With `shorter_side`: longer images are cropped to this aspect ratio before they are resized, to limit memory."""

_KEPT_BLOCKS = 4
"""blocks of 16 MB that Pillow keeps"""
_STRIP_PIXELS = 2**19
_STRIP_MODES = ("L", "LA", "RGB", "RGBA", "P", "PA", "CMYK", "YCbCr")
"""modes of images whose pixels are converted one by one, so that a part of the image can be converted by itself"""
_SIGNATURES = (PNG_SIGNATURE, JPEG_SIGNATURE, b"BM", b"GIF87a", b"GIF89a", b"II*\0", b"MM\0*", b"II+\0")
RESAMPLING = {
    "nearest": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}
"""Pillow's resampling methods by the name that `InputSpec.resize` uses"""
_TRANSPOSE_FOR_ORIENTATION = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def warm_up() -> None:
    """Load Pillow's decoders now, so that the first image is not delayed, and let Pillow keep some memory.

    Without that, the kernel clears the memory of every large image anew, and for tens of milliseconds no other thread runs.
    """
    Image.init()
    Image.core.set_blocks_max(_KEPT_BLOCKS)  # type: ignore[attr-defined]  # documented, but not typed


def preprocess(data: bytes, spec: InputSpec, *, max_pixels: int = MAX_PIXELS, quick: bool = False) -> NDArray[np.uint8]:
    """Convert the bytes of an image file to a model's input, (H, W, C); `quick` as in `decode`."""
    return conform(decode(data, max_pixels=max_pixels, quick=quick), spec)


def preprocess_array(array: NDArray[np.uint8], spec: InputSpec, *, max_pixels: int = MAX_PIXELS) -> NDArray[np.uint8]:
    """Convert pixels, (H, W) or (H, W, 1|3|4), to a model's input, (H, W, C); an array that already fits is returned."""
    _check_array(array, "An image", "(H, W) or (H, W, C)", dimensions=2)
    _check_pixels(array.shape[1], array.shape[0], max_pixels)
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


def decode(data: bytes, *, max_pixels: int = MAX_PIXELS, quick: bool = False) -> Image.Image:
    """Decode an image file and apply its EXIF orientation; raises ImageError, and no other error, whatever the bytes are.

    The limits on pixels and on decoding cost are checked before any pixel is decoded. `quick`: the caller knows that
    `decodes_quickly` is true.
    """
    if not data:
        raise ImageError(f"The image has 0 bytes; send a {ACCEPTED} file.", reason="malformed")
    try:
        with _ignore_pillow_warnings:
            if not (quick or decodes_quickly(data)):
                check_file_limits(data)
            image = Image.open(io.BytesIO(data), formats=FORMATS)
            _check_pixels(image.width, image.height, max_pixels)
            check_decoder_limits(image, data, max_pixels)
            image.load()
            return _apply_orientation(image)
    except ImageError:
        raise
    except (Image.DecompressionBombError, MemoryError) as error:
        raise ImageError(
            f"The image is too large to decode; at most {max_pixels:,} pixels are accepted.",
            reason="too_large",
        ) from error
    except UnidentifiedImageError as error:
        if _has_accepted_signature(data):
            raise _damaged(data, "its header cannot be read") from error
        raise ImageError(
            f"The {len(data):,} bytes are not an image in an accepted format; send a {ACCEPTED} file.",
            reason="unsupported",
        ) from error
    except Exception as error:  # Pillow's decoders raise many kinds of errors on hostile bytes
        raise _damaged(data, " ".join(str(error).split()) or type(error).__name__) from error


def conform(image: Image.Image, spec: InputSpec) -> NDArray[np.uint8]:
    """Convert an image of any mode and size to a model's colour mode and size, (H, W, C)."""
    try:
        if image.width * image.height > _STRIP_PIXELS and image.mode in _STRIP_MODES:
            flat = _flatten_in_strips(image, spec.colour)
        else:
            flat = flatten(image)
            if flat.mode != spec.colour:
                flat = flat.convert(spec.colour)
    except ImageError:
        raise
    except Exception as error:  # a missing or short palette is detected only here
        raise ImageError(
            f"The image is damaged: its {image.mode} pixels cannot be converted to {spec.colour}.", reason="malformed"
        ) from error
    size, method = (spec.width, spec.height), RESAMPLING[spec.resize]
    if spec.shorter_side is not None:
        flat = _crop_centre(_resize_shorter_side(flat, spec.shorter_side, method), *size)
    elif flat.size != size:
        flat = ImageOps.fit(flat, size, method) if spec.fit == "crop" else flat.resize(size, method)
    return np.array(flat).reshape(spec.shape)


def _flatten_in_strips(image: Image.Image, colour: str) -> Image.Image:
    """As `flatten` and `convert`, in strips: Pillow holds the interpreter's lock meanwhile, and other requests would wait."""
    if image.mode == colour and not image.has_transparency_data:
        return image
    result = Image.new(colour, image.size)
    height = max(1, _STRIP_PIXELS // image.width)
    for top in range(0, image.height, height):
        strip = image.crop((0, top, image.width, min(image.height, top + height)))
        result.paste(flatten(strip).convert(colour), (0, top))
    return result


def _fits(shape: tuple[int, ...], spec: InputSpec) -> bool:
    return shape == spec.shape and spec.shorter_side is None


def _resize_shorter_side(image: Image.Image, side: int, method: Image.Resampling) -> Image.Image:
    """Resize exactly as torchvision's `Resize(side)`, after cropping images with an extreme aspect ratio."""
    excess = max(image.size) - MAX_ASPECT_RATIO * min(image.size)
    if excess > 1:
        length = max(image.size) - excess // 2 * 2  # an even excess is cropped equally at both ends
        image = _crop_centre(image, min(image.width, length), min(image.height, length))
    width, height = image.size
    size = (side, int(side * height / width)) if width <= height else (int(side * width / height), side)
    return image if image.size == size else image.resize(size, method)


def _crop_centre(image: Image.Image, width: int, height: int) -> Image.Image:
    """Crop exactly as torchvision's `CenterCrop`, which rounds halves to even."""
    left, top = round((image.width - width) / 2), round((image.height - height) / 2)
    return image.crop((left, top, left + width, top + height))


def flatten(image: Image.Image) -> Image.Image:
    """Convert any mode to opaque 8-bit "L" or "RGB"."""
    if image.mode in ("L", "RGB") and "transparency" not in image.info:
        return image
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        return _to_eight_bits(image)
    if image.has_transparency_data:
        layer = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer).convert("RGB")
    return image.convert("L" if image.mode == "1" else "RGB")


def _to_eight_bits(image: Image.Image) -> Image.Image:
    """Scale 16-bit or floating-point grey to "L"; values outside the accepted range are refused."""
    values = np.asarray(image)
    max_value = 1 if image.mode == "F" else 65535
    if not ((values >= 0) & (values <= max_value)).all():
        raise ImageError(
            f"The image has pixel values outside 0 to {max_value:,}, the accepted range of a "
            f"{'floating-point' if image.mode == 'F' else '16-bit'} image.",
            reason="unsupported",
        )
    grey = np.rint(values * 255) if image.mode == "F" else values >> 8
    if "transparency" in image.info:  # one grey level of a PNG may be transparent
        grey = np.where(values == image.info["transparency"], 255, grey)
    return Image.fromarray(grey.astype(np.uint8))


def _apply_orientation(image: Image.Image) -> Image.Image:
    """Apply the EXIF orientation of a loaded image; unreadable metadata is ignored."""
    if not image.info and image.format == "PNG":  # for PNG, EXIF and XMP are in `info`
        return image
    try:
        orientation = image.getexif().get(ExifTags.Base.Orientation)
    except Exception:  # the pixels are complete, and image viewers display them too
        return image
    transpose = _TRANSPOSE_FOR_ORIENTATION.get(orientation) if isinstance(orientation, int) else None
    return image if transpose is None else image.transpose(transpose)


def from_array(array: NDArray[np.uint8]) -> Image.Image:
    """The image of pixels of shape (H, W) or (H, W, 1|3|4)."""
    return Image.fromarray(array[..., 0] if array.ndim == 3 and array.shape[-1] == 1 else array)


def _check_array(array: NDArray[np.uint8], thing: str, accepted: str, *, dimensions: int) -> None:
    fits = array.ndim == dimensions or (array.ndim == dimensions + 1 and array.shape[-1] in (1, 3, 4))
    if array.dtype != np.uint8 or not fits or 0 in array.shape[dimensions - 2 :]:
        raise ImageError(
            f"{thing} is {array.dtype} of shape {array.shape}; "
            f"accepted is uint8 of shape {accepted} with C = 1, 3 or 4 and no empty side.",
            reason="shape",
        )


def _check_pixels(width: int, height: int, max_pixels: int) -> None:
    if width * height > max_pixels:
        raise ImageError(
            f"The image has {width:,} × {height:,} pixels; at most {max_pixels:,} are accepted.", reason="too_large"
        )


def _has_accepted_signature(data: bytes) -> bool:
    return data.startswith(_SIGNATURES) or (data[:4] == b"RIFF" and data[8:12] == b"WEBP")


def _damaged(data: bytes, why: str) -> ImageError:
    return ImageError(
        f"The image of {len(data):,} bytes is damaged or truncated ({why}); send a complete {ACCEPTED} file.",
        reason="malformed",
    )


class _IgnorePillowWarnings:
    """Context manager that ignores Pillow's warnings while any thread decodes.

    `warnings.catch_warnings` is not thread-safe: overlapping blocks restore each other's filters. So the first thread to
    enter sets the filter and the last one to leave restores it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads = 0
        self._filters = warnings.catch_warnings()

    def __enter__(self) -> None:
        with self._lock:
            if self._threads == 0:
                self._filters = warnings.catch_warnings()
                self._filters.__enter__()
                warnings.filterwarnings("ignore", module=r"PIL\.")
            self._threads += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._threads -= 1
            if self._threads == 0:
                self._filters.__exit__(kind, error, trace)


_ignore_pillow_warnings = _IgnorePillowWarnings()
