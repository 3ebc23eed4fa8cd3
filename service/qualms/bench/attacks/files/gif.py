"""Hostile GIF files."""

import struct
from collections.abc import Iterable

from qualms.bench.attacks.files.definition import hostile_file, scaled, scaled_side
from qualms.bench.attacks.payloads import MAX_BODY

_MIN_CODE_SIZE = 8
_CLEAR, _END, _FIRST, _LAST = 256, 257, 258, 4095
_GLOBAL_PALETTE, _INTERLACED = 0xF7, 0x40
_COMMENT, _UNKNOWN = b"!\xfe", b"!\x01"
_TRANSPARENT = b"!\xf9\x04\x01\0\0\0\0"


def _gif(width: int, height: int, frame: bytes, *before: bytes) -> bytes:
    palette = b"".join(bytes((index, 255 - index, 0)) for index in range(256))
    screen = b"GIF89a" + struct.pack("<HHBBB", width, height, _GLOBAL_PALETTE, 0, 0)
    return b"".join([screen, palette, *before, frame, b";"])


def _frame(width: int, height: int, data: bytes, flags: int = 0) -> bytes:
    """An image with its data in sub-blocks."""
    head = b"," + struct.pack("<HHHHB", 0, 0, width, height, flags) + bytes([_MIN_CODE_SIZE])
    return head + b"".join(_sub_block(data[i : i + 255]) for i in range(0, len(data), 255)) + b"\0"


def _sub_block(data: bytes) -> bytes:
    return bytes([len(data)]) + data


def _pack(codes: Iterable[tuple[int, int]]) -> bytes:
    """Codes with their numbers of bits, the lowest bits first."""
    result, value, length = bytearray(), 0, 0
    for code, bits in codes:
        value |= code << length
        length += bits
        while length >= 8:
            result.append(value & 0xFF)
            value >>= 8
            length -= 8
    return bytes(result) + bytes([value])


def _blank(pixels: int) -> bytes:
    """LZW data of so many pixels of colour 0: each code is a longer run than the one before, up to 3,839 pixels."""
    codes, code, bits, run = [(_CLEAR, 9), (0, 9)], _FIRST, 9, 2
    done = 1
    while done < pixels:
        codes.append((code, bits))
        done += run
        if code < _LAST:
            code, run = code + 1, run + 1
            # A code that is not yet in the table is about to be added to it.
            bits = max(bits, min(12, code.bit_length()))
    return _pack([*codes, (_END, bits)])


@hostile_file("gif-blank", "an interlaced, transparent GIF of 16 MP in 10 kB")
def blank(scale: float = 1.0) -> bytes:
    """Each code is a run of pixels, and one byte becomes four."""
    side = scaled_side(scale)
    return _gif(side, side, _frame(side, side, _blank(side * side), _INTERLACED), _TRANSPARENT)


@hostile_file("gif-canvas", "a GIF of one pixel on a canvas of 16 MP")
def canvas(scale: float = 1.0) -> bytes:
    """The canvas is made without data."""
    side = scaled_side(scale)
    return _gif(side, side, _frame(1, 1, _blank(1)), _TRANSPARENT)


@hostile_file("gif-comment", "a GIF with a comment in 8 million blocks of one byte, 16 MB")
def comment(scale: float = 1.0) -> bytes:
    """Each block is a step of a loop in Python."""
    blocks = scaled((MAX_BODY - 2000) // 2, scale)
    return _gif(1, 1, _frame(1, 1, _blank(1)), _COMMENT + b"\1c" * blocks + b"\0")


@hostile_file("gif-extensions", "a GIF with 4 million empty extensions, 16 MB")
def extensions(scale: float = 1.0) -> bytes:
    """As above, with several steps for each."""
    return _gif(1, 1, _frame(1, 1, _blank(1)), (_UNKNOWN + b"\0\0") * scaled((MAX_BODY - 2000) // 4, scale))


@hostile_file("gif-controls", "a GIF with 2 million graphic control extensions, 16 MB")
def controls(scale: float = 1.0) -> bytes:
    """Each one replaces the one before."""
    return _gif(1, 1, _frame(1, 1, _blank(1)), _TRANSPARENT * scaled((MAX_BODY - 2000) // 8, scale))
