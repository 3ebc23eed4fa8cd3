"""Hostile files are refused before they are decoded; similar harmless files are decoded."""

import io
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from qualms.errors import ImageError
from qualms.images.limits import (
    MAX_BMP_RLE_PIXELS,
    MAX_JPEG_SCANS,
    MAX_JPEG_SEGMENTS,
    MAX_PNG_CHUNKS,
    MAX_PNG_COMPRESSED_CHUNKS,
    MAX_TIFF_RATIONALS,
    MAX_TIFF_STRIPS,
)
from qualms.images.pillow_decoder import decode

SHORT, LONG, RATIONAL, IFD, LONG8, SLONG8 = 3, 4, 5, 13, 16, 17
RAW, DEFLATE = 1, 8
WIDTH, HEIGHT, COMPRESSION, STRIP_OFFSETS = 256, 257, 259, 273
ORIENTATION, ROWS_PER_STRIP, STRIP_BYTE_COUNTS, X_RESOLUTION = 274, 278, 279, 282
TILE_WIDTH, TILE_LENGTH, TILE_OFFSETS, TILE_BYTE_COUNTS = 322, 323, 324, 325

Entry = tuple[int, int, list[int]]


def pixels(*shape: int) -> NDArray[np.uint8]:
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


def encode(image: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def reason(data: bytes, **options: Any) -> str:
    with pytest.raises(ImageError) as caught:
        decode(data, **options)
    return caught.value.reason


def tiff(entries: list[Entry], order: str = "<", *, big: bool = False) -> bytes:
    """A TIFF with one directory; values that do not fit into an entry follow the directory."""
    codes = {SHORT: "H", LONG: "I", RATIONAL: "II", IFD: "I", LONG8: "Q", SLONG8: "q"}
    word, room = ("Q", 8) if big else ("I", 4)
    version = struct.pack(order + "HHHQ", 43, 8, 0, 16) if big else struct.pack(order + "HI", 42, 8)
    start = (16 if big else 8) + (8 if big else 2) + len(entries) * (20 if big else 12) + room
    directory = struct.pack(order + ("Q" if big else "H"), len(entries))
    beyond = b""
    for tag, kind, values in sorted(entries, key=lambda entry: entry[0]):
        data = b"".join(struct.pack(order + codes[kind], *([value] * len(codes[kind]))) for value in values)
        directory += struct.pack(order + "HH" + word, tag, kind, len(values))
        if len(data) <= room:
            directory += data.ljust(room, b"\0")
        else:
            directory += struct.pack(order + word, start + len(beyond))
            beyond += data
    return (b"II" if order == "<" else b"MM") + version + directory + bytes(room) + beyond


def grey(width: int, height: int, compression: int = DEFLATE) -> list[Entry]:
    return [
        (WIDTH, LONG, [width]),
        (HEIGHT, LONG, [height]),
        (258, SHORT, [8]),
        (COMPRESSION, SHORT, [compression]),
        (262, SHORT, [1]),
    ]


def tiled(
    image: NDArray[np.uint8], tile_width: int, tile_height: int, *more: Entry, order: str = "<", big: bool = False
) -> bytes:
    """A grey image in separately compressed tiles; tiles at the right and bottom edges are padded."""
    height, width = image.shape
    tiles = [
        zlib.compress(np.pad(part, ((0, tile_height - part.shape[0]), (0, tile_width - part.shape[1]))).tobytes())
        for row in range(0, height, tile_height)
        for column in range(0, width, tile_width)
        for part in [image[row : row + tile_height, column : column + tile_width]]
    ]
    entries = [
        *grey(width, height),
        (TILE_WIDTH, LONG, [tile_width]),
        (TILE_LENGTH, SHORT, [tile_height]),
        (TILE_BYTE_COUNTS, LONG, [len(tile) for tile in tiles]),
        *more,
    ]
    offset = len(tiff([*entries, (TILE_OFFSETS, LONG, [0] * len(tiles))], order, big=big))
    offsets = [offset + sum(map(len, tiles[:index])) for index in range(len(tiles))]
    return tiff([*entries, (TILE_OFFSETS, LONG, offsets)], order, big=big) + b"".join(tiles)


@pytest.mark.parametrize(("order", "big"), [("<", False), (">", False), ("<", True)])
@pytest.mark.parametrize(
    ("shape", "tile_width", "tile_height"),
    [((10, 10), 256, 256), ((10, 10), 512, 512), ((70, 100), 64, 32), ((300, 33), 16, 16)],
)
def test_a_tiff_with_common_tile_sizes_is_decoded(
    order: str, big: bool, shape: tuple[int, int], tile_width: int, tile_height: int
) -> None:
    image = pixels(*shape)
    data = tiled(image, tile_width, tile_height, order=order, big=big)
    np.testing.assert_array_equal(np.asarray(decode(data)), image)


@pytest.mark.parametrize(("order", "big"), [("<", False), (">", False), ("<", True)])
@pytest.mark.parametrize(("tile_width", "tile_height"), [(32_768, 30_000), (8192, 8192), (2**22 + 16, 1)])
def test_tiles_far_larger_than_the_image_are_refused(order: str, big: bool, tile_width: int, tile_height: int) -> None:
    tile = zlib.compress(bytes(100))
    entries = [
        (TILE_WIDTH, LONG, [tile_width]),
        (TILE_LENGTH, LONG, [tile_height]),
        (TILE_BYTE_COUNTS, LONG, [len(tile)]),
    ]
    data = tiff([*grey(10, 10), *entries, (TILE_OFFSETS, LONG, [200])], order, big=big).ljust(200, b"\0") + tile
    with pytest.raises(
        ImageError, match=f"10 × 10 pixels is stored in tiles of {tile_width:,} × {tile_height:,}"
    ) as caught:
        decode(data)
    assert caught.value.reason == "too_large"


def test_one_huge_tile_is_refused() -> None:
    """The file is valid, but decoding it would take a hundred thousand times the memory of its pixels."""
    assert reason(tiled(np.zeros((10, 10), np.uint8), 4096, 4096)) == "too_large"


def test_tiles_that_together_cover_far_more_than_the_image_are_refused() -> None:
    """Each tile is within the limits, but every tile of this image contributes only one pixel."""
    tile = zlib.compress(bytes(2**16))
    rows = 100
    entries = [(TILE_WIDTH, LONG, [2**16]), (TILE_LENGTH, LONG, [1]), (TILE_BYTE_COUNTS, LONG, [len(tile)] * rows)]
    offset = len(tiff([*grey(1, rows), *entries, (TILE_OFFSETS, LONG, [0] * rows)]))
    assert reason(tiff([*grey(1, rows), *entries, (TILE_OFFSETS, LONG, [offset] * rows)]) + tile) == "too_large"


def test_max_pixels_also_limits_the_tile_size() -> None:
    data = tiled(pixels(10, 10), 16, 16)
    assert decode(data, max_pixels=256).size == (10, 10)
    assert reason(data, max_pixels=255) == "too_large"


def test_tiles_are_compared_with_the_stored_orientation_of_the_image() -> None:
    """After EXIF rotation the image is 3 pixels wide, and tiles of this width would cover far too much."""
    image = pixels(3, 5000)
    upright = decode(tiled(image, 1024, 16, (ORIENTATION, SHORT, [6])))
    np.testing.assert_array_equal(np.asarray(upright), np.rot90(image, -1))


@pytest.mark.parametrize(
    "entry",
    [(TILE_WIDTH, IFD, [4096]), (TILE_WIDTH, SLONG8, [4096]), (TILE_WIDTH, LONG, [4096]), (TILE_LENGTH, LONG, [0])],
)
def test_an_ambiguous_tile_size_is_malformed(entry: Entry) -> None:
    """Pillow ignores unknown types and uses the second entry; libtiff uses the first one."""
    small = [
        (TILE_WIDTH, LONG, [16]),
        (TILE_LENGTH, LONG, [16]),
        (TILE_OFFSETS, LONG, [8]),
        (TILE_BYTE_COUNTS, LONG, [8]),
    ]
    with pytest.raises(ImageError, match="tile size cannot be read") as caught:
        decode(tiff([entry, *grey(10, 10), *small]))
    assert caught.value.reason == "malformed"


def test_eight_byte_tile_sizes_are_accepted_in_big_tiff_only() -> None:
    """In a classic TIFF the entry would contain the offset of the eight bytes instead of the size."""
    sides = [(TILE_WIDTH, LONG8, [16]), (TILE_LENGTH, LONG8, [16])]
    tile = zlib.compress(pixels(16, 16).tobytes())
    for big in (True, False):
        entries = [*grey(10, 10), *sides, (TILE_BYTE_COUNTS, LONG, [len(tile)])]
        offset = len(tiff([*entries, (TILE_OFFSETS, LONG, [0])], big=big))
        data = tiff([*entries, (TILE_OFFSETS, LONG, [offset])], big=big) + tile
        if big:
            np.testing.assert_array_equal(np.asarray(decode(data)), pixels(16, 16)[:10, :10])
        else:
            assert reason(data) == "malformed"


def test_one_strip_is_decoded_for_any_value_of_rows_per_strip() -> None:
    image = pixels(10, 12)
    strip = zlib.compress(image.tobytes())
    for rows in (10, 1000, 2**31 - 1, 2**32 - 1):
        entries = [(ROWS_PER_STRIP, LONG, [rows]), (STRIP_BYTE_COUNTS, LONG, [len(strip)])]
        offset = len(tiff([*grey(12, 10), *entries, (STRIP_OFFSETS, LONG, [0])]))
        data = tiff([*grey(12, 10), *entries, (STRIP_OFFSETS, LONG, [offset])]) + strip
        np.testing.assert_array_equal(np.asarray(decode(data)), image)


def test_too_many_tiff_strips_are_refused() -> None:
    def with_strips(strips: int) -> bytes:
        return tiff([*grey(10, 10, RAW), (ROWS_PER_STRIP, LONG, [1]), (STRIP_OFFSETS, LONG, [8] * strips)])

    assert decode(with_strips(10)).size == (10, 10)
    assert reason(with_strips(MAX_TIFF_STRIPS + 1)) == "too_large"


def test_too_many_tiff_rationals_are_refused() -> None:
    def with_rationals(values: int) -> bytes:
        return tiff([*grey(10, 10, RAW), (STRIP_OFFSETS, LONG, [8]), (X_RESOLUTION, RATIONAL, [72] * values)]) + bytes(
            100
        )

    assert decode(with_rationals(1)).size == (10, 10)
    assert reason(with_rationals(MAX_TIFF_RATIONALS + 1)) == "too_large"


@pytest.mark.parametrize("offset", [0, 20, 10**6, 2**63, 2**64 - 1])
def test_a_tiff_directory_beyond_the_file_is_malformed(offset: int) -> None:
    assert reason(b"II+\0\x08\0\0\0" + struct.pack("<Q", offset) + bytes(9)) == "malformed"
    assert reason(b"II*\0" + struct.pack("<I", offset % 2**32) + bytes(9)) == "malformed"


def chunk(kind: bytes, data: bytes = b"") -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(before: bytes = b"", after: bytes = b"") -> bytes:
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 3, 3, 8, 0, 0, 0, 0))
    pixel_data = chunk(b"IDAT", zlib.compress(bytes(3 * 4)))
    return b"\x89PNG\r\n\x1a\n" + header + before + pixel_data + after + chunk(b"IEND")


def compressed(kind: bytes, number: int) -> bytes:
    start = {b"zTXt": b"%d\0\0", b"iTXt": b"%d\0\1\0\0\0", b"iCCP": b"%d\0\0"}[kind]
    return b"".join(chunk(kind, start % index + zlib.compress(b"long")) for index in range(number))


@pytest.mark.parametrize("kind", [b"zTXt", b"iTXt", b"iCCP"])
def test_too_many_compressed_png_chunks_are_refused(kind: bytes) -> None:
    assert decode(png(compressed(kind, MAX_PNG_COMPRESSED_CHUNKS))).size == (3, 3)
    assert reason(png(compressed(kind, MAX_PNG_COMPRESSED_CHUNKS + 1))) == "too_large"
    assert reason(png(after=compressed(kind, MAX_PNG_COMPRESSED_CHUNKS + 1))) == "too_large"


def test_too_many_png_chunks_are_refused() -> None:
    assert decode(png(chunk(b"teSt") * 1000)).size == (3, 3)
    assert reason(png(chunk(b"teSt") * MAX_PNG_CHUNKS)) == "too_large"


def test_data_after_the_end_of_a_png_is_not_counted() -> None:
    assert decode(png() + compressed(b"zTXt", MAX_PNG_COMPRESSED_CHUNKS + 1)).size == (3, 3)


def segment(marker: int, data: bytes = b"") -> bytes:
    return struct.pack(">HH", marker, len(data) + 2) + data


def jpeg(scans: int, *, progressive: bool = True, between: bytes = b"") -> bytes:
    """A black grey-scale image of 16 × 16 pixels in many scans."""
    size = struct.pack(">BHHB", 8, 16, 16, 1 if progressive else 3)
    parts = b"".join(bytes([index, 0x11, 0]) for index in range(1, 2 if progressive else 4))
    codes = bytes([1] + [0] * 15)
    head = segment(0xFFDB, b"\0" + bytes([1] * 64)) + segment(0xFFC2 if progressive else 0xFFC0, size + parts)
    tables = segment(0xFFC4, b"\x00" + codes + b"\0") + segment(0xFFC4, b"\x10" + codes + b"\0")
    first = segment(0xFFDA, bytes([1, 1, 0, 0, 0, 0])) if progressive else segment(0xFFDA, bytes([1, 1, 0, 0, 63, 0]))
    other = segment(0xFFDA, bytes([1, 1, 0, 1, 63, 0])) if progressive else first
    return b"\xff\xd8" + head + tables + first + b"\0" + (between + other + b"\0") * (scans - 1) + b"\xff\xd9"


@pytest.mark.parametrize("progressive", [True, False])
def test_too_many_jpeg_scans_are_refused(progressive: bool) -> None:
    """A scan of ten bytes makes the decoder pass over all pixels."""
    assert decode(jpeg(MAX_JPEG_SCANS, progressive=progressive)).size == (16, 16)
    assert reason(jpeg(MAX_JPEG_SCANS + 1, progressive=progressive)) == "too_large"


def test_jpeg_scans_after_an_end_marker_in_a_comment_are_counted() -> None:
    assert reason(jpeg(MAX_JPEG_SCANS + 1, between=segment(0xFFFE, b"\xff\xd9"))) == "too_large"


def test_jpeg_scans_of_a_thumbnail_or_after_the_image_are_not_counted() -> None:
    many = jpeg(MAX_JPEG_SCANS + 1)
    photo = encode(Image.fromarray(pixels(20, 20, 3)), "JPEG", progressive=True, comment=many)
    assert decode(photo + many).size == (20, 20)


@pytest.mark.parametrize("options", [{"progressive": True}, {"restart_marker_blocks": 1}, {"optimize": True}])
@pytest.mark.parametrize("mode", ["L", "RGB", "CMYK"])
def test_common_jpegs_are_decoded(mode: str, options: dict[str, Any]) -> None:
    assert decode(encode(Image.fromarray(pixels(200, 300, 3)).convert(mode), "JPEG", **options)).size == (300, 200)


@pytest.mark.parametrize("filler", [segment(0xFFFE), b"\xff", b"\0", b"\xff\xd9", b"\xff\xf0\xff\xff", b"\xff\xd8"])
def test_too_many_jpeg_segments_are_refused(filler: bytes) -> None:
    """Pillow parses every segment in Python, and the bytes between segments one by one."""
    data = jpeg(1)
    assert reason(data[:2] + segment(0xFFFE) + filler * (MAX_JPEG_SEGMENTS + 1) + data[2:]) == "too_large"


def run_length_bmp(width: int, height: int) -> bytes:
    rows = b"\x01\x07\0\0" * height + b"\0\x01"
    header = struct.pack("<IiiHHIIiiII", 40, width, height, 1, 8, 1, len(rows), 0, 0, 256, 0)
    palette = b"".join(bytes([level, level, level, 0]) for level in range(256))
    return b"BM" + struct.pack("<IHHI", 1078 + len(rows), 0, 0, 1078) + header + palette + rows


def test_a_large_run_length_bmp_is_refused() -> None:
    assert np.asarray(decode(run_length_bmp(4, 3)).convert("L")).tolist() == [[7, 0, 0, 0]] * 3
    with pytest.raises(ImageError, match="run-length BMP has 1,024 × 2,049 pixels") as caught:
        decode(run_length_bmp(1024, MAX_BMP_RLE_PIXELS // 1024 + 1))
    assert caught.value.reason == "too_large"
