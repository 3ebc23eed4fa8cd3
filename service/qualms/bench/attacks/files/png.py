"""Hostile PNG files."""

import struct
import zlib

from qualms.bench.attacks.files.definition import PIXELS, hostile_file, scaled, scaled_side
from qualms.bench.attacks.files.deflate import endless_zeros, zeros
from qualms.bench.attacks.payloads import MAX_BODY
from qualms.images.limits import PNG_SIGNATURE

_GREY, _RGB, _PALETTE, _RGBA = 0, 2, 3, 6
_CHANNELS = {_GREY: 1, _RGB: 3, _PALETTE: 1, _RGBA: 4}
_SMALL = 28
"""side of images whose pixels cost nothing"""
_MAX_CHUNKS = 65_000
"""nearly as many as `qualms.images.limits` accepts"""
_MAX_COMPRESSED_CHUNKS = 32
_ADAM7 = ((0, 8, 0, 8), (4, 8, 0, 8), (0, 4, 4, 8), (2, 4, 0, 4), (0, 2, 2, 4), (1, 2, 0, 2), (0, 1, 1, 2))
"""first column, step, first row, step of each pass"""
_OVERHEAD = 12
"""bytes of a chunk without data"""


def _chunk(kind: bytes, data: bytes = b"") -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _png(
    width: int, height: int, colour: int, pixels: bytes, *before: bytes, depth: int = 8, interlaced: bool = False
) -> bytes:
    """A file with chunks before its pixels; `pixels` are one or more complete chunks."""
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, interlaced)
    return b"".join([PNG_SIGNATURE, _chunk(b"IHDR", header), *before, pixels, _chunk(b"IEND")])


def _row_bytes(width: int, colour: int, depth: int = 8) -> int:
    """Bytes of a row with its filter."""
    return 1 + -(-width * _CHANNELS[colour] * depth // 8)


def _blank(width: int, height: int, colour: int, *before: bytes, depth: int = 8, interlaced: bool = False) -> bytes:
    """A black image, as short as possible."""
    size = height * _row_bytes(width, colour, depth)
    if interlaced:
        size = 0
        for left, columns, top, rows in _ADAM7:
            passed = -(-(width - left) // columns), -(-(height - top) // rows)
            size += passed[1] * _row_bytes(passed[0], colour, depth) if min(passed) > 0 else 0
    pixels = _chunk(b"IDAT", zeros(size))
    return _png(width, height, colour, pixels, *before, depth=depth, interlaced=interlaced)


def _small(*before: bytes) -> bytes:
    return _blank(_SMALL, _SMALL, _GREY, *before)


@hostile_file("png-column", "a PNG of 1 × 2²⁴ RGBA pixels in 82 kB")
def column(scale: float = 1.0) -> bytes:
    """Memory and time for each row, however short it is."""
    return _blank(1, scaled(PIXELS, scale), _RGBA)


@hostile_file("png-row", "a PNG of 2²⁴ × 1 RGBA pixels in 65 kB")
def row(scale: float = 1.0) -> bytes:
    """Buffers for whole rows are as large as the image."""
    return _blank(scaled(PIXELS, scale), 1, _RGBA)


@hostile_file("png-16-bit", "a PNG of 16 MP with 16 bits a channel and alpha in 130 kB")
def sixteen_bit(scale: float = 1.0) -> bytes:
    """Eight bytes a pixel before they are reduced."""
    side = scaled_side(scale)
    return _blank(side, side, _RGBA, depth=16)


@hostile_file("png-16-bit-grey", "a PNG of 16 MP of 16-bit grey in 33 kB")
def sixteen_bit_grey(scale: float = 1.0) -> bytes:
    """Scaled to eight bits after decoding, with copies of the whole image."""
    side = scaled_side(scale)
    return _blank(side, side, _GREY, depth=16)


@hostile_file("png-interlaced", "an interlaced PNG of 16 MP with alpha")
def interlaced(scale: float = 1.0) -> bytes:
    """Seven passes that write pixel by pixel."""
    side = scaled_side(scale)
    return _blank(side, side, _RGBA, interlaced=True)


@hostile_file("png-interlaced-column", "an interlaced PNG of 1 × 2²⁴ pixels")
def interlaced_column(scale: float = 1.0) -> bytes:
    """Each pass has rows of one pixel."""
    return _blank(1, scaled(PIXELS, scale), _RGBA, interlaced=True)


@hostile_file("png-palette", "a PNG of 16 MP with a palette of transparent colours in 16 kB")
def palette(scale: float = 1.0) -> bytes:
    """One byte a pixel becomes four, and then three."""
    side = scaled_side(scale)
    return _blank(side, side, _PALETTE, _chunk(b"PLTE", bytes(range(256)) * 3), _chunk(b"tRNS", bytes(range(256))))


@hostile_file("png-one-bit", "a PNG of 16 MP with one bit a pixel in 2 kB")
def one_bit(scale: float = 1.0) -> bytes:
    """The most pixels for the fewest bytes."""
    side = scaled_side(scale)
    return _blank(side, side, _GREY, depth=1)


@hostile_file("png-empty-idat", "a PNG of 1.4 million empty IDAT chunks, 16 MB")
def empty_idat(scale: float = 1.0) -> bytes:
    """As many chunks as a body can hold: a scan of the structure must not read all of them."""
    data = _chunk(b"IDAT", zeros(_SMALL * _row_bytes(_SMALL, _GREY)))
    chunks = scaled((MAX_BODY - 1000) // _OVERHEAD, scale)
    return _png(_SMALL, _SMALL, _GREY, _chunk(b"IDAT") * chunks + data)


@hostile_file("png-texts", "a PNG with 32 compressed texts of 1 MB each")
def texts(scale: float = 1.0) -> bytes:
    """Each is as long as Pillow accepts."""
    text = zeros(2**20)
    kinds = ((b"zTXt", b"%d\0\0"), (b"iTXt", b"%d\0\1\0\0\0"))
    chunks = [
        _chunk(kinds[index % 2][0], kinds[index % 2][1] % index + text)
        for index in range(scaled(_MAX_COMPRESSED_CHUNKS, scale))
    ]
    return _small(*chunks)


@hostile_file("png-text-bomb", "a PNG with a compressed text that expands to 16 GB")
def text_bomb(scale: float = 1.0) -> bytes:
    """Text that nobody reads."""
    return _small(_chunk(b"zTXt", b"k\0\0" + endless_zeros(scaled(MAX_BODY - 2**17, scale))))


@hostile_file("png-profile-bomb", "a PNG with a colour profile that expands to 16 GB")
def profile_bomb(scale: float = 1.0) -> bytes:
    """A profile that is not applied."""
    return _small(_chunk(b"iCCP", b"k\0\0" + endless_zeros(scaled(MAX_BODY - 2**17, scale))))


@hostile_file("png-many-texts", "a PNG with 65,000 texts of 200 bytes")
def many_texts(scale: float = 1.0) -> bytes:
    """Each has a keyword of its own."""
    return _small(*(_chunk(b"tEXt", b"%d\0" % index + bytes(200)) for index in range(scaled(_MAX_CHUNKS, scale))))


@hostile_file("png-exif", "a PNG with 16 MB of EXIF data whose directory has 65,535 entries")
def exif(scale: float = 1.0) -> bytes:
    """The orientation is read from it."""
    entries = b"".join(struct.pack(">HHII", tag, 5, 1, 8) for tag in range(scaled(65_535, scale)))
    directory = b"MM\0*" + struct.pack(">IH", 8, len(entries) // _OVERHEAD) + entries + bytes(4)
    return _small(_chunk(b"eXIf", directory + bytes(scaled(MAX_BODY - 2**20, scale))))
