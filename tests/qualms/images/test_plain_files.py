"""Plain files are what cameras and image libraries write; hostile, damaged and unusual files are not plain."""

import io
import struct
from zlib import compress, crc32

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image
from tests.qualms.images.exif import exif
from tests.qualms.images.test_limits import jpeg as many_scans
from tests.qualms.images.test_limits import segment

from qualms.images.plain_files import (
    MAX_JPEG_METADATA,
    MAX_JPEG_SCANS,
    MAX_JPEG_SEGMENTS,
    MAX_PNG_CHUNKS,
    MAX_PNG_METADATA,
    PlainFile,
    read_plain,
)

SOS, COM, APP1, DRI = 0xFFDA, 0xFFFE, 0xFFE1, 0xFFDD


def pixels(*shape: int) -> NDArray[np.uint8]:
    return np.random.default_rng(0).integers(0, 256, shape, np.uint8)


def encode(image: Image.Image | NDArray[np.uint8], kind: str = "PNG", **options: object) -> bytes:
    file = io.BytesIO()
    (image if isinstance(image, Image.Image) else Image.fromarray(image)).save(file, kind, **options)
    return file.getvalue()


def chunk(kind: bytes, data: bytes = b"") -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", crc32(kind + data))


def png(
    width: int = 2, height: int = 2, *, before: bytes = b"", after: bytes = b"", depth: int = 8, colour: int = 0
) -> bytes:
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
    rows = chunk(b"IDAT", compress(bytes((width + 1) * height)))
    return b"\x89PNG\r\n\x1a\n" + header + before + rows + after + chunk(b"IEND")


def jpeg(**options: object) -> bytes:
    return encode(pixels(24, 40, 3), "JPEG", **options)


def with_segment(data: bytes, *segments: bytes) -> bytes:
    return data[:2] + b"".join(segments) + data[2:]


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (encode(pixels(28, 20)), PlainFile("png", 20, 28, "L")),
        (encode(pixels(9, 9, 3)), PlainFile("png", 9, 9, "RGB")),
        (encode(pixels(9, 9, 4)), PlainFile("png", 9, 9, "RGBA")),
        (encode(Image.fromarray(pixels(9, 9)).convert("LA")), PlainFile("png", 9, 9, "LA")),
        (encode(Image.fromarray(pixels(9, 9)).convert("P")), PlainFile("png", 9, 9, "P")),
        (encode(pixels(9, 9), dpi=(72, 72)), PlainFile("png", 9, 9, "L")),
        (png(before=chunk(b"tEXt", b"Software\0ours")), PlainFile("png", 2, 2, "L")),
        (png(256, 256), PlainFile("png", 256, 256, "L")),
        (encode(pixels(24, 40), "JPEG"), PlainFile("jpeg", 40, 24, "L")),
        (jpeg(), PlainFile("jpeg", 40, 24, "RGB")),
        (jpeg(quality=95, subsampling=0, optimize=True, comment=b"hello"), PlainFile("jpeg", 40, 24, "RGB")),
        (jpeg(progressive=True), PlainFile("jpeg", 40, 24, "RGB", is_buffered=True)),
        (jpeg(exif=b"Exif\0\0" + exif(6)), PlainFile("jpeg", 40, 24, "RGB", orientation=6)),
        (jpeg(restart_marker_blocks=1), PlainFile("jpeg", 40, 24, "RGB")),
        (jpeg() + b"anything", PlainFile("jpeg", 40, 24, "RGB")),
        (with_segment(jpeg(), segment(COM, bytes(1000))), PlainFile("jpeg", 40, 24, "RGB")),
    ],
)
def test_usual_files_are_plain(data: bytes, expected: PlainFile) -> None:
    assert read_plain(data) == expected


@pytest.mark.parametrize(
    "data",
    [
        png(257, 256),
        png(1, 2**24),
        png(depth=16),
        png(depth=4),
        png(colour=3),
        png(before=chunk(b"PLTE", bytes(3))),
        png(before=chunk(b"tRNS", bytes(2))),
        png(before=chunk(b"zTXt", b"a\0\0" + compress(bytes(1000)))),
        png(before=chunk(b"iCCP", b"a\0\0" + compress(bytes(1000)))),
        png(before=chunk(b"eXIf", b"II*\0")),
        png(before=chunk(b"tEXt", b"Raw profile type exif\0")),
        png(before=chunk(b"tEXt", b"a\0" + bytes(MAX_PNG_METADATA))),
        png(before=chunk(b"gAMA", bytes(3))),
        png(before=chunk(b"IDAT") * MAX_PNG_CHUNKS),
        png(after=chunk(b"tIME", bytes(7))),
        png() + b"x",
        png().replace(b"IHDR", b"IHdR"),
        png()[:-1],
        encode(pixels(9, 9))[:-5] + b"abcde",
        with_segment(jpeg(), b"\xff" * 9),
        with_segment(jpeg(), *[segment(COM)] * MAX_JPEG_SEGMENTS),
        with_segment(jpeg(), *[segment(COM, bytes(60_000))] * (MAX_JPEG_METADATA // 60_000 + 1)),
        with_segment(jpeg(), segment(APP1, b"Exif\0\0II*\0\x08\0\0\0\xff\xff")),
        with_segment(jpeg(exif=b"Exif\0\0" + exif(6)), segment(APP1, b"Exif\0\0" + exif(3))),
        with_segment(jpeg(), segment(APP1, b"http://ns.adobe.com/xap/1.0/\0 tiff:Orientation='6'")),
        with_segment(jpeg(), segment(0xFFE0, b"JFIF\0")),
        many_scans(MAX_JPEG_SCANS + 1),
        encode(Image.fromarray(pixels(9, 9, 3)).convert("CMYK"), "JPEG"),
        *(jpeg().replace(b"\xff\xc0", marker) for marker in (b"\xff\xc3", b"\xff\xc9", b"\xff\xca")),
        *(encode(pixels(9, 9), kind) for kind in ("WEBP", "BMP", "GIF", "TIFF")),
        b"",
        b"hello",
    ],
)
def test_unusual_files_are_not_plain(data: bytes) -> None:
    assert read_plain(data) is None


def test_compressed_pixels_that_are_larger_than_the_pixels_are_not_plain() -> None:
    """Empty blocks of a compressed stream take time and give no pixels."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 28, 28, 8, 0, 0, 0, 0))
    for level in (0, 9):
        rows = compress(np.random.default_rng(0).integers(0, 256, 28 * 29, np.uint8).tobytes(), level)
        for padding, plain in ((b"", True), (bytes(2000), False)):
            data = png()[:8] + header + chunk(b"IDAT", rows + padding) + chunk(b"IEND")
            assert (read_plain(data) is not None) is plain


@pytest.mark.parametrize("sampling", [0x44, 0x14, 0x42, 0x31, 0x00])
def test_unusual_sampling_is_not_plain(sampling: int) -> None:
    data = bytearray(jpeg(subsampling=0))
    data[data.index(b"\xff\xc0") + 11] = sampling
    assert read_plain(bytes(data)) is None


def test_scans_are_counted_across_the_pieces_in_which_they_are_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    for size in (1, 2, 3, 50, 2**20):
        monkeypatch.setattr("qualms.images.plain_files._SEARCH_BYTES", size)
        assert read_plain(many_scans(MAX_JPEG_SCANS)) is not None
        assert read_plain(many_scans(MAX_JPEG_SCANS + 1)) is None


@pytest.mark.parametrize("data", [png(), jpeg(), jpeg(progressive=True, exif=b"Exif\0\0" + exif(3))])
def test_a_file_truncated_before_its_pixels_is_not_plain(data: bytes) -> None:
    for length in range(33):
        assert read_plain(data[:length]) is None


@settings(deadline=None)
@given(
    data=st.binary(max_size=100),
    start=st.sampled_from([png()[:8], png()[:33], jpeg()[:3], jpeg(exif=b"Exif\0\0" + exif(3))[:40]]),
)
def test_random_bytes_raise_no_error(data: bytes, start: bytes) -> None:
    read_plain(start + data)
