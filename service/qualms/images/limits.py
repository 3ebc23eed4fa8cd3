"""Image files that cost far more than their bytes and pixels say, and those that certainly do not.

Pillow trusts what a file says of itself. So whatever lets few bytes take long, or much memory, is refused before Pillow
decodes it.
"""

import re
import struct
from collections.abc import Iterator
from itertools import islice
from typing import Any

from PIL import ImageFile

from qualms.errors import ImageError

PNG, JPEG = b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff"
MAX_PIECES = 2**16
"""Chunks, segments or strips of a file: Pillow sees to each in Python, and photographs have a few thousand."""
MAX_SCANS = 100
"""Of a JPEG: each is a pass over all pixels. About 10 are usual, and libtiff has the same limit."""
MAX_PACKED = 32
"""Compressed texts and profiles of a PNG: each may unfold to a megabyte that nobody reads."""
MAX_RUN_LENGTH_PIXELS = 2**21
"""Full HD, of a run-length BMP: Pillow decodes these in Python, a pixel at a time."""

_TIFF = (b"II", b"MM")
_FEW = 32
_PLAIN_CHUNKS = frozenset(b"IHDR PLTE tRNS IDAT IEND gAMA cHRM sRGB sBIT bKGD pHYs tIME".split())
_PACKED_CHUNKS = frozenset(b"zTXt iTXt iCCP".split())
_chunk_at = struct.Struct(">I4s").unpack_from
_SOF0, _SOS, _EOI = 0xFFC0, 0xFFDA, 0xFFD9
_PLAIN_SEGMENTS = frozenset((_SOF0, 0xFFC4, 0xFFDB, 0xFFDD, 0xFFE0, 0xFFEE))  # DHT, DQT, DRI, JFIF, Adobe
_segment_at = struct.Struct(">HH").unpack_from
_SEGMENT = re.compile(rb"\xff[^\x00\x01\xc8\xd0-\xd8\xf0-\xfd\xff]")  # the other markers have no length, or are pixels
_TILE_WIDTH, _TILE_LENGTH, _STRIPS, _TILES = 322, 323, 273, 324
_TIFF_INTEGERS = {3: 2, 4: 4, 16: 8}
_TIFF_RATIONALS = (5, 10)
_LEAST_TILED = 2**20


def decodes_quickly(data: bytes) -> bool:
    """Whether decoding costs no more than the bytes and pixels account for, told from the headers alone.

    So it is for a PNG of nothing but pixels and colours, and for a baseline JPEG with one scan and no metadata, both in
    few pieces: these may be decoded where nothing may take long. All else may hold more than it shows: texts that
    unfold to megabytes, a pass over the pixels every ten bytes, EXIF. Saying so takes about a microsecond.
    """
    try:
        if data.startswith(PNG):
            return _is_plain_png(data)
        return data.startswith(JPEG) and _is_plain_jpeg(data)
    except struct.error:  # it is cut short
        return False


def check_pieces(data: bytes) -> None:
    """Refuse what Pillow would be busy with before it knows the size, or without regard to it."""
    if data.startswith(PNG):
        kinds = list(islice(_chunks(data), MAX_PIECES + 1))
        _check_number(len(kinds), MAX_PIECES, "chunks")
        _check_number(sum(kind in _PACKED_CHUNKS for kind in kinds), MAX_PACKED, "packed texts or profiles")
    elif data.startswith(JPEG):
        marks = list(islice(_segments(data), MAX_PIECES + 1))
        _check_number(len(marks), MAX_PIECES, "segments")
        _check_number(marks.count(_SOS), MAX_SCANS, "scans")
    elif data.startswith(_TIFF):
        for tag, kind, count, _ in _directory(data):
            if tag in (_STRIPS, _TILES):
                _check_number(count, MAX_PIECES, "strips or tiles")
            elif kind in _TIFF_RATIONALS:
                _check_number(count, MAX_PIECES, f"fractions in tag {tag}")


def _check_number(found: int, most: int, name: str) -> None:
    if found > most:
        raise ImageError(f"The image has more than {most:,} {name}; no more are accepted.", reason="too_large")


def check_decoder(image: ImageFile.ImageFile, data: bytes, max_pixels: int) -> None:
    """Refuse what costs more than the image's size says; `tile` is what Pillow is about to run."""
    for codec, extents, *_ in image.tile[:1]:
        if codec == "libtiff" and extents:
            _check_tiles(*extents[2:], *_tile_size(data), max_pixels)
        if codec == "bmp_rle" and image.width * image.height > MAX_RUN_LENGTH_PIXELS:
            raise ImageError(
                f"The run-length BMP has {image.width:,} × {image.height:,} pixels; at most {MAX_RUN_LENGTH_PIXELS:,} "
                "are accepted. Send it uncompressed, or as PNG.",
                reason="too_large",
            )


def _check_tiles(width: int, height: int, across: int, down: int, max_pixels: int) -> None:
    """Refuse tiles that are far larger than the image: libtiff decodes each whole, and nobody else checks them."""
    covered = -(-width // across) * across * -(-height // down) * down
    most = 4 * max(width * height, _LEAST_TILED)  # tiles no larger than the image cover less than four times of it
    if across * down > max_pixels or covered > most:
        raise ImageError(
            f"The image of {width:,} × {height:,} pixels is stored in tiles of {across:,} × {down:,}; a tile may have "
            f"at most {max_pixels:,} pixels, and all together {most:,}.",
            reason="too_large",
        )


def _chunks(data: bytes) -> Iterator[bytes]:
    """The kinds of a PNG's chunks."""
    at, kind = len(PNG), b""
    while kind != b"IEND" and at + 8 <= len(data):
        length, kind = _chunk_at(data, at)
        yield kind
        at += 12 + length


def _is_plain_png(data: bytes) -> bool:
    at = len(PNG)
    for _ in range(_FEW):
        length, kind = _chunk_at(data, at)
        if kind not in _PLAIN_CHUNKS:
            return False
        if kind == b"IEND":
            return True
        at += 12 + length
    return False


def _is_plain_jpeg(data: bytes) -> bool:
    at, components = 2, b""
    for _ in range(_FEW):
        mark, length = _segment_at(data, at)
        if mark == _SOS:
            return data[at + 4 : at + 5] == components  # all in one scan, so that libjpeg looks for no more
        if mark not in _PLAIN_SEGMENTS:
            return False
        if mark == _SOF0:
            components = data[at + 9 : at + 10]
        at += 2 + length
    return False


def _segments(data: bytes) -> Iterator[int]:
    """The marks of a JPEG's segments, and a 0 for each byte between the first of them, which Pillow reads one by one."""
    at, has_pixels = 2, False
    while found := _SEGMENT.search(data, at):
        mark, after = int.from_bytes(found[0]), found.end()
        if not has_pixels:
            yield from bytes(found.start() - at)
        elif mark == _EOI:
            return
        yield mark
        has_pixels = has_pixels or mark == _SOS
        at = after if mark == _EOI else after + int.from_bytes(data[after : after + 2])


def _directory(data: bytes) -> Iterator[tuple[Any, ...]]:
    """Tag, type, number of values and value field of every entry in a TIFF's first directory.

    It is read here because Pillow and libtiff, which decodes, may differ on which of several equal tags they believe.
    """
    order = "<" if data.startswith(b"II") else ">"
    first, number, entry = (8, "Q", "HHQ8s") if data[2:3] == b"+" else (4, "H", "HHI4s")
    try:
        (at,) = struct.unpack_from(order + ("Q" if first == 8 else "I"), data, first)
        (entries,) = struct.unpack_from(order + number, data, at)
    except (struct.error, OverflowError):  # Pillow will say so
        return
    at, size = at + struct.calcsize(number), struct.calcsize(order + entry)
    end = at + size * min(entries, (len(data) - at) // size)
    yield from struct.iter_unpack(order + entry, data[at:end])


def _tile_size(data: bytes) -> tuple[int, int]:
    """Width and height of a TIFF's tiles; of one that has none, 1 × 1."""
    sides = {}
    for tag, kind, count, field in _directory(data):
        if tag in (_TILE_WIDTH, _TILE_LENGTH):
            size = _TIFF_INTEGERS.get(kind, 0)
            side = int.from_bytes(field[:size], "little" if data.startswith(b"II") else "big")
            if tag in sides or count != 1 or side == 0 or size > len(field):  # it would be elsewhere in the file
                raise ImageError("The image is damaged: its tile size cannot be read.", reason="malformed")
            sides[tag] = side
    return sides.get(_TILE_WIDTH, 1), sides.get(_TILE_LENGTH, 1)
