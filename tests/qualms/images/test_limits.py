"""Files that say little and would cost much are refused before they do; what they resemble is read as ever."""

import io
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from qualms.errors import ImageError
from qualms.images.limits import MAX_PACKED, MAX_PIECES, MAX_RUN_LENGTH_PIXELS, MAX_SCANS, decodes_quickly
from qualms.images.preprocess import FORMATS, decode

SHORT, LONG, RATIONAL, IFD, LONG8, SLONG8 = 3, 4, 5, 13, 16, 17
RAW, DEFLATE = 1, 8
WIDTH, HEIGHT, COMPRESSION, STRIPS, ORIENTATION, ROWS_PER_STRIP, BYTE_COUNTS, X_RESOLUTION = (
    *(256, 257, 259, 273, 274, 278, 279, 282),
)
TILE_WIDTH, TILE_LENGTH, TILES, TILE_BYTE_COUNTS = 322, 323, 324, 325

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
    """One directory, as given; values that do not fit into an entry follow it."""
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


def tiled(image: NDArray[np.uint8], across: int, down: int, *more: Entry, order: str = "<", big: bool = False) -> bytes:
    """A grey image in tiles, each compressed by itself, the last of a row or column filled up."""
    height, width = image.shape
    tiles = [
        zlib.compress(np.pad(part, ((0, down - part.shape[0]), (0, across - part.shape[1]))).tobytes())
        for row in range(0, height, down)
        for column in range(0, width, across)
        for part in [image[row : row + down, column : column + across]]
    ]
    entries = [
        *grey(width, height),
        (TILE_WIDTH, LONG, [across]),
        (TILE_LENGTH, SHORT, [down]),
        (TILE_BYTE_COUNTS, LONG, [len(tile) for tile in tiles]),
        *more,
    ]
    at = len(tiff([*entries, (TILES, LONG, [0] * len(tiles))], order, big=big))
    places = [at + sum(map(len, tiles[:index])) for index in range(len(tiles))]
    return tiff([*entries, (TILES, LONG, places)], order, big=big) + b"".join(tiles)


@pytest.mark.parametrize(("order", "big"), [("<", False), (">", False), ("<", True)])
@pytest.mark.parametrize(
    ("shape", "across", "down"), [((10, 10), 256, 256), ((10, 10), 512, 512), ((70, 100), 64, 32), ((300, 33), 16, 16)]
)
def test_a_tiff_in_usual_tiles_is_read(order: str, big: bool, shape: tuple[int, int], across: int, down: int) -> None:
    image = pixels(*shape)
    np.testing.assert_array_equal(np.asarray(decode(tiled(image, across, down, order=order, big=big))), image)


@pytest.mark.parametrize(("order", "big"), [("<", False), (">", False), ("<", True)])
@pytest.mark.parametrize(("across", "down"), [(32_768, 30_000), (8192, 8192), (2**22 + 16, 1)])
def test_tiles_far_larger_than_the_image_are_refused(order: str, big: bool, across: int, down: int) -> None:
    tile = zlib.compress(bytes(100))
    entries = [(TILE_WIDTH, LONG, [across]), (TILE_LENGTH, LONG, [down]), (TILE_BYTE_COUNTS, LONG, [len(tile)])]
    data = tiff([*grey(10, 10), *entries, (TILES, LONG, [200])], order, big=big).ljust(200, b"\0") + tile
    with pytest.raises(ImageError, match=f"10 × 10 pixels is stored in tiles of {across:,} × {down:,}") as caught:
        decode(data)
    assert caught.value.reason == "too_large"


def test_a_bomb_of_one_tile_is_refused() -> None:
    """It decodes well, and takes a hundred thousand times the memory of its pixels."""
    assert reason(tiled(np.zeros((10, 10), np.uint8), 4096, 4096)) == "too_large"


def test_many_tiles_that_cover_far_more_than_the_image_are_refused() -> None:
    """Each is within the limits; a picture one pixel wide would have them all decoded for a pixel each."""
    tile = zlib.compress(bytes(2**16))
    rows = 100
    entries = [(TILE_WIDTH, LONG, [2**16]), (TILE_LENGTH, LONG, [1]), (TILE_BYTE_COUNTS, LONG, [len(tile)] * rows)]
    at = len(tiff([*grey(1, rows), *entries, (TILES, LONG, [0] * rows)]))
    assert reason(tiff([*grey(1, rows), *entries, (TILES, LONG, [at] * rows)]) + tile) == "too_large"


def test_a_tile_counts_against_the_pixels_that_are_accepted() -> None:
    data = tiled(pixels(10, 10), 16, 16)
    assert decode(data, max_pixels=256).size == (10, 10)
    assert reason(data, max_pixels=255) == "too_large"


def test_tiles_are_measured_by_the_image_as_it_is_stored() -> None:
    """Turned upright it is 3 pixels wide, where tiles as wide as these would cover far too much."""
    image = pixels(3, 5000)
    upright = decode(tiled(image, 1024, 16, (ORIENTATION, SHORT, [6])))
    np.testing.assert_array_equal(np.asarray(upright), np.rot90(image, -1))


@pytest.mark.parametrize(
    "odd",
    [(TILE_WIDTH, IFD, [4096]), (TILE_WIDTH, SLONG8, [4096]), (TILE_WIDTH, LONG, [4096]), (TILE_LENGTH, LONG, [0])],
)
def test_a_tile_size_that_can_be_read_in_two_ways_is_malformed(odd: Entry) -> None:
    """Pillow skips types that it does not know, and then believes the second entry; libtiff believes the first."""
    small = [(TILE_WIDTH, LONG, [16]), (TILE_LENGTH, LONG, [16]), (TILES, LONG, [8]), (TILE_BYTE_COUNTS, LONG, [8])]
    with pytest.raises(ImageError, match="tile size cannot be read") as caught:
        decode(tiff([odd, *grey(10, 10), *small]))
    assert caught.value.reason == "malformed"


def test_tiles_of_a_big_tiff_may_be_said_in_eight_bytes_and_of_a_small_one_not() -> None:
    """There the entry holds where the eight bytes are, which is not the size."""
    sides = [(TILE_WIDTH, LONG8, [16]), (TILE_LENGTH, LONG8, [16])]
    tile = zlib.compress(pixels(16, 16).tobytes())
    for big in (True, False):
        entries = [*grey(10, 10), *sides, (TILE_BYTE_COUNTS, LONG, [len(tile)])]
        at = len(tiff([*entries, (TILES, LONG, [0])], big=big))
        data = tiff([*entries, (TILES, LONG, [at])], big=big) + tile
        if big:
            np.testing.assert_array_equal(np.asarray(decode(data)), pixels(16, 16)[:10, :10])
        else:
            assert reason(data) == "malformed"


def test_one_strip_for_whatever_height_is_read() -> None:
    image = pixels(10, 12)
    strip = zlib.compress(image.tobytes())
    for rows in (10, 1000, 2**31 - 1, 2**32 - 1):
        entries = [(ROWS_PER_STRIP, LONG, [rows]), (BYTE_COUNTS, LONG, [len(strip)])]
        at = len(tiff([*grey(12, 10), *entries, (STRIPS, LONG, [0])]))
        data = tiff([*grey(12, 10), *entries, (STRIPS, LONG, [at])]) + strip
        np.testing.assert_array_equal(np.asarray(decode(data)), image)


def test_more_strips_than_any_image_has_are_refused() -> None:
    def of(strips: int) -> bytes:
        return tiff([*grey(10, 10, RAW), (ROWS_PER_STRIP, LONG, [1]), (STRIPS, LONG, [8] * strips)])

    assert decode(of(10)).size == (10, 10)
    assert reason(of(MAX_PIECES + 1)) == "too_large"


def test_more_fractions_than_any_tag_has_are_refused() -> None:
    def of(values: int) -> bytes:
        return tiff([*grey(10, 10, RAW), (STRIPS, LONG, [8]), (X_RESOLUTION, RATIONAL, [72] * values)]) + bytes(100)

    assert decode(of(1)).size == (10, 10)
    assert reason(of(MAX_PIECES + 1)) == "too_large"


@pytest.mark.parametrize("place", [0, 20, 10**6, 2**63, 2**64 - 1])
def test_a_directory_that_is_not_there_is_malformed(place: int) -> None:
    assert reason(b"II+\0\x08\0\0\0" + struct.pack("<Q", place) + bytes(9)) == "malformed"
    assert reason(b"II*\0" + struct.pack("<I", place % 2**32) + bytes(9)) == "malformed"


def chunk(kind: bytes, data: bytes = b"") -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(before: bytes = b"", after: bytes = b"") -> bytes:
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 3, 3, 8, 0, 0, 0, 0))
    drawn = chunk(b"IDAT", zlib.compress(bytes(3 * 4)))
    return b"\x89PNG\r\n\x1a\n" + header + before + drawn + after + chunk(b"IEND")


def packed(kind: bytes, number: int) -> bytes:
    start = {b"zTXt": b"%d\0\0", b"iTXt": b"%d\0\1\0\0\0", b"iCCP": b"%d\0\0"}[kind]
    return b"".join(chunk(kind, start % index + zlib.compress(b"long")) for index in range(number))


@pytest.mark.parametrize("kind", [b"zTXt", b"iTXt", b"iCCP"])
def test_more_packed_texts_than_any_png_has_are_refused(kind: bytes) -> None:
    assert decode(png(packed(kind, MAX_PACKED))).size == (3, 3)
    assert reason(png(packed(kind, MAX_PACKED + 1))) == "too_large"
    assert reason(png(after=packed(kind, MAX_PACKED + 1))) == "too_large"


def test_more_chunks_than_any_png_has_are_refused() -> None:
    assert decode(png(chunk(b"teSt") * 1000)).size == (3, 3)
    assert reason(png(chunk(b"teSt") * MAX_PIECES)) == "too_large"


def test_what_follows_the_end_of_a_png_is_not_counted() -> None:
    assert decode(png() + packed(b"zTXt", MAX_PACKED + 1)).size == (3, 3)


def segment(mark: int, data: bytes = b"") -> bytes:
    return struct.pack(">HH", mark, len(data) + 2) + data


def jpeg(scans: int, *, progressive: bool = True, between: bytes = b"") -> bytes:
    """A grey image of 16 × 16 pixels, all of them 0, in many scans."""
    size = struct.pack(">BHHB", 8, 16, 16, 1 if progressive else 3)
    parts = b"".join(bytes([index, 0x11, 0]) for index in range(1, 2 if progressive else 4))
    codes = bytes([1] + [0] * 15)
    head = segment(0xFFDB, b"\0" + bytes([1] * 64)) + segment(0xFFC2 if progressive else 0xFFC0, size + parts)
    tables = segment(0xFFC4, b"\x00" + codes + b"\0") + segment(0xFFC4, b"\x10" + codes + b"\0")
    first = segment(0xFFDA, bytes([1, 1, 0, 0, 0, 0])) if progressive else segment(0xFFDA, bytes([1, 1, 0, 0, 63, 0]))
    other = segment(0xFFDA, bytes([1, 1, 0, 1, 63, 0])) if progressive else first
    return b"\xff\xd8" + head + tables + first + b"\0" + (between + other + b"\0") * (scans - 1) + b"\xff\xd9"


@pytest.mark.parametrize("progressive", [True, False])
def test_more_scans_than_any_jpeg_has_are_refused(progressive: bool) -> None:
    """A scan of ten bytes is a pass over all pixels."""
    assert decode(jpeg(MAX_SCANS, progressive=progressive)).size == (16, 16)
    assert reason(jpeg(MAX_SCANS + 1, progressive=progressive)) == "too_large"


def test_scans_cannot_be_hidden_behind_an_end_within_a_comment() -> None:
    assert reason(jpeg(MAX_SCANS + 1, between=segment(0xFFFE, b"\xff\xd9"))) == "too_large"


def test_scans_of_a_thumbnail_and_of_what_follows_the_image_are_not_counted() -> None:
    many = jpeg(MAX_SCANS + 1)
    photo = encode(Image.fromarray(pixels(20, 20, 3)), "JPEG", progressive=True, comment=many)
    assert decode(photo + many).size == (20, 20)


@pytest.mark.parametrize("options", [{"progressive": True}, {"restart_marker_blocks": 1}, {"optimize": True}])
@pytest.mark.parametrize("mode", ["L", "RGB", "CMYK"])
def test_usual_jpegs_are_read(mode: str, options: dict[str, Any]) -> None:
    assert decode(encode(Image.fromarray(pixels(200, 300, 3)).convert(mode), "JPEG", **options)).size == (300, 200)


@pytest.mark.parametrize("filler", [segment(0xFFFE), b"\xff", b"\0", b"\xff\xd9", b"\xff\xf0\xff\xff", b"\xff\xd8"])
def test_more_segments_than_any_jpeg_has_are_refused(filler: bytes) -> None:
    """Pillow reads each in Python, and what is between them byte by byte."""
    data = jpeg(1)
    assert reason(data[:2] + segment(0xFFFE) + filler * (MAX_PIECES + 1) + data[2:]) == "too_large"


def run_length_bmp(width: int, height: int) -> bytes:
    rows = b"\x01\x07\0\0" * height + b"\0\x01"
    header = struct.pack("<IiiHHIIiiII", 40, width, height, 1, 8, 1, len(rows), 0, 0, 256, 0)
    palette = b"".join(bytes([level, level, level, 0]) for level in range(256))
    return b"BM" + struct.pack("<IHHI", 1078 + len(rows), 0, 0, 1078) + header + palette + rows


def test_a_large_run_length_bmp_is_refused() -> None:
    assert np.asarray(decode(run_length_bmp(4, 3)).convert("L")).tolist() == [[7, 0, 0, 0]] * 3
    with pytest.raises(ImageError, match="run-length BMP has 1,024 × 2,049 pixels") as caught:
        decode(run_length_bmp(1024, MAX_RUN_LENGTH_PIXELS // 1024 + 1))
    assert caught.value.reason == "too_large"


PLAIN = [
    encode(Image.fromarray(pixels(28, 28)), "PNG"),
    encode(Image.fromarray(pixels(96, 96, 3)), "PNG"),
    encode(Image.fromarray(pixels(28, 28, 4)), "PNG"),
    encode(Image.fromarray(pixels(28, 28)).convert("P"), "PNG", transparency=3, dpi=(72, 72)),
    encode(Image.fromarray(pixels(28, 28)), "JPEG"),
    encode(Image.fromarray(pixels(96, 96, 3)), "JPEG", quality=95, optimize=True),
    encode(Image.fromarray(pixels(28, 28, 3)).convert("CMYK"), "JPEG"),
]


@pytest.mark.parametrize("data", PLAIN)
def test_plain_png_and_baseline_jpeg_decode_quickly(data: bytes) -> None:
    assert decodes_quickly(data)


@pytest.mark.parametrize(
    "data",
    [
        png(packed(b"zTXt", 1)),
        png(after=packed(b"iTXt", 1)),
        png(packed(b"iCCP", 1)),
        png(chunk(b"eXIf", b"II*\0")),
        png(chunk(b"tIME") * 40),
        jpeg(1),
        jpeg(2, progressive=False),
        encode(Image.fromarray(pixels(28, 28, 3)), "JPEG", progressive=True),
        encode(Image.fromarray(pixels(28, 28, 3)), "JPEG", exif=b"Exif\0\0II*\0\x08\0\0\0\0\0"),
        encode(Image.fromarray(pixels(28, 28, 3)), "JPEG", comment=b"hello"),
        PLAIN[4][:2] + b"\xff" * 100 + PLAIN[4][2:],
        PLAIN[4][:2] + segment(0xFFDD, b"\0\0") * 40 + PLAIN[4][2:],
        *(encode(Image.fromarray(pixels(9, 9)), kind) for kind in FORMATS if kind not in ("PNG", "JPEG")),
        b"",
        b"hello",
    ],
)
def test_what_may_take_longer_than_it_looks_does_not_decode_quickly(data: bytes) -> None:
    assert not decodes_quickly(data)


@pytest.mark.parametrize("data", PLAIN[:5])
def test_a_file_that_is_cut_before_its_pixels_does_not_decode_quickly(data: bytes) -> None:
    for length in range(33):
        assert not decodes_quickly(data[:length])


@settings(deadline=None)
@given(data=st.binary(max_size=100), start=st.sampled_from([PLAIN[0][:8], PLAIN[0][:33], PLAIN[4][:3], PLAIN[4][:20]]))
def test_any_bytes_decode_quickly_or_not(data: bytes, start: bytes) -> None:
    assert decodes_quickly(start + data) in (True, False)
