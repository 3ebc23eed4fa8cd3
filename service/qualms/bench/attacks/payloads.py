"""Large request bodies, and images that take as long to decode as the limits allow."""

import io
from collections.abc import Iterable, Iterator

import numpy as np
from PIL import Image

MAX_BODY = 2**24
"""the service's default limit, QUALMS_MAX_BODY_BYTES"""
_PIECE = 2**18
FORM = "multipart/form-data; boundary=boundary"
"""content type of `form_body`"""
_PART = b'--boundary\r\nContent-Disposition: form-data; name="images"; filename="a.png"\r\n\r\n%b\r\n'


def in_pieces(data: bytes | memoryview) -> Iterator[memoryview]:
    """Slices that are sent one after the other, so that connections take turns."""
    view = memoryview(data)
    for start in range(0, len(view), _PIECE):
        yield view[start : start + _PIECE]


def form_body(files: Iterable[bytes]) -> bytes:
    """A form of image files."""
    return b"".join(_PART % file for file in files) + b"--boundary--\r\n"


def noise_png() -> bytes:
    """A PNG of noise, a little smaller than the limit."""
    return _encode(_noise(2300, 2300), "PNG", compress_level=0)


def png_12_megapixels() -> bytes:
    """A PNG of 4000 × 3000 pixels of smooth colour."""
    return _encode(_smooth(4000, 3000), "PNG", compress_level=1)


def jpeg_12_megapixels() -> bytes:
    """A JPEG of 4000 × 3000 pixels of smooth colour with noise."""
    noisy = _smooth(4000, 3000).astype(np.int16) + _noise(4000, 3000) // 16
    return _encode(noisy.clip(0, 255).astype(np.uint8), "JPEG", quality=90)


def progressive_jpeg() -> bytes:
    """A progressive JPEG of as many pixels as are accepted; each of its scans is a pass over all of them."""
    return _encode(_noise(4096, 4096), "JPEG", quality=20, progressive=True)


def uniform_png() -> bytes:
    """A PNG of as many pixels as are accepted in a few kilobytes, with an alpha channel."""
    return _encode(np.zeros((4096, 4096, 4), np.uint8), "PNG", compress_level=9)


def _smooth(width: int, height: int) -> "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]":
    """Shape (height, width, 3)."""
    corners = Image.fromarray(np.random.default_rng(0).integers(0, 256, (4, 4, 3), np.uint8))
    return np.asarray(corners.resize((width, height), Image.Resampling.BICUBIC))


def _noise(width: int, height: int) -> "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]":
    """Shape (height, width, 3)."""
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)


def _encode(pixels: "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]", kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind, **options)
    return file.getvalue()
