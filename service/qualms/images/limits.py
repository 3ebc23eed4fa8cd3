"""Limits on hostile image files, which need far more time or memory than their bytes and pixels suggest.

Pillow trusts the headers of a file, so these limits are checked before it decodes. `check_file_limits` checks the raw
bytes of PNG, JPEG and TIFF files, `check_decoder_limits` an opened TIFF or BMP image. The limit on pixels
is an argument: `QUALMS_MAX_PIXELS` in the service, else `qualms.images.pillow_decoder.MAX_PIXELS`.
"""

import re
import struct
import sys
from collections.abc import Iterator
from itertools import islice
from typing import Any

from PIL import ImageFile

from qualms.errors import ImageError

MAX_PNG_CHUNKS = 2**16
"""Pillow parses every chunk in Python; photographs have at most a few thousand."""
MAX_PNG_COMPRESSED_CHUNKS = 32
"""Compressed texts and colour profiles: each may decompress to a megabyte."""
MAX_JPEG_SEGMENTS = 2**16
"""Pillow parses every segment in Python; photographs have at most a few thousand."""
MAX_JPEG_SCANS = 100
"""Each scan is a pass over all pixels. About 10 are usual, and libtiff has the same limit."""
MAX_TIFF_STRIPS = 2**16
"""Strips or tiles: Pillow lists them in Python; photographs have at most a few thousand."""
MAX_TIFF_RATIONALS = 2**16
"""Fractions in one tag: Pillow converts every one in Python."""
MAX_BMP_RLE_PIXELS = 2**21
"""Full HD, for run-length encoded BMP files: Pillow decodes these in Python, pixel by pixel."""

PNG_SIGNATURE, JPEG_SIGNATURE = b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff"
TIFF_BYTE_ORDERS = (b"II", b"MM")
_MAX_HEADER_SEGMENTS = 256
"""Maximum number of segments that `jpeg_headers` reads; photographs with long profiles have about fifty."""

_PNG_COMPRESSED_CHUNKS = frozenset(b"zTXt iTXt iCCP".split())
_unpack_png_chunk_header = struct.Struct(">I4s").unpack_from

_SOF0, _EOI, _SOS = 0xFFC0, 0xFFD9, 0xFFDA
_FILL = 0xFFFF
_unpack_jpeg_segment_header = struct.Struct(">HH").unpack_from
_JPEG_SEGMENT_MARKER = re.compile(rb"\xff[^\x00\x01\xc8\xd0-\xd8\xf0-\xfd\xff]")
"""Markers followed by a length, and EOI; excluded are stuffed bytes, TEM, RST, SOI, fill bytes and reserved markers."""

_STRIP_OFFSETS, _TILE_WIDTH, _TILE_LENGTH, _TILE_OFFSETS = 273, 322, 323, 324
_TIFF_INTEGER_SIZES = {3: 2, 4: 4, 16: 8}  # SHORT, LONG, LONG8
_TIFF_RATIONAL_TYPES = (5, 10)  # RATIONAL, SRATIONAL
_MIN_TILE_BUDGET = 2**20
"""Pixels that tiles may always cover, even for the smallest image."""


def check_file_limits(data: bytes) -> None:
    """Refuse files whose structure takes Pillow a long time to parse, whatever the number of pixels."""
    if data.startswith(PNG_SIGNATURE):
        kinds = list(islice(_png_chunks(data), MAX_PNG_CHUNKS + 1))
        compressed = sum(kind in _PNG_COMPRESSED_CHUNKS for kind in kinds)
        _check_count(len(kinds), MAX_PNG_CHUNKS, "chunks")
        _check_count(compressed, MAX_PNG_COMPRESSED_CHUNKS, "compressed texts or profiles")
    elif data.startswith(JPEG_SIGNATURE):
        markers = list(islice(_jpeg_markers(data), MAX_JPEG_SEGMENTS + 1))
        _check_count(len(markers), MAX_JPEG_SEGMENTS, "segments")
        _check_count(markers.count(_SOS), MAX_JPEG_SCANS, "scans")
    elif data.startswith(TIFF_BYTE_ORDERS):
        for tag, kind, count, _ in tiff_directory(data):
            if tag in (_STRIP_OFFSETS, _TILE_OFFSETS):
                _check_count(count, MAX_TIFF_STRIPS, "strips or tiles")
            elif kind in _TIFF_RATIONAL_TYPES:
                _check_count(count, MAX_TIFF_RATIONALS, f"fractions in tag {tag}")


def check_decoder_limits(image: ImageFile.ImageFile, data: bytes, max_pixels: int) -> None:
    """Refuse opened images whose decoder needs more time or memory than their size suggests; `image.tile` names it."""
    for codec, extents, *_ in image.tile[:1]:
        if codec == "libtiff" and extents:
            _check_tiff_tiles(*extents[2:], *_tiff_tile_size(data), max_pixels)
        if codec == "bmp_rle" and image.width * image.height > MAX_BMP_RLE_PIXELS:
            raise ImageError(
                f"The run-length BMP has {image.width:,} × {image.height:,} pixels; at most {MAX_BMP_RLE_PIXELS:,} "
                "are accepted. Send it uncompressed, or as PNG.",
                reason="too_large",
            )


def _check_count(count: int, limit: int, name: str) -> None:
    if count > limit:
        raise ImageError(f"The image has more than {limit:,} {name}; no more are accepted.", reason="too_large")


def _check_tiff_tiles(width: int, height: int, tile_width: int, tile_height: int, max_pixels: int) -> None:
    """Refuse tiles far larger than the image, because libtiff decodes every tile completely."""
    covered = -(-width // tile_width) * tile_width * -(-height // tile_height) * tile_height
    # Tiles no larger than the image cover less than four times its area.
    budget = 4 * max(width * height, _MIN_TILE_BUDGET)
    if tile_width * tile_height > max_pixels or covered > budget:
        raise ImageError(
            f"The image of {width:,} × {height:,} pixels is stored in tiles of {tile_width:,} × {tile_height:,}; a tile "
            f"may have at most {max_pixels:,} pixels, and all tiles together {budget:,}.",
            reason="too_large",
        )


def _png_chunks(data: bytes) -> Iterator[bytes]:
    """The chunk types of a PNG up to IEND."""
    offset, kind = len(PNG_SIGNATURE), b""
    while kind != b"IEND" and offset + 8 <= len(data):
        length, kind = _unpack_png_chunk_header(data, offset)
        yield kind
        offset += 12 + length


def jpeg_headers(data: bytes) -> Iterator[tuple[int, int]]:
    """Marker and offset of each segment before the first scan, up to a fixed number; struct.error if the file ends early."""
    offset = 2
    for _ in range(_MAX_HEADER_SEGMENTS):
        marker, length = _unpack_jpeg_segment_header(data, offset)
        if marker == _SOS or marker < _SOF0:
            return
        if marker == _FILL:  # any number of fill bytes may precede a marker
            offset += 1
            continue
        yield marker, offset
        offset += 2 + length


def _jpeg_markers(data: bytes) -> Iterator[int]:
    """The markers of a JPEG's segments, and a 0 for every byte between segments, which Pillow reads one by one."""
    offset, in_pixels = 2, False
    while match := _JPEG_SEGMENT_MARKER.search(data, offset):
        marker, end = int.from_bytes(match[0]), match.end()
        if not in_pixels:
            yield from bytes(match.start() - offset)
        elif marker == _EOI:
            return
        yield marker
        in_pixels = in_pixels or marker == _SOS
        offset = end if marker == _EOI else end + int.from_bytes(data[end : end + 2])


def tiff_directory(data: bytes, max_entries: int | None = None) -> Iterator[tuple[Any, ...]]:
    """Tag, type, number of values and value field of the entries in a TIFF's first directory, the first `max_entries` if given.

    Pillow's parsed tags are not used, because Pillow and libtiff, which decodes, treat duplicate tags differently.
    """
    order = "<" if data.startswith(b"II") else ">"
    is_big_tiff = data[2:3] == b"+"
    offset_at, offset_format, count_format, entry_format = (
        (8, "Q", "Q", "HHQ8s") if is_big_tiff else (4, "I", "H", "HHI4s")
    )
    try:
        (offset,) = struct.unpack_from(order + offset_format, data, offset_at)
        (count,) = struct.unpack_from(order + count_format, data, offset)
    except (struct.error, OverflowError):  # Pillow refuses this file
        return
    entry = struct.Struct(order + entry_format)
    start = offset + struct.calcsize(count_format)
    count = min(count, (len(data) - start) // entry.size, sys.maxsize if max_entries is None else max_entries)
    yield from entry.iter_unpack(data[start : start + entry.size * count])


def tiff_integer(data: bytes, kind: int, field: bytes) -> int:
    """The first value of an integer entry, from its value field; 0 for other types and for values stored elsewhere."""
    size = _TIFF_INTEGER_SIZES.get(kind, 0)
    if size > len(field):
        return 0
    return int.from_bytes(field[:size], "little" if data.startswith(b"II") else "big")


def _tiff_tile_size(data: bytes) -> tuple[int, int]:
    """Width and height of a TIFF's tiles, or 1 × 1 if it has strips."""
    sides = {}
    for tag, kind, count, field in tiff_directory(data):
        if tag in (_TILE_WIDTH, _TILE_LENGTH):
            side = tiff_integer(data, kind, field)
            if tag in sides or count != 1 or side == 0:
                raise ImageError("The image is damaged: its tile size cannot be read.", reason="malformed")
            sides[tag] = side
    return sides.get(_TILE_WIDTH, 1), sides.get(_TILE_LENGTH, 1)
