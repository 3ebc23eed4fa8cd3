"""Thousands of image files of all accepted formats, valid and invalid, and random mutations of them.

Everything is drawn by code with fixed seeds, so that a name always belongs to the same bytes.
"""

import struct
from collections.abc import Iterator
from itertools import chain
from random import Random

from tests.qualms.images.jpeg_files import jpeg_files
from tests.qualms.images.other_files import other_files
from tests.qualms.images.png_encoder import SIGNATURE
from tests.qualms.images.png_files import NamedFile, png_files
from tests.qualms.images.unusual_jpeg_files import unusual_jpeg_files
from tests.qualms.images.unusual_png_files import unusual_png_files

_LENGTHS = (0, 1, 2, 3, 255, 256, 2**15, 2**16 - 1, 2**16, 2**31 - 1, 2**31, 2**32 - 1)
_MAX_CHANGES = 4


def image_files() -> Iterator[NamedFile]:
    """Name and bytes of each file; the part of the name before the colon is its kind."""
    yield from chain(png_files(), unusual_png_files(), jpeg_files(), unusual_jpeg_files(), other_files())


def mutations(data: bytes, rng: Random, others: list[bytes] | None = None) -> Iterator[bytes]:
    """An endless sequence of mutations of a file; with `others`, some are spliced with one of these."""
    kinds = [_flip_bits, _set_byte, _insert, _delete, _cut, _edit_length, _repeat, _move, _fill]
    while True:
        changed = data
        for _ in range(rng.randint(1, _MAX_CHANGES)):
            if others and rng.random() < 0.1:
                changed = _splice(changed, rng.choice(others), rng)
            else:
                changed = rng.choice(kinds)(changed, rng)
        yield changed


def _span(data: bytes, rng: Random) -> tuple[int, int]:
    """A random range of bytes: mostly short, sometimes a whole chunk or segment."""
    bounds = _parts(data)
    if len(bounds) > 1 and rng.random() < 0.5:
        return rng.choice(bounds)
    start = rng.randrange(len(data) + 1)
    return start, min(len(data), start + rng.choice((1, 2, 4, 8, 64)))


def _parts(data: bytes) -> list[tuple[int, int]]:
    """Start and end of the chunks of a PNG or the segments of a JPEG file, as far as they can be read."""
    bounds = list[tuple[int, int]]()
    offset = 8 if data.startswith(SIGNATURE) else 2
    while offset + 8 <= len(data) and len(bounds) < 100:
        if data.startswith(SIGNATURE):
            end = offset + 12 + struct.unpack_from(">I", data, offset)[0]
        elif data.startswith(b"\xff\xd8") and data[offset] == 0xFF:
            end = offset + 2 + struct.unpack_from(">H", data, offset + 2)[0]
        else:
            break
        bounds.append((offset, min(end, len(data))))
        offset = end
    return bounds


def _flip_bits(data: bytes, rng: Random) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8)) if changed else 0):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _set_byte(data: bytes, rng: Random) -> bytes:
    start = rng.randrange(len(data) + 1)
    return data[:start] + bytes([rng.choice((0, 1, 127, 128, 254, 255))]) + data[start + 1 :]


def _insert(data: bytes, rng: Random) -> bytes:
    start = rng.randrange(len(data) + 1)
    return data[:start] + rng.randbytes(rng.choice((1, 2, 4, 30))) + data[start:]


def _delete(data: bytes, rng: Random) -> bytes:
    start, end = _span(data, rng)
    return data[:start] + data[end:]


def _cut(data: bytes, rng: Random) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def _edit_length(data: bytes, rng: Random) -> bytes:
    """Set a length field, or any two or four bytes if the file has none, to a special value."""
    bounds = _parts(data)
    start = rng.choice(bounds)[0] if bounds else rng.randrange(len(data) + 1)
    value = rng.choice(_LENGTHS)
    if data.startswith(b"\xff\xd8"):
        return data[: start + 2] + struct.pack(">H", value & 0xFFFF) + data[start + 4 :]
    return data[:start] + struct.pack(rng.choice("<>") + "I", value) + data[start + 4 :]


def _repeat(data: bytes, rng: Random) -> bytes:
    start, end = _span(data, rng)
    return data[:end] + data[start:end] * rng.choice((1, 1, 2, 20)) + data[end:]


def _move(data: bytes, rng: Random) -> bytes:
    start, end = _span(data, rng)
    rest = data[:start] + data[end:]
    target = rng.choice([bound for bound, _ in _parts(rest)] or [rng.randrange(len(rest) + 1)])
    return rest[:target] + data[start:end] + rest[target:]


def _fill(data: bytes, rng: Random) -> bytes:
    start, end = _span(data, rng)
    return data[:start] + bytes([rng.choice((0, 255, 0x41))]) * (end - start) + data[end:]


def _splice(data: bytes, other: bytes, rng: Random) -> bytes:
    return data[: rng.randrange(len(data) + 1)] + other[rng.randrange(len(other) + 1) :]
