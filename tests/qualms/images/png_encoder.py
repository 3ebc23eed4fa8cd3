"""A PNG encoder for tests: every colour type, bit depth and filter, interlaced or not, with any chunks in any order.

Pillow writes only a few of these.
"""

import struct
import zlib
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

SIGNATURE = b"\x89PNG\r\n\x1a\n"
GREY, RGB, PALETTE, GREY_ALPHA, RGB_ALPHA = 0, 2, 3, 4, 6
CHANNELS = {GREY: 1, RGB: 3, PALETTE: 1, GREY_ALPHA: 2, RGB_ALPHA: 4}
DEPTHS = {GREY: (1, 2, 4, 8, 16), RGB: (8, 16), PALETTE: (1, 2, 4, 8), GREY_ALPHA: (8, 16), RGB_ALPHA: (8, 16)}
FILTERS = range(5)

Chunk = tuple[bytes, bytes]
"""type and content"""
_ADAM7 = ((0, 0, 8, 8), (0, 4, 8, 8), (4, 0, 8, 4), (0, 2, 4, 4), (2, 0, 4, 2), (0, 1, 2, 2), (1, 0, 2, 1))
"""first row, first column, row step and column step of each pass"""


def samples(seed: int, height: int, width: int, colour: int, depth: int) -> NDArray[np.int64]:
    """Pixels of all values, (H, W, C), with smooth and noisy parts."""
    rng = np.random.default_rng(seed)
    shape = (height, width, CHANNELS[colour])
    noise = rng.integers(0, 2**depth, shape)
    slope = np.arange(height)[:, None, None] * 7 + np.arange(width)[:, None] * 3 + np.arange(shape[2]) * 11
    result: NDArray[np.int64] = np.where(rng.random(shape) < 0.5, noise, (slope << max(0, depth - 8)) % 2**depth)
    return result


def header(width: int, height: int, depth: int, colour: int, interlace: int = 0, methods: int = 0) -> Chunk:
    return b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, methods & 1, methods >> 1, interlace)


def scanlines(
    pixels: NDArray[np.int64], depth: int, filters: Sequence[int] = (0,), *, interlaced: bool = False
) -> bytes:
    """The filtered rows of an image, (H, W, C); row y has the filter `filters[y % len(filters)]`."""
    if not interlaced:
        return _filtered(pixels, depth, filters)
    passes = (pixels[top::down, left::right] for top, left, down, right in _ADAM7)
    return b"".join(_filtered(part, depth, filters) for part in passes if part.size)


def _filtered(pixels: NDArray[np.int64], depth: int, filters: Sequence[int]) -> bytes:
    height, width, channels = pixels.shape
    values = pixels.reshape(height, width * channels)
    if depth == 16:
        rows = np.stack([values >> 8, values & 255], axis=-1).reshape(height, -1)
    elif depth == 8:
        rows = values
    else:
        bits = values[..., None] >> np.arange(depth - 1, -1, -1) & 1
        rows = np.packbits(bits.reshape(height, -1).astype(np.uint8), axis=1).astype(np.int64)
    offset = max(1, channels * depth // 8)
    above = np.zeros(rows.shape[1], np.int64)
    lines = []
    for y, row in enumerate(rows):
        kind = filters[y % len(filters)]
        lines.append(bytes([kind]) + ((row - _predicted(kind, row, above, offset)) % 256).astype(np.uint8).tobytes())
        above = row
    return b"".join(lines)


def _predicted(kind: int, row: NDArray[np.int64], above: NDArray[np.int64], offset: int) -> NDArray[np.int64]:
    """The bytes that a filter subtracts from a row; none for an unknown filter."""
    left, corner = (np.concatenate([np.zeros(offset, np.int64), one])[: len(one)] for one in (row, above))
    if kind == 4:
        estimate = left + above - corner
        distances = np.abs([estimate - left, estimate - above, estimate - corner])
        nearest = distances.argmin(axis=0)  # the first of equal ones, as the format demands
        paeth: NDArray[np.int64] = np.choose(nearest, [left, above, corner])
        return paeth
    return {1: left, 2: above, 3: (left + above) // 2}.get(kind, np.zeros_like(row))


def image_chunks(
    pixels: NDArray[np.int64],
    colour: int,
    depth: int,
    *,
    filters: Sequence[int] = (0,),
    interlaced: bool = False,
    before: Iterable[Chunk] = (),
    after: Iterable[Chunk] = (),
    level: int = 6,
) -> list[Chunk]:
    """The chunks of an image, (H, W, C); `before` and `after` are placed around its only IDAT."""
    height, width, _ = pixels.shape
    data = zlib.compress(scanlines(pixels, depth, filters, interlaced=interlaced), level)
    first = header(width, height, depth, colour, int(interlaced))
    return [first, *before, (b"IDAT", data), *after, (b"IEND", b"")]


def palette(entries: int, seed: int = 0) -> Chunk:
    return b"PLTE", np.random.default_rng(seed).integers(0, 256, 3 * entries, dtype=np.uint8).tobytes()


def assemble(chunks: Iterable[Chunk], wrong_crc: Iterable[bytes] = ()) -> bytes:
    """The file of these chunks; those of the types `wrong_crc` get a wrong checksum."""
    parts = [SIGNATURE]
    for kind, content in chunks:
        checksum = zlib.crc32(kind + content) ^ (1 if kind in wrong_crc else 0)
        parts.append(struct.pack(">I", len(content)) + kind + content + struct.pack(">I", checksum))
    return b"".join(parts)
