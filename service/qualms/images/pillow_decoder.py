"""Decoding with Pillow: any accepted file to an upright image, and an image of any mode to a model's size and colour.

This module is the reference: the faster decoders of `qualms.images.fast_decoders` give the same pixels. It imports neither
NumPy nor pydantic, so that the worker processes of the service stay small.

- Of an animation, only the first frame is used. EXIF orientation is applied.
- Transparent images are composited over white, as in image viewers, so that dark ink remains legible.
- 16-bit grey values are reduced to their high byte, as Pillow does for 16-bit colour. Floating-point values must lie in
  [0, 1].
- Embedded colour profiles are not applied.
"""

import io
import sys
import threading
import warnings
from collections.abc import Callable
from types import TracebackType
from typing import Any, Literal, Protocol, cast

from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from qualms.errors import ImageError
from qualms.images.limits import JPEG_SIGNATURE, PNG_SIGNATURE, check_decoder_limits, check_file_limits

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF")
ACCEPTED = "PNG, JPEG, WebP, BMP, GIF or TIFF"
MAX_PIXELS = 2**26
"""8192 × 8192, more than most cameras have: about 200 MB when decoded."""
MAX_SIDE = 2**16
"""Longer sides need memory for every row or column, whatever the number of pixels."""
MAX_ASPECT_RATIO = 16
"""With `shorter_side`: longer images are cropped to this aspect ratio before they are resized, to limit memory."""

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
TRANSPOSE_FOR_ORIENTATION = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""the operation that turns an image with this EXIF orientation upright"""


class TargetSpec(Protocol):
    """The fields of `qualms.images.input_spec.InputSpec` that decoding needs."""

    @property
    def height(self) -> int: ...  # noqa: D102
    @property
    def width(self) -> int: ...  # noqa: D102
    @property
    def colour(self) -> Literal["RGB", "L"]: ...  # noqa: D102
    @property
    def resize(self) -> str: ...  # noqa: D102
    @property
    def fit(self) -> str: ...  # noqa: D102
    @property
    def shorter_side(self) -> int | None: ...  # noqa: D102


def decode(
    data: bytes, *, max_pixels: int = MAX_PIXELS, max_side: int = MAX_SIDE, min_jpeg_side: int | None = None
) -> Image.Image:
    """Decode an image file and apply its EXIF orientation; raises ImageError, and no other error, whatever the bytes are.

    The limits on pixels and on decoding cost are checked before any pixel is decoded. `min_jpeg_side` as in `jpeg_scale`.
    """
    if not data:
        raise ImageError(f"The image has 0 bytes; send a {ACCEPTED} file.", reason="malformed")
    try:
        with _ignore_pillow_warnings:
            check_file_limits(data)
            image = Image.open(io.BytesIO(data), formats=FORMATS)
            check_size(image.width, image.height, max_pixels, max_side)
            check_decoder_limits(image, data, max_pixels)
            scale = jpeg_scale(image.width, image.height, min_jpeg_side) if data.startswith(JPEG_SIGNATURE) else 1
            if scale > 1:
                image.draft(image.mode, (image.width // scale, image.height // scale))
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


def jpeg_scale(width: int, height: int, min_side: int | None) -> int:
    """The largest of 8, 4 and 2 by which a JPEG can be reduced while it is decoded with both sides at least `min_side`.

    1 if there is none, or if `min_side` is None. These are the scales that all decoders of JPEG offer.
    """
    if min_side is None:
        return 1
    return next((scale for scale in (8, 4, 2) if min(width, height) // scale >= min_side), 1)


def check_size(width: int, height: int, max_pixels: int, max_side: int) -> None:
    """Raise ImageError if an image has too many pixels or too long a side."""
    if width * height > max_pixels:
        raise ImageError(
            f"The image has {width:,} × {height:,} pixels; at most {max_pixels:,} are accepted.", reason="too_large"
        )
    if max(width, height) > max_side:
        raise ImageError(
            f"The image has {width:,} × {height:,} pixels; a side of at most {max_side:,} is accepted.",
            reason="too_large",
        )


def to_target(image: Image.Image, spec: TargetSpec) -> Image.Image:
    """Convert an image of any mode and size to a model's colour mode and size."""
    try:
        if image.width * image.height > _STRIP_PIXELS and image.mode in _STRIP_MODES:
            flat = _flatten_in_strips(image, spec.colour)
        else:
            flat = flatten(image)
            if flat.mode != spec.colour:
                flat = flat.convert(spec.colour)
    except (ImageError, MemoryError):
        raise
    except Exception as error:  # a missing or short palette is detected only here
        raise ImageError(
            f"The image is damaged: its {image.mode} pixels cannot be converted to {spec.colour}.", reason="malformed"
        ) from error
    size, method = (spec.width, spec.height), RESAMPLING[spec.resize]
    if spec.shorter_side is not None:
        return _crop_centre(_resize_shorter_side(flat, spec.shorter_side, method), *size)
    if flat.size == size:
        return flat
    return ImageOps.fit(flat, size, method) if spec.fit == "crop" else flat.resize(size, method)


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
    if image.mode == "F":
        return _from_floats(image)
    if image.mode == "I" or image.mode.startswith("I;16"):
        return _from_integers(image)
    if image.has_transparency_data:
        layer = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer).convert("RGB")
    return image.convert("L" if image.mode == "1" else "RGB")


def _from_floats(image: Image.Image) -> Image.Image:
    """Scale floating-point grey to "L"; values outside [0, 1] and values that are no numbers are refused."""
    numbers = _compare(lambda value: value == value, image)  # noqa: PLR0124  # only NaN differs from itself
    lowest, highest = cast("tuple[float, float]", image.getextrema())
    if numbers.getextrema() != (255, 255) or lowest < 0 or highest > 1:
        raise _out_of_range(1, "floating-point")
    return image.point(lambda value: value * 255 + 0.5).convert("L")


def _from_integers(image: Image.Image) -> Image.Image:
    """Reduce 16-bit grey to "L"; values outside 16 bits are refused."""
    if image.mode == "I":
        lowest, highest = cast("tuple[int, int]", image.getextrema())
        if lowest < 0 or highest > 65535:
            raise _out_of_range(65535, "16-bit")
    size, is_big = (4, sys.byteorder == "big") if image.mode == "I" else (2, image.mode.endswith("B"))
    grey = Image.frombytes("L", image.size, image.tobytes()[size - 2 if is_big else 1 :: size])
    transparent = image.info.get("transparency")  # one grey level of a PNG may be transparent
    if isinstance(transparent, int):
        grey.paste(255, mask=_compare(lambda value: value == transparent, image.convert("I")))
    return grey


def _compare(condition: Callable[[Any], Any], image: Image.Image) -> Image.Image:
    """An "L" image that is 255 where the condition holds, else 0."""
    from PIL import ImageMath  # noqa: PLC0415  # rare, and its library need not be loaded for other images

    result: Image.Image = ImageMath.lambda_eval(lambda images: condition(images["image"]) * 255, image=image)
    return result.convert("L")


def _out_of_range(largest: int, kind: str) -> ImageError:
    return ImageError(
        f"The image has pixel values outside 0 to {largest:,}, the accepted range of a {kind} image.",
        reason="unsupported",
    )


def _apply_orientation(image: Image.Image) -> Image.Image:
    """Apply the EXIF orientation of a loaded image; unreadable metadata is ignored."""
    if not image.info and image.format == "PNG":  # for PNG, EXIF and XMP are in `info`
        return image
    try:
        orientation = image.getexif().get(ExifTags.Base.Orientation)
    except Exception:  # the pixels are complete, and image viewers display them too
        return image
    transpose = TRANSPOSE_FOR_ORIENTATION.get(orientation) if isinstance(orientation, int) else None
    return image if transpose is None else image.transpose(transpose)


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
