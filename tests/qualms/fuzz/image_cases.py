"""Mutated image files for `POST /predict`: plain ones, odd ones and small versions of hostile ones, in every format.

Every case follows from its number alone (and the campaign's seed).
"""

import io
import random
import struct
import zlib
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from PIL import Image
from tests.qualms.fuzz.case import Case

from qualms.bench.attacks.files.registry import FILES

TIMEOUT = 3
"""seconds; a decode that takes longer is answered with 504"""
HOSTILE_SCALE = 0.0005
"""small enough for hundreds of cases a second"""
_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_SIDES = (1, 2, 7, 8, 9, 16, 28, 32, 33, 64)
_EDGE_VALUES = (0, 1, 2, 3, 4, 7, 8, 15, 16, 63, 64, 127, 128, 254, 255)
_EDGE_WORDS = (0, 1, 127, 128, 255, 256, 0x7FFF, 0x8000, 0xFFFF, 2**31 - 1, 2**31, 2**32 - 1)
_MAX_MUTATIONS = 4
_MAX_COPY = 512
_HEAD = (
    b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Type: image/%b\r\nX-Request-Timeout: %d\r\n"
    b"Content-Length: %d\r\n\r\n%b"
)

Random = random.Random
Mutation = Callable[[Random, bytearray], None]
"""changes a file in place"""

_SAVED: tuple[tuple[str, str, dict[str, Any]], ...] = (
    *(("png", mode, {}) for mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")),
    ("png", "RGB", {"compress_level": 0}),
    ("png", "RGB", {"dpi": (72, 72), "icc_profile": bytes(200)}),
    *(("jpeg", mode, {"quality": 60}) for mode in ("L", "RGB", "CMYK")),
    *(("jpeg", "RGB", {"subsampling": subsampling}) for subsampling in (0, 1, 2)),
    ("jpeg", "RGB", {"progressive": True}),
    ("jpeg", "L", {"progressive": True, "quality": 30}),
    ("jpeg", "CMYK", {"progressive": True}),
    ("jpeg", "RGB", {"restart_marker_blocks": 1}),
    ("jpeg", "RGB", {"comment": b"comment", "icc_profile": bytes(300)}),
    *(("webp", mode, {"lossless": lossless}) for mode in ("RGB", "RGBA") for lossless in (False, True)),
    *(("bmp", mode, {}) for mode in ("1", "L", "P", "RGB", "RGBA")),
    *(("gif", mode, {}) for mode in ("L", "P")),
    *(("tiff", mode, {}) for mode in ("1", "L", "P", "RGB", "RGBA", "CMYK", "I;16", "F")),
    *(("tiff", "RGB", {"compression": name}) for name in ("tiff_lzw", "tiff_deflate", "packbits", "jpeg", "raw")),
    ("tiff", "1", {"compression": "group4"}),
)  # fmt: skip
"""format, mode and options of files that Pillow writes"""


def image_case(seed: int, number: int) -> Case:
    """The case of a number: one in ten files is complete, the others are changed in up to four places."""
    rng = Random(f"images/{seed}/{number}")
    names = _hostile_names() if rng.random() < 0.3 else ()
    kind, original = hostile_version(rng.choice(names)) if names else saved_file(rng.randrange(4 * len(_SAVED)))
    data, done = bytearray(original), "complete"
    if rng.random() < 0.9:
        for _ in range(rng.randint(1, _MAX_MUTATIONS)):
            mutation = rng.choice(MUTATIONS)
            mutation(rng, data)
            done = mutation.__name__
        if data.startswith(_PNG_SIGNATURE) and rng.random() < 0.8:
            repair_checksums(data)
    request = _HEAD % (kind.encode(), TIMEOUT, len(data), bytes(data))
    return Case(number, f"{kind}, {'hostile, ' if names else ''}{done}", request)


@cache
def saved_file(number: int) -> tuple[str, bytes]:
    """Format and bytes of a file that Pillow writes."""
    kind, mode, options = _SAVED[number % len(_SAVED)]
    rng = np.random.default_rng(number)
    size = (int(rng.choice(_SIDES)), int(rng.choice(_SIDES)))
    pixels = rng.integers(0, 256, (size[1], size[0], 3), np.uint8)
    image = Image.fromarray(pixels)
    if number % 3 == 0:
        exif = Image.Exif()
        exif[0x0112] = int(rng.integers(1, 9))  # orientation
        options = {**options, "exif": exif}
    if kind in ("bmp", "gif"):
        options.pop("exif", None)
    with io.BytesIO() as stream:
        (image.convert("L").convert(mode) if mode in ("I;16", "F") else image.convert(mode)).save(
            stream, kind, **options
        )
        return kind, stream.getvalue()


@cache
def hostile_version(name: str) -> tuple[str, bytes]:
    """Format and bytes of a small version of a hostile file."""
    return name.partition("-")[0], FILES[name].make(HOSTILE_SCALE)


@cache
def _hostile_names() -> tuple[str, ...]:
    return tuple(FILES)


def repair_checksums(data: bytearray) -> None:
    """Make the checksums of a PNG's chunks right, so that its decoder sees the changed bytes."""
    offset = len(_PNG_SIGNATURE)
    while offset + 12 <= len(data):
        (length,) = struct.unpack_from(">I", data, offset)
        end = offset + 8 + length
        if end + 4 > len(data):
            return
        struct.pack_into(">I", data, end, zlib.crc32(data[offset + 4 : end]))
        offset = end + 4


def bits(rng: Random, data: bytearray) -> None:
    for _ in range(rng.randint(1, 8) if data else 0):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def edge_bytes(rng: Random, data: bytearray) -> None:
    for _ in range(rng.randint(1, 4) if data else 0):
        data[rng.randrange(len(data))] = rng.choice(_EDGE_VALUES)


def header_bytes(rng: Random, data: bytearray) -> None:
    for _ in range(rng.randint(1, 4) if data else 0):
        data[rng.randrange(min(64, len(data)))] = rng.choice(_EDGE_VALUES)


def edge_words(rng: Random, data: bytearray) -> None:
    """Lengths, offsets and sizes are words, mostly near the start or the end."""
    if len(data) < 8:
        return
    window = min(len(data) - 4, rng.choice((32, 256, len(data))))
    position = rng.randrange(window) if rng.random() < 0.7 else len(data) - 4 - rng.randrange(window)
    struct.pack_into(rng.choice(("<I", ">I")), data, position, rng.choice(_EDGE_WORDS))


def truncated(rng: Random, data: bytearray) -> None:
    del data[rng.randrange(len(data) + 1) :]


def removed(rng: Random, data: bytearray) -> None:
    start = rng.randrange(len(data) + 1)
    del data[start : start + rng.randint(1, 64)]


def repeated(rng: Random, data: bytearray) -> None:
    """A piece again, up to 16 times: segments, chunks and scans."""
    start = rng.randrange(len(data) + 1)
    piece = data[start : start + rng.randint(1, _MAX_COPY)]
    data[start:start] = piece * rng.choice((1, 2, 16))


def inserted(rng: Random, data: bytearray) -> None:
    start = rng.randrange(len(data) + 1)
    data[start:start] = rng.randbytes(rng.randint(1, 32))


def noise(rng: Random, data: bytearray) -> None:
    start = rng.randrange(len(data) + 1)
    length = min(rng.randint(1, 64), len(data) - start)
    data[start : start + length] = rng.randbytes(length)


def spliced(rng: Random, data: bytearray) -> None:
    """The end of another file."""
    _, other = saved_file(rng.randrange(4 * len(_SAVED)))
    data[rng.randrange(len(data) + 1) :] = other[rng.randrange(len(other)) :]


MUTATIONS: tuple[Mutation, ...] = (
    bits, edge_bytes, header_bytes, edge_words, truncated, removed, repeated, inserted, noise, spliced,
)  # fmt: skip
