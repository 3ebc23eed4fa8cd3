"""Hostile WebP files."""

import struct
from collections.abc import Iterable

from qualms.bench.attacks.files.definition import SIDE, hostile_file, scaled, scaled_side
from qualms.bench.attacks.payloads import MAX_BODY

_Bits = tuple[int, int]
"""value and number of bits"""
_MAX_WIDTH = 2**14
_ANIMATED, _ALPHA = 0x02, 0x10
_PREDICTOR, _COLOUR, _SUBTRACT_GREEN = 0, 1, 2
"""transforms"""
_PLAIN_CODES = [(0b0001, 4)] * 5
"""prefix codes of one symbol, 0, for the five kinds of values: a pixel then takes no bits"""


def _chunk(kind: bytes, data: bytes) -> bytes:
    return kind + struct.pack("<I", len(data)) + data + bytes(len(data) % 2)


def _webp(*chunks: bytes) -> bytes:
    body = b"WEBP" + b"".join(chunks)
    return b"RIFF" + struct.pack("<I", len(body)) + body


def _pack(fields: Iterable[_Bits]) -> bytes:
    """Bits, the lowest ones first."""
    value = length = 0
    for field, bits in fields:
        value |= field << length
        length += bits
    return value.to_bytes(length // 8 + 1, "little")


def _lossless(width: int, height: int, fields: Iterable[_Bits] = ((0, 1),)) -> bytes:
    """A VP8L image of one colour; `fields` are its transforms."""
    head = [(0x2F, 8), (width - 1, 14), (height - 1, 14), (1, 1), (0, 3)]
    return _pack([*head, *fields, (0, 1), (0, 1), *_PLAIN_CODES])


def _sized(scale: float) -> tuple[int, int]:
    """Width and height, of at most 16,384 × 1,024."""
    return _MAX_WIDTH, scaled(SIDE * SIDE // _MAX_WIDTH, scale)


def _extended(width: int, height: int, flags: int) -> bytes:
    return _chunk(b"VP8X", struct.pack("<I", flags) + _three(width - 1) + _three(height - 1))


def _three(value: int) -> bytes:
    return struct.pack("<I", value)[:3]


def _frame(width: int, height: int, image: bytes) -> bytes:
    return _chunk(b"ANMF", bytes(6) + _three(width - 1) + _three(height - 1) + bytes(4) + image)


@hostile_file("webp-blank", "a WebP of 16 MP in 28 bytes")
def blank(scale: float = 1.0) -> bytes:
    """No bits for the pixels."""
    return _webp(_chunk(b"VP8L", _lossless(*_sized(scale))))


@hostile_file("webp-transforms", "a WebP of 16 MP with three transforms in 36 bytes")
def transforms(scale: float = 1.0) -> bytes:
    """Each is a pass over all pixels."""
    sub_image = [(0, 1), *_PLAIN_CODES]
    blocks = (0, 3)  # the smallest blocks, 4 × 4 pixels
    fields = [(1, 1), (_PREDICTOR, 2), blocks, *sub_image, (1, 1), (_COLOUR, 2), blocks, *sub_image]
    return _webp(_chunk(b"VP8L", _lossless(*_sized(scale), [*fields, (1, 1), (_SUBTRACT_GREEN, 2), (0, 1)])))


@hostile_file("webp-canvas", "an animated WebP of one pixel on a canvas of 16 MP")
def canvas(scale: float = 1.0) -> bytes:
    """Several copies of the canvas are kept."""
    side = scaled_side(scale)
    frame = _frame(1, 1, _chunk(b"VP8L", _lossless(1, 1)))
    return _webp(_extended(side, side, _ANIMATED | _ALPHA), _chunk(b"ANIM", bytes(6)), frame)


@hostile_file("webp-large-frames", "an animated WebP of 16 MP in each of 200,000 frames, 16 MB")
def large_frames(scale: float = 1.0) -> bytes:
    """A decoder that reads ahead never ends."""
    width, height = _sized(scale)
    frame = _frame(width, height, _chunk(b"VP8L", _lossless(width, height)))
    number = scaled((MAX_BODY - 1000) // len(frame), scale)
    return _webp(_extended(width, height, _ANIMATED | _ALPHA), _chunk(b"ANIM", bytes(6)), frame * number)
