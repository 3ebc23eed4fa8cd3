"""Hostile TIFF files: many strips or tiles that share their data, and directories."""

import struct
from collections.abc import Sequence
from itertools import count

from qualms.bench.attacks.files.arithmetic_coding import endless_coefficients
from qualms.bench.attacks.files.definition import PIXELS, hostile_file, scaled, scaled_side
from qualms.bench.attacks.files.deflate import after_empty_blocks, zeros
from qualms.bench.attacks.files.jpeg_parts import (
    ARITHMETIC_PROGRESSIVE,
    END_OF_BLOCKS,
    PROGRESSIVE,
    Frame,
    huffman,
    jpeg,
    scan,
)
from qualms.bench.attacks.payloads import MAX_BODY

_SHORT, _LONG = 3, 4
_WIDTH, _HEIGHT, _BITS, _COMPRESSION, _PHOTOMETRIC, _STRIP_OFFSETS, _SAMPLES, _ROWS, _STRIP_SIZES = (
    256, 257, 258, 259, 262, 273, 277, 278, 279,
)  # fmt: skip
_TILE_WIDTH, _TILE_HEIGHT, _TILE_OFFSETS, _TILE_SIZES, _SAMPLE_FORMAT = 322, 323, 324, 325, 339
_LZW, _JPEG, _DEFLATE, _PACKBITS = 5, 7, 8, 32773
_BLACK_IS_ZERO, _RGB = 1, 2
_FLOAT = 3
_TILE = 16
_MAX_STRIPS = 65_000
"""nearly as many as `qualms.images.limits` accepts"""
_LZW_CLEAR, _LZW_END = 256, 257
_SHARED = 10**6
"""bytes that each strip of a file reads; libtiff cuts strips of more than 2²⁰ bytes that expand to little"""
_MAX_SCANS = 98
"""as many as libtiff accepts"""

_Tags = dict[int, Sequence[int]]


def _tiff(tags: _Tags, *parts: bytes) -> bytes:
    """A file of its parts and a directory; tags that name offsets are given relative to the first part."""
    parts_at = 8
    body = b"".join(parts)
    values_at = parts_at + len(body)
    entries, values = [], b""
    for tag, numbers in sorted(tags.items()):
        start = parts_at if tag in (_STRIP_OFFSETS, _TILE_OFFSETS) else 0
        kind = _LONG if tag in _LONG_TAGS else _SHORT
        data = struct.pack(f"<{len(numbers)}{'HI'[kind == _LONG]}", *(start + number for number in numbers))
        if len(data) > 4:
            data, values = struct.pack("<I", values_at + len(values)), values + data
        entries.append(struct.pack("<HHI4s", tag, kind, len(numbers), data))
    directory = struct.pack("<H", len(entries)) + b"".join(entries) + bytes(4)
    return b"II*\0" + struct.pack("<I", values_at + len(values)) + body + values + directory


_LONG_TAGS = (_WIDTH, _HEIGHT, _STRIP_OFFSETS, _ROWS, _STRIP_SIZES, _TILE_OFFSETS, _TILE_SIZES)


def _grey(width: int, height: int, compression: int, **changes: Sequence[int]) -> _Tags:
    return {
        _WIDTH: [width],
        _HEIGHT: [height],
        _BITS: changes.get("bits", [8]),
        _COMPRESSION: [compression],
        _PHOTOMETRIC: changes.get("photometric", [_BLACK_IS_ZERO]),
        _SAMPLES: [len(changes.get("bits", [8]))],
        _SAMPLE_FORMAT: changes.get("sample_format", [1] * len(changes.get("bits", [8]))),
    }


def _one_strip(tags: _Tags, data: bytes) -> bytes:
    """All rows in one strip."""
    return _tiff({**tags, _ROWS: tags[_HEIGHT], _STRIP_OFFSETS: [0], _STRIP_SIZES: [len(data)]}, data)


def _shared_strips(compression: int, data: bytes, scale: float) -> bytes:
    """An image of one column whose rows are strips with the same data."""
    strips = scaled(_MAX_STRIPS, scale)
    tags = _grey(1, strips, compression)
    return _tiff({**tags, _ROWS: [1], _STRIP_OFFSETS: [0] * strips, _STRIP_SIZES: [len(data)] * strips}, data)


@hostile_file("tiff-jpeg-tiles", "a TIFF of 65,536 tiles that share a progressive JPEG of 98 scans, 530 kB")
def jpeg_tiles(scale: float = 1.0) -> bytes:
    """Each tile is decoded by itself."""
    frame = Frame(PROGRESSIVE, _TILE, _TILE)
    scans = scan(bytes(1), [0], 0, 0) + scan(bytes(2), [0], 1, 63) * (_MAX_SCANS - 1)
    data = jpeg(frame, scans, tables=huffman(END_OF_BLOCKS))
    return _tiles(scaled_side(scale), _JPEG, data)


def _tiles(side: int, compression: int, data: bytes) -> bytes:
    """A square image in tiles of 16 × 16 pixels with the same data."""
    tiles = (-(-side // _TILE)) ** 2
    tags = _grey(side, side, compression)
    sizes = {_TILE_OFFSETS: [0] * tiles, _TILE_SIZES: [len(data)] * tiles}
    return _tiff({**tags, **sizes, _TILE_WIDTH: [_TILE], _TILE_HEIGHT: [_TILE]}, data)


@hostile_file("tiff-arithmetic", "a TIFF of 16 MP whose strip is an arithmetic-coded JPEG of 98 scans, 5 kB")
def arithmetic(scale: float = 1.0) -> bytes:
    """A check of JPEG files does not see it."""
    side = scaled_side(scale)
    scans = scan(b"", [0], 0, 0) + scan(endless_coefficients(), [0], 1, 63) * (_MAX_SCANS - 1)
    data = jpeg(Frame(ARITHMETIC_PROGRESSIVE, side, side), scans, tables=b"")
    return _one_strip(_grey(side, side, _JPEG), data)


@hostile_file("tiff-deflate-strips", "a TIFF of 65,000 strips that share 1 MB of empty deflate blocks")
def deflate_strips(scale: float = 1.0) -> bytes:
    """65 GB are inflated to 65,000 pixels."""
    return _shared_strips(_DEFLATE, after_empty_blocks(b"\0", scaled(_SHARED // 5, scale)), scale)


@hostile_file("tiff-lzw-strips", "a TIFF of 65,000 strips that share 1 MB of LZW codes that clear the table")
def lzw_strips(scale: float = 1.0) -> bytes:
    """As above, with LZW."""
    clears = sum(_LZW_CLEAR << 9 * index for index in range(8)).to_bytes(9)
    pixel = (_LZW_CLEAR << 18 + 5 | _LZW_END << 5).to_bytes(4)  # clear, 0, end, in nine bits each
    return _shared_strips(_LZW, clears * scaled(_SHARED // 9 - 1, scale) + pixel, scale)


@hostile_file("tiff-packbits-strips", "a TIFF of 65,000 strips that share 1 MB of PackBits that mean nothing")
def packbits_strips(scale: float = 1.0) -> bytes:
    """The byte 0x80 is skipped."""
    return _shared_strips(_PACKBITS, b"\x80" * scaled(_SHARED - 2, scale) + b"\0\0", scale)


@hostile_file("tiff-deflate-tiles", "a TIFF of 65,536 tiles that share 1 MB of empty deflate blocks")
def deflate_tiles(scale: float = 1.0) -> bytes:
    """As with strips, and 16 MP besides."""
    return _tiles(scaled_side(scale), _DEFLATE, after_empty_blocks(bytes(_TILE * _TILE), scaled(_SHARED // 5, scale)))


@hostile_file("tiff-column", "a TIFF of 1 × 2²⁴ RGB pixels in one strip of 50 kB")
def column(scale: float = 1.0) -> bytes:
    """Memory and time for each row, however short it is."""
    height = scaled(PIXELS, scale)
    return _one_strip(_grey(1, height, _DEFLATE, bits=[8] * 3, photometric=[_RGB]), zeros(3 * height))


@hostile_file("tiff-float", "a TIFF of 16 MP of floating-point grey in 65 kB")
def floating_point(scale: float = 1.0) -> bytes:
    """Scaled to eight bits after decoding, with several copies of the whole image."""
    side = scaled_side(scale)
    return _one_strip(_grey(side, side, _DEFLATE, bits=[32], sample_format=[_FLOAT]), zeros(4 * side * side))


@hostile_file("tiff-tags", "a BigTIFF with 800,000 entries in its directory, 16 MB")
def tags(scale: float = 1.0) -> bytes:
    """Each is parsed in Python, several times."""
    entries = scaled((MAX_BODY - 2000) // 20, scale)
    needed = {
        _WIDTH: 28,
        _HEIGHT: 28,
        _BITS: 8,
        _COMPRESSION: 1,
        _PHOTOMETRIC: 1,
        _STRIP_OFFSETS: 16,
        _ROWS: 28,
        _STRIP_SIZES: 784,
    }
    others = (1000 + number % 40_000 for number in count())
    rows = [struct.pack("<HHQQ", tag, _LONG, 1, value) for tag, value in needed.items()]
    rows += [struct.pack("<HHQQ", next(others), _LONG, 1, 0) for _ in range(entries)]
    pixels = bytes(784)
    return (
        b"II+\0"
        + struct.pack("<HHQ", 8, 0, 16 + 784)
        + pixels
        + struct.pack("<Q", len(rows))
        + b"".join(rows)
        + bytes(8)
    )


@hostile_file("tiff-strips", "a TIFF of 65,000 uncompressed strips of one pixel")
def strips(scale: float = 1.0) -> bytes:
    """Each is an element of a list in Python."""
    return _shared_strips(1, b"\0", scale)
