"""Plain files: small PNG files and JPEG files whose structure proves that decoding costs what their bytes and pixels cost.

`read_plain` walks over the chunks or segments of a file once and accepts only what cameras, browsers and image libraries
write. Plain files are decoded in the service's own threads (`qualms.images.fast_decoders`); all other files, whether
hostile or merely unusual, are decoded by Pillow in worker processes with limits on memory and time.

For a plain file the fast decoders give the same pixels as Pillow. Where they differ, the file is not plain: checksums of
chunks, and metadata that Pillow might refuse, or read as an orientation, in a way that this module does not. One difference
remains: Pillow also verifies the checksum inside the compressed pixels of a PNG, and libspng does not.
"""

import struct
from collections.abc import Iterator
from typing import Literal, NamedTuple
from zlib import crc32

from qualms.images.limits import JPEG_SIGNATURE, PNG_SIGNATURE

MAX_PNG_PIXELS = 2**16
"""256 × 256: pyspng holds the interpreter's lock while it decodes, here for less than a millisecond, and Pillow is as fast for
larger images"""
MAX_PNG_CHUNKS = 64
MAX_PNG_METADATA = 4096
"""bytes of chunks other than the header, the palette and pixels"""
MAX_JPEG_SEGMENTS = 64
MAX_JPEG_METADATA = 2**18
"""bytes of segments before the first scan: profiles, thumbnails, EXIF, XMP"""
MAX_JPEG_SCANS = 16
"""Each scan is a pass over the pixels; libjpeg writes 10, other encoders a few more."""
_MAX_EXIF_ENTRIES = 256

_PNG_HEADER = struct.Struct(">I4sIIBBBBBI")
_PNG_CHUNK = struct.Struct(">I4s")
_PNG_CRC = struct.Struct(">I")
_PNG_CHANNELS = {"L": 1, "P": 1, "LA": 2, "RGB": 3, "RGBA": 4}
_PNG_STREAM_BYTES = 1024
_PNG_PASS_BYTES = 8
"""additional bytes per row of an interlaced image, which has up to seven passes"""
_PNG_METADATA = {
    b"gAMA": (4,),
    b"cHRM": (32,),
    b"sRGB": (1,),
    b"sBIT": range(1, 5),
    b"bKGD": range(1, 7),
    b"pHYs": (9,),
    b"tIME": (7,),
    b"tEXt": range(2, MAX_PNG_METADATA + 1),
}
"""accepted chunks with their accepted lengths"""
_PNG_PROFILES = (b"Raw profile", b"XML:com.adobe.xmp")
"""beginnings of texts in which Pillow looks for an orientation"""
_PNG_MODES: dict[tuple[int, int], str] = {
    (8, 0): "L",
    (8, 2): "RGB",
    (8, 4): "LA",
    (8, 6): "RGBA",
    **{(depth, 3): "P" for depth in (1, 2, 4, 8)},
}
"""Pillow's mode for each accepted pair of bit depth and colour type"""

_SOI_BYTES = 2
_SOF0, _SOF1, _SOF2, _DHT, _SOS, _DQT, _DRI = 0xFFC0, 0xFFC1, 0xFFC2, 0xFFC4, 0xFFDA, 0xFFDB, 0xFFDD
_APP0, _APP1, _APP15, _COM = 0xFFE0, 0xFFE1, 0xFFEF, 0xFFFE
_FRAMES = (_SOF0, _SOF1, _SOF2)
_TABLES = (_DHT, _DQT, _DRI)
_JPEG_SEGMENT = struct.Struct(">HH")
_JPEG_FRAME = struct.Struct(">HBHHB")
_SOS_BYTES = b"\xff\xda"
_SEARCH_BYTES = 2**20
"""A search holds the interpreter's lock, so long files are searched in pieces."""
_COLOUR_SAMPLING = frozenset({0x11, 0x21, 0x12, 0x22, 0x41})
"""sampling factors of the first of three components; the other two have 1 × 1. These are 4:4:4, 4:2:2, 4:4:0, 4:2:0, 4:1:1"""

_APPS = (b"JFIF", b"ICC_PROFILE")
_MIN_APP_LENGTH = 16
"""Pillow refuses a file in which one of these application segments is shorter."""
_EXIF_PREFIX = b"Exif\0\0"
_ORIENTATION, _SHORT = 0x0112, 3
_TIFF_TYPE_SIZES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8}


class PlainFile(NamedTuple):
    """What the headers of a plain file say."""

    kind: Literal["png", "jpeg"]
    width: int
    height: int
    mode: str
    """Pillow's mode of the decoded image"""
    orientation: int = 1
    """EXIF orientation, 1 to 8"""
    is_buffered: bool = False
    """whether the decoder keeps the coefficients of the whole image: JPEG files with several scans"""


class _NotPlain(Exception):  # noqa: N818
    """The file is hostile, damaged or unusual."""


def read_plain(data: bytes) -> PlainFile | None:
    """Read the structure of a file; None if it is not plain. Takes microseconds for small files."""
    try:
        if data.startswith(PNG_SIGNATURE):
            return _read_png(data)
        return _read_jpeg(data) if data.startswith(JPEG_SIGNATURE) else None
    except (_NotPlain, struct.error):  # struct.error: the file ends within a header
        return None


def _read_png(data: bytes) -> PlainFile:
    """A small PNG without transparency chunks, compressed text and profiles, with valid checksums and nothing after its end."""
    length, kind, width, height, depth, colour, compression, filters, interlace, crc = _PNG_HEADER.unpack_from(data, 8)
    mode = _PNG_MODES.get((depth, colour))
    is_usual = kind == b"IHDR" and length == 13 and not (compression or filters or interlace > 1)
    if mode is None or not (is_usual and 0 < width * height <= MAX_PNG_PIXELS and crc32(data[12:29]) == crc):
        raise _NotPlain
    # Compressed pixels are hardly larger than the pixels themselves; empty blocks would only cost time.
    rows = height * (2 + width * _PNG_CHANNELS[mode] * depth // 8)
    max_idat = rows + rows // 64 + (_PNG_PASS_BYTES * height if interlace else 0) + _PNG_STREAM_BYTES
    offset, metadata, idat, needs_palette, before = 33, 0, 0, mode == "P", kind
    for _ in range(MAX_PNG_CHUNKS):
        length, kind = _PNG_CHUNK.unpack_from(data, offset)
        end = offset + 12 + length
        if end > len(data) or crc32(data[offset + 4 : end - 4]) != _PNG_CRC.unpack_from(data, end - 4)[0]:
            raise _NotPlain
        if kind == b"IEND":
            if before != b"IDAT" or length or end != len(data):
                raise _NotPlain
            return PlainFile("png", width, height, mode)
        if kind == b"IDAT":
            idat += length
            if needs_palette or idat > max_idat:
                raise _NotPlain
        elif before == b"IDAT":  # metadata after the pixels is unusual
            raise _NotPlain
        elif kind == b"PLTE":
            if not needs_palette or length % 3 or not 3 <= length <= 3 << depth:
                raise _NotPlain
            needs_palette = False
        else:
            metadata += length
            is_usual = length in _PNG_METADATA.get(kind, ())
            if not is_usual or metadata > MAX_PNG_METADATA or data.startswith(_PNG_PROFILES, offset + 8):
                raise _NotPlain
        offset, before = end, kind
    raise _NotPlain


def _read_jpeg(data: bytes) -> PlainFile:
    """A baseline or progressive JPEG of 8 bits with one or three components, usual sampling and few scans."""
    frame, exif, has_xmp_orientation = 0, b"", False
    for marker, start, end in _jpeg_segments(data):
        if marker == _SOS:
            break
        if marker in _FRAMES:
            if frame:
                raise _NotPlain
            frame = start
        elif marker == _APP1:
            if data.startswith(_EXIF_PREFIX, start + 4):
                if exif:
                    raise _NotPlain
                exif = data[start + 10 : end]
            else:
                has_xmp_orientation |= data.find(b"Orientation", start, end) >= 0
        elif marker not in _TABLES and marker != _COM and not _APP0 <= marker <= _APP15:
            raise _NotPlain
    orientation = _exif_orientation(exif) if exif else 0
    if not frame or (has_xmp_orientation and not orientation):
        raise _NotPlain
    width, height, components = _jpeg_frame(data, frame)
    # Without progression, one scan of all components is complete, and decoders read no other.
    is_buffered = data[frame + 1] == _SOF2 & 0xFF or data[start + 4] != components
    if is_buffered:
        _check_scans(data, start)
    return PlainFile("jpeg", width, height, "L" if components == 1 else "RGB", orientation or 1, is_buffered)


def _jpeg_segments(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Marker, start and end of each segment up to the first scan."""
    start = _SOI_BYTES
    for _ in range(MAX_JPEG_SEGMENTS):
        marker, length = _JPEG_SEGMENT.unpack_from(data, start)
        end = start + 2 + length
        if length < 2 or end > min(len(data), MAX_JPEG_METADATA):
            raise _NotPlain
        if length < _MIN_APP_LENGTH and data.startswith(_APPS, start + 4):
            raise _NotPlain
        yield marker, start, end
        start = end
    raise _NotPlain


def _jpeg_frame(data: bytes, start: int) -> tuple[int, int, int]:
    """Width, height and number of components of a frame with usual sampling: blocks have at most 16 × 16 or 32 × 8 pixels."""
    length, precision, height, width, components = _JPEG_FRAME.unpack_from(data, start + 2)
    factors = data[start + 11 : start + 10 + 3 * components : 3]
    is_usual = (
        (components == 1 and factors in (b"\x11", b"\x22"))
        or (components == 3 and factors[0] in _COLOUR_SAMPLING and factors[1:] == b"\x11\x11")
    )  # fmt: skip
    if length != 8 + 3 * components or precision != 8 or not (width and height and is_usual):
        raise _NotPlain
    return width, height, components


def _check_scans(data: bytes, start: int) -> None:
    """Refuse files in which more than MAX_JPEG_SCANS scans begin at or after `start`; markers within segments count too."""
    scans = 0
    for first in range(start, len(data), _SEARCH_BYTES):
        scans += data.count(_SOS_BYTES, first, first + _SEARCH_BYTES + 1)
        if scans > MAX_JPEG_SCANS:
            raise _NotPlain


def _exif_orientation(data: bytes) -> int:
    """The orientation in the first directory of EXIF data: 1 to 8, or 0 if there is none.

    Every entry must be readable, because Pillow stops at the first one that is not.
    """
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(data[:4])
    if order is None:
        raise _NotPlain
    (start,) = struct.unpack_from(order + "I", data, 4)
    (count,) = struct.unpack_from(order + "H", data, start)
    if count > _MAX_EXIF_ENTRIES or start < 8:
        raise _NotPlain
    orientation = 0
    for entry in range(start + 2, start + 2 + 12 * count, 12):
        tag, kind, values, offset = struct.unpack_from(order + "HHII", data, entry)
        size = _TIFF_TYPE_SIZES.get(kind, 0) * values
        if size == 0 or (size > 4 and offset + size > len(data)):
            raise _NotPlain
        if tag == _ORIENTATION:
            if orientation or kind != _SHORT or values != 1:
                raise _NotPlain
            (orientation,) = struct.unpack_from(order + "H", data, entry + 8)
            if not 1 <= orientation <= 8:
                raise _NotPlain
    return orientation
