"""Hostile BMP files: run lengths, which Pillow decodes in Python, and palettes."""

import struct

from qualms.bench.attacks.files.definition import SIDE, hostile_file, scaled, scaled_side
from qualms.bench.attacks.payloads import MAX_BODY

_RAW, _RLE8, _RLE4 = 0, 1, 2
_SMALL = 28
_MAX_RUN_LENGTH_SIDE = 1448
"""side of a square of about as many pixels as `qualms.images.limits` accepts with run lengths"""
_END_OF_LINE, _MOVE, _LONG_RUN = b"\0\0", b"\0\2\0\0", b"\xff\x21"


def _bmp(width: int, height: int, bits: int, compression: int, data: bytes, colours: int = 256) -> bytes:
    palette = struct.pack("<I", 0x00FF8040) * (colours if bits <= 8 else 0)
    offset = 54 + len(palette)
    head = struct.pack("<IHHI", offset + len(data), 0, 0, offset)
    sizes = struct.pack("<IiiHHIIiiII", 40, width, height, 1, bits, compression, len(data), 0, 0, colours, 0)
    return b"BM" + head + sizes + palette + data


@hostile_file("bmp-moves", "a BMP of 28 × 28 pixels with 4 million empty run-length moves, 16 MB")
def moves(scale: float = 1.0) -> bytes:
    """Each is a step of a loop in Python and changes nothing."""
    return _bmp(_SMALL, _SMALL, 8, _RLE8, _MOVE * scaled((MAX_BODY - 2000) // 4, scale))


@hostile_file("bmp-lines", "a BMP of 28 × 28 pixels with 8 million ends of an empty line, 16 MB")
def lines(scale: float = 1.0) -> bytes:
    """As above, in half the bytes."""
    return _bmp(_SMALL, _SMALL, 8, _RLE8, _END_OF_LINE * scaled((MAX_BODY - 2000) // 2, scale))


@hostile_file("bmp-long-runs", "a BMP of one column with 8 million runs past the end of its line, 16 MB")
def long_runs(scale: float = 1.0) -> bytes:
    """A run that does not fit is cut to nothing."""
    return _bmp(1, 2, 8, _RLE8, _LONG_RUN * scaled((MAX_BODY - 2000) // 2, scale))


@hostile_file("bmp-pairs", "a run-length BMP of 2 MP with 4 bits a pixel in 20 kB")
def pairs(scale: float = 1.0) -> bytes:
    """Each pixel is a step of a loop in Python."""
    side = scaled_side(scale, _MAX_RUN_LENGTH_SIDE)
    return _bmp(side, side, 4, _RLE4, (_LONG_RUN * (side // 255 + 1) + _END_OF_LINE) * side, 16)


@hostile_file("bmp-short-lines", "a run-length BMP of 2 MP whose lines end after one pixel")
def short_lines(scale: float = 1.0) -> bytes:
    """The rest of each line is filled pixel by pixel in Python."""
    side = scaled_side(scale, _MAX_RUN_LENGTH_SIDE)
    return _bmp(side, side, 8, _RLE8, (b"\1\1" + _END_OF_LINE) * side)


@hostile_file("bmp-column", "a BMP of 1 × 4 million pixels, 16 MB")
def column(scale: float = 1.0) -> bytes:
    """Each row is padded to four bytes and read by itself."""
    height = scaled(SIDE * 1000, scale)
    return _bmp(1, height, 24, _RAW, bytes(4 * height))
