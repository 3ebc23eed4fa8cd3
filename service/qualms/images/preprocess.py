"""The one path from any image to a model's input, so that training and serving see the same pixels.

Choices, made once for everybody:
- the first frame of an animation is the image, turned upright as its EXIF orientation says;
- transparency is laid over white, as viewers show it: dark ink on a transparent ground stays legible;
- 16-bit grey keeps its high byte, as Pillow does for 16-bit colour; floating point must lie in [0, 1];
- embedded colour profiles are not applied.
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
from qualms.images.limits import JPEG, PNG, check_decoder, check_pieces, decodes_quickly

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF")
ACCEPTED = "PNG, JPEG, WebP, BMP, GIF or TIFF"
MAX_PIXELS = 2**26
"""8192 × 8192, more than most cameras make: about 200 MB once decoded."""
LONGEST = 16
"""How many times as long as wide an image may be where its shorter side is given; beyond, the ends are cut off first."""

_SIGNATURES = (PNG, JPEG, b"BM", b"GIF87a", b"GIF89a", b"II*\0", b"MM\0*", b"II+\0")
_RESAMPLING = {
    "nearest": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def warm_up() -> None:
    """Load Pillow's decoders now rather than with the first image."""
    Image.init()


def preprocess(data: bytes, spec: InputSpec, *, max_pixels: int = MAX_PIXELS) -> NDArray[np.uint8]:
    """Turn the bytes of an image file into a model's input, (H, W, C)."""
    return conform(decode(data, max_pixels=max_pixels), spec)


def preprocess_array(array: NDArray[np.uint8], spec: InputSpec) -> NDArray[np.uint8]:
    """Turn pixels, (H, W) or (H, W, 1|3|4), into a model's input, (H, W, C): the array itself if it fits."""
    _check_array(array, "An image", "(H, W) or (H, W, C)", dimensions=2)
    return array if _takes_as_it_is(array.shape, spec) else conform(_from_array(array), spec)


def preprocess_batch(images: NDArray[np.uint8], spec: InputSpec) -> NDArray[np.uint8]:
    """Turn N images, (N, H, W) or (N, H, W, 1|3|4), into (N, H, W, C): the array itself if it fits.

    Only work that cannot change a pixel is skipped; all else goes through `conform`, image by image.
    """
    _check_array(images, "A batch of images", "(N, H, W) or (N, H, W, C)", dimensions=3)
    planes = images if images.ndim == 4 else images[..., np.newaxis]
    if _takes_as_it_is(planes.shape[1:], spec):
        return planes
    if _takes_as_it_is((*planes.shape[1:3], spec.channels), spec) and planes.shape[3] == 1:
        return np.repeat(planes, spec.channels, axis=-1)
    result = np.empty((len(images), *spec.shape), np.uint8)
    for index, image in enumerate(images):
        result[index] = conform(_from_array(image), spec)
    return result


def decode(data: bytes, *, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Read an image file, upright and fully loaded; whatever the bytes, the only error is ImageError.

    The dimensions are checked against `max_pixels`, and the cost against what they account for, before a single pixel
    is decoded.
    """
    if not data:
        raise ImageError(f"The image has 0 bytes; send a {ACCEPTED} file.", reason="malformed")
    try:
        with _pillow_silence:
            if not decodes_quickly(data):
                check_pieces(data)
            image = Image.open(io.BytesIO(data), formats=FORMATS)
            _check_pixels(image, max_pixels)
            check_decoder(image, data, max_pixels)
            image.load()
            return _upright(image)
    except ImageError:
        raise
    except (Image.DecompressionBombError, MemoryError) as error:
        raise ImageError(
            f"The image is too large to decode; at most {max_pixels:,} pixels are accepted.",
            reason="too_large",
        ) from error
    except UnidentifiedImageError as error:
        if _claims_to_be_accepted(data):
            raise _damaged(data, "its header cannot be read") from error
        raise ImageError(
            f"The {len(data):,} bytes are not an image of a known kind; send a {ACCEPTED} file.",
            reason="unsupported",
        ) from error
    except Exception as error:  # Pillow's decoders raise nearly anything on hostile bytes
        raise _damaged(data, " ".join(str(error).split()) or type(error).__name__) from error


def conform(image: Image.Image, spec: InputSpec) -> NDArray[np.uint8]:
    """Bring an image of any mode and size to a model's colour mode and size, (H, W, C)."""
    try:
        flat = _flatten(image)
        if flat.mode != spec.colour:
            flat = flat.convert(spec.colour)
    except ImageError:
        raise
    except Exception as error:  # a palette that is missing or too short shows only now
        raise ImageError(
            f"The image is damaged: its {image.mode} pixels cannot be converted to {spec.colour}.", reason="malformed"
        ) from error
    size, method = (spec.width, spec.height), _RESAMPLING[spec.resize]
    if spec.shorter_side is not None:
        flat = _centre(_with_shorter_side(flat, spec.shorter_side, method), *size)
    elif flat.size != size:
        flat = ImageOps.fit(flat, size, method) if spec.fit == "crop" else flat.resize(size, method)
    return np.array(flat).reshape(spec.shape)


def _takes_as_it_is(shape: tuple[int, ...], spec: InputSpec) -> bool:
    return shape == spec.shape and spec.shorter_side is None


def _with_shorter_side(image: Image.Image, side: int, method: Image.Resampling) -> Image.Image:
    """Resize as torchvision's `Resize(side)` does, to the pixel, but for images so long that this would fill memory."""
    beyond = max(image.size) - LONGEST * min(image.size)
    if beyond > 1:
        kept = max(image.size) - beyond // 2 * 2  # as much at either end, or the centre would be beside the middle
        image = _centre(image, min(image.width, kept), min(image.height, kept))
    width, height = image.size
    size = (side, int(side * height / width)) if width <= height else (int(side * width / height), side)
    return image if image.size == size else image.resize(size, method)


def _centre(image: Image.Image, width: int, height: int) -> Image.Image:
    """Cut the centre out as torchvision's `CenterCrop` does; halves are rounded to even."""
    left, top = round((image.width - width) / 2), round((image.height - height) / 2)
    return image.crop((left, top, left + width, top + height))


def _flatten(image: Image.Image) -> Image.Image:
    """Bring any mode to opaque 8-bit "L" or "RGB"."""
    if image.mode in ("L", "RGB") and "transparency" not in image.info:
        return image
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        return _to_eight_bits(image)
    if image.has_transparency_data:
        layer = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer).convert("RGB")
    return image.convert("L" if image.mode == "1" else "RGB")


def _to_eight_bits(image: Image.Image) -> Image.Image:
    """Scale 16-bit or floating-point grey to "L"; values off that scale are refused, not guessed at."""
    values = np.asarray(image)
    top = 1 if image.mode == "F" else 65535
    if not ((values >= 0) & (values <= top)).all():
        raise ImageError(
            f"The image has pixel values outside 0 to {top:,}, the accepted range of a "
            f"{'floating-point' if image.mode == 'F' else '16-bit'} image.",
            reason="unsupported",
        )
    grey = np.rint(values * 255) if image.mode == "F" else values >> 8
    if "transparency" in image.info:  # a PNG may name one grey level that is transparent
        grey = np.where(values == image.info["transparency"], 255, grey)
    return Image.fromarray(grey.astype(np.uint8))


def _upright(image: Image.Image) -> Image.Image:
    """Turn a loaded image as its EXIF orientation says; metadata that cannot be read says nothing."""
    if not image.info and image.format == "PNG":  # what a PNG says of itself, EXIF and XMP included, is in `info`
        return image
    try:
        orientation = image.getexif().get(ExifTags.Base.Orientation)
    except Exception:  # the pixels are whole, and viewers show them too
        return image
    turn = _UPRIGHT.get(orientation) if isinstance(orientation, int) else None
    return image if turn is None else image.transpose(turn)


def _from_array(array: NDArray[np.uint8]) -> Image.Image:
    return Image.fromarray(array[..., 0] if array.ndim == 3 and array.shape[-1] == 1 else array)


def _check_array(array: NDArray[np.uint8], thing: str, accepted: str, *, dimensions: int) -> None:
    fits = array.ndim == dimensions or (array.ndim == dimensions + 1 and array.shape[-1] in (1, 3, 4))
    if array.dtype != np.uint8 or not fits or 0 in array.shape[dimensions - 2 :]:
        raise ImageError(
            f"{thing} was given as {array.dtype} of shape {array.shape}; "
            f"accepted is uint8 of shape {accepted} with C = 1, 3 or 4 and no empty side.",
            reason="shape",
        )


def _check_pixels(image: Image.Image, max_pixels: int) -> None:
    if image.width * image.height > max_pixels:
        raise ImageError(
            f"The image has {image.width:,} × {image.height:,} pixels; at most {max_pixels:,} are accepted.",
            reason="too_large",
        )


def _claims_to_be_accepted(data: bytes) -> bool:
    return data.startswith(_SIGNATURES) or (data[:4] == b"RIFF" and data[8:12] == b"WEBP")


def _damaged(data: bytes, why: str) -> ImageError:
    return ImageError(
        f"The image of {len(data):,} bytes is damaged or cut short ({why}); send a complete {ACCEPTED} file.",
        reason="malformed",
    )


class _PillowSilence:
    """Hides Pillow's warnings about strangers' files while any thread decodes.

    Overlapping `warnings.catch_warnings` in several threads restore each other's filters, so here the first
    thread in sets the filter and the last one out restores it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._filters = warnings.catch_warnings()

    def __enter__(self) -> None:
        with self._lock:
            if self._inside == 0:
                self._filters = warnings.catch_warnings()
                self._filters.__enter__()
                warnings.filterwarnings("ignore", module=r"PIL\.")
            self._inside += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                self._filters.__exit__(kind, error, trace)


_pillow_silence = _PillowSilence()
