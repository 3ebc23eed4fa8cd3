"""The encoding of an incoming image, read from its headers: format, rough quality, and size relative to the model's input.

The same function describes calibration images and live traffic, so that the service can tell which images come in an encoding
that the calibration has not seen. Only headers are read; an image takes a few microseconds.
"""

import struct
from bisect import bisect_left
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from qualms.images.input_spec import InputSpec
from qualms.images.limits import (
    JPEG_SIGNATURE,
    PNG_SIGNATURE,
    TIFF_BYTE_ORDERS,
    jpeg_headers,
    tiff_directory,
    tiff_integer,
)

LOSSLESS, LOSSY, PALETTE = "lossless", "lossy", "palette"
JPEG_QUALITIES = ((1, 49), (50, 59), (60, 69), (70, 79), (80, 89), (90, 100))
"""bands of the rough quality of a JPEG"""
SIZES = ("same", "larger", "smaller", "unknown")
"""the shorter side of the image, compared with the side to which preprocessing resizes it"""
PIXELS = "pixels"
"""the format of an array of pixels"""
UNKNOWN = "unknown"

# Luminance quantisation table of the JPEG standard (ITU-T T.81, table K.1), in the order of its rows.
# fmt: off
_STANDARD_TABLE = np.array([
    16, 11, 10, 16, 24, 40, 51, 61, 12, 12, 14, 19, 26, 58, 60, 55, 14, 13, 16, 24, 40, 57, 69, 56, 14, 17, 22, 29, 51, 87, 80, 62,
    18, 22, 37, 56, 68, 109, 103, 77, 24, 35, 55, 64, 81, 104, 113, 92, 49, 64, 78, 87, 103, 121, 120, 101, 72, 92, 95, 98,
    112, 100, 103, 99,
])
# fmt: on
_SOF_MARKERS = frozenset(range(0xFFC0, 0xFFD0)) - {0xFFC4, 0xFFC8, 0xFFCC}
_DQT = 0xFFDB
_MAX_WEBP_CHUNKS = 16
_MAX_TIFF_ENTRIES = 64
"""entries are in ascending order, and those that are read are among the first"""
_TIFF_WIDTH, _TIFF_HEIGHT, _TIFF_COMPRESSION = 256, 257, 259
_TIFF_LOSSY = (6, 7, 50001)  # JPEG, old and new, and WebP


class ObservedEncoding(NamedTuple):
    """Format, quality and size of one image, each a label of low cardinality."""

    format: str
    quality: str
    size: str

    @property
    def text(self) -> str:
        """Images with the same text are alike to the model: lossless formats have the same pixels."""
        kind = LOSSLESS if self.quality == LOSSLESS else f"{self.format} {self.quality}"
        return f"{kind}, {self.size} size"


def all_observed() -> list[ObservedEncoding]:
    """Every value that `observe` can return."""
    kinds = [
        *((name, LOSSLESS) for name in (PIXELS, "png", "bmp", "tiff", "webp")),
        *(("jpeg", f"{low}-{high}") for low, high in JPEG_QUALITIES),
        *((name, LOSSY) for name in ("webp", "tiff")),
        ("gif", PALETTE),
    ]
    return [ObservedEncoding(*kind, size) for kind in kinds for size in SIZES]


def observe(image: bytes | NDArray[np.uint8], spec: InputSpec) -> ObservedEncoding:
    """Describe the bytes of a file that preprocessing accepts, or pixels of shape (H, W) or (H, W, C)."""
    if not isinstance(image, bytes):
        return ObservedEncoding(PIXELS, LOSSLESS, relative_size(image.shape[1], image.shape[0], spec))
    try:
        name, quality, width, height = _read(image)
    except (struct.error, IndexError, OverflowError):  # unusual, but the decoder accepted it
        (name, quality), width, height = _by_signature(image), 0, 0
    return ObservedEncoding(name, quality, relative_size(width, height, spec))


def read_size(data: bytes) -> tuple[str, int, int]:
    """Format, width and height of the bytes of a file; 0 × 0 if its headers cannot be read, UNKNOWN if it is no image."""
    try:
        name, _, width, height = _read(data)
    except (struct.error, IndexError, OverflowError):
        known = data.startswith((PNG_SIGNATURE, JPEG_SIGNATURE, b"RIFF", b"GIF", b"BM", *TIFF_BYTE_ORDERS))
        return _by_signature(data)[0] if known else UNKNOWN, 0, 0
    return name, max(0, width), height


def _read(data: bytes) -> tuple[str, str, int, int]:
    """Format, quality, width and height of a file."""
    if data.startswith(PNG_SIGNATURE):
        return "png", LOSSLESS, *struct.unpack_from(">II", data, 16)
    if data.startswith(JPEG_SIGNATURE):
        return _read_jpeg(data)
    if data.startswith(b"RIFF"):
        return _read_webp(data)
    if data.startswith(b"GIF"):
        return "gif", PALETTE, *struct.unpack_from("<HH", data, 6)
    if data.startswith(b"BM"):
        form = "<HH" if data[14] == 12 else "<ii"  # the header of OS/2 files has 12 bytes
        width, height = struct.unpack_from(form, data, 18)
        return "bmp", LOSSLESS, width, abs(height)
    if data.startswith(TIFF_BYTE_ORDERS):
        values = {
            tag: tiff_integer(data, kind, field) for tag, kind, _, field in tiff_directory(data, _MAX_TIFF_ENTRIES)
        }
        quality = LOSSY if values.get(_TIFF_COMPRESSION) in _TIFF_LOSSY else LOSSLESS
        return "tiff", quality, values.get(_TIFF_WIDTH, 0), values.get(_TIFF_HEIGHT, 0)
    raise IndexError


def _by_signature(data: bytes) -> tuple[str, str]:
    """Format and quality of a file whose headers cannot be read; the quality is the lowest."""
    if data.startswith(PNG_SIGNATURE):
        return "png", LOSSLESS
    if data.startswith(JPEG_SIGNATURE):
        return "jpeg", f"{JPEG_QUALITIES[0][0]}-{JPEG_QUALITIES[0][1]}"
    names = {b"RI": ("webp", LOSSY), b"GI": ("gif", PALETTE), b"BM": ("bmp", LOSSLESS)}
    return names.get(data[:2], ("tiff", LOSSY))


def _read_jpeg(data: bytes) -> tuple[str, str, int, int]:
    quality, width, height = 0, 0, 0
    for marker, offset in jpeg_headers(data):
        if marker == _DQT and not quality:
            quality = jpeg_quality(data, offset)
        elif marker in _SOF_MARKERS:
            height, width = struct.unpack_from(">HH", data, offset + 5)
            break
    band = JPEG_QUALITIES[bisect_left(JPEG_QUALITIES, quality, key=lambda band: band[1])]
    return "jpeg", f"{band[0]}-{band[1]}", width, height


def jpeg_quality(data: bytes, offset: int) -> int:
    """The quality, 1 to 100, whose standard table has the sum nearest to that of the first table in a DQT segment."""
    values = ">64H" if data[offset + 4] >> 4 else ">64B"
    return _QUALITIES.nearest(sum(struct.unpack_from(values, data, offset + 5)))


class _Qualities:
    """The sums of the standard table scaled to each quality, as libjpeg scales it."""

    @cached_property
    def sums(self) -> list[int]:
        """For quality 100, 99, …, 1: ascending."""
        scales = [200 - 2 * quality if quality >= 50 else 5000 // quality for quality in range(100, 0, -1)]
        return [int(np.clip((_STANDARD_TABLE * scale + 50) // 100, 1, 255).sum()) for scale in scales]

    @cached_property
    def middles(self) -> list[float]:
        return [(low + high) / 2 for low, high in pairwise(self.sums)]

    def nearest(self, total: int) -> int:
        return 100 - bisect_left(self.middles, total)


_QUALITIES = _Qualities()


def _read_webp(data: bytes) -> tuple[str, str, int, int]:
    kind = data[12:16]
    if kind == b"VP8L":
        bits = int.from_bytes(data[21:25], "little")
        return "webp", LOSSLESS, (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    if kind == b"VP8X":
        width, height = (int.from_bytes(data[start : start + 3], "little") + 1 for start in (24, 27))
        return "webp", _webp_quality(data), width, height
    width, height = struct.unpack_from("<HH", data, 26)
    return "webp", LOSSY, width & 0x3FFF, height & 0x3FFF


def _webp_quality(data: bytes) -> str:
    """Lossless or lossy, by the kind of the first chunk with pixels of an extended file."""
    offset = 12
    for _ in range(_MAX_WEBP_CHUNKS):
        kind, length = struct.unpack_from("<4sI", data, offset)
        if kind in (b"VP8L", b"VP8 "):
            break
        # The pixels of an animation are chunks within its frames, after a header of 16 bytes.
        offset += 24 if kind == b"ANMF" else 8 + length + length % 2
    return LOSSLESS if kind == b"VP8L" else LOSSY


def relative_size(width: int, height: int, spec: InputSpec) -> str:
    """One of SIZES, from the shorter side of an image."""
    side, wanted = min(width, height), spec.shorter_side or min(spec.width, spec.height)
    if side <= 0:
        return "unknown"
    return "same" if side == wanted else "larger" if side > wanted else "smaller"
