"""The encoding of an incoming image is read from its headers, for every accepted format, and for any bytes."""

import io
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from qualms.images.input_spec import InputSpec
from qualms.images.limits import jpeg_headers
from qualms.images.observed import ObservedEncoding, all_observed, jpeg_quality, observe
from qualms.images.pillow_decoder import decode

SPEC = InputSpec(height=20, width=30)
ALL = frozenset(all_observed())
SMALL = Image.new("RGB", (7, 5))


def photograph(width: int = 30, height: int = 20, mode: str = "RGB") -> Image.Image:
    rng = np.random.default_rng(0)
    return Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8)).convert(mode)


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def observed(data: bytes, spec: InputSpec = SPEC) -> ObservedEncoding:
    """The encoding of a file that preprocessing accepts."""
    decode(data)
    encoding = observe(data, spec)
    assert encoding in ALL
    return encoding


def exif() -> Image.Exif:
    """EXIF metadata with a thumbnail-like amount of bytes."""
    data = Image.Exif()
    data[0x010E] = "a description " * 50
    return data


# Formats


@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "P", "1"])
def test_png_files_are_lossless(mode: str) -> None:
    assert observed(saved(photograph(mode=mode), "PNG")) == ("png", "lossless", "same")


@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "P", "1"])
def test_bmp_files_are_lossless(mode: str) -> None:
    assert observed(saved(photograph(mode=mode), "BMP")) == ("bmp", "lossless", "same")


def test_a_bmp_file_whose_rows_are_stored_from_top_to_bottom_has_its_size() -> None:
    data = bytearray(saved(photograph(), "BMP"))
    data[22:26] = struct.pack("<i", -20)
    assert observed(bytes(data)) == ("bmp", "lossless", "same")


def test_a_bmp_file_of_os2_has_its_size() -> None:
    width, height, row = 30, 20, 92
    header = struct.pack("<2sIHHI", b"BM", 26 + row * height, 0, 0, 26) + struct.pack(
        "<IHHHH", 12, width, height, 1, 24
    )
    assert observed(header + bytes(row * height)) == ("bmp", "lossless", "same")


@pytest.mark.parametrize("version", [b"GIF87a", b"GIF89a"])
def test_gif_files_have_a_palette(version: bytes) -> None:
    data = saved(photograph(), "GIF")
    assert observed(version + data[6:]) == ("gif", "palette", "same")


@pytest.mark.parametrize(
    ("compression", "quality"),
    [
        (None, "lossless"),
        ("tiff_lzw", "lossless"),
        ("tiff_adobe_deflate", "lossless"),
        ("packbits", "lossless"),
        ("jpeg", "lossy"),
    ],
)
def test_tiff_files_are_lossless_unless_they_are_compressed_as_jpeg(compression: str | None, quality: str) -> None:
    assert observed(saved(photograph(), "TIFF", compression=compression)) == ("tiff", quality, "same")


def test_big_tiff_files_have_their_size() -> None:
    data = saved(photograph(), "TIFF", big_tiff=True)
    assert data[:4] == b"II+\0"
    assert observed(data) == ("tiff", "lossless", "same")


@pytest.mark.parametrize(("compression", "quality"), [(1, "lossless"), (7, "lossy")])
@pytest.mark.parametrize("kind", [3, 4])
def test_big_endian_tiff_files_have_their_size_and_quality(compression: int, quality: str, kind: int) -> None:
    """Pillow cannot write them, so only the directory of the file is written."""
    values = {256: 30, 257: 20, 259: compression}
    fields = {3: ">HHIHxx", 4: ">HHII"}
    entries = [struct.pack(fields[kind], tag, kind, 1, value) for tag, value in values.items()]
    data = b"MM\0*" + struct.pack(">IH", 8, len(entries)) + b"".join(entries) + bytes(4)
    assert observe(data, SPEC) == ("tiff", quality, "same")


def test_a_big_endian_tiff_that_preprocessing_accepts_has_its_size() -> None:
    values = {256: 30, 257: 20, 258: 8, 259: 1, 262: 1, 273: 8, 277: 1, 278: 20, 279: 600}
    entries = [struct.pack(">HHII", tag, 4, 1, value) for tag, value in values.items()]
    data = (
        b"MM\0*" + struct.pack(">I", 608) + bytes(600) + struct.pack(">H", len(entries)) + b"".join(entries) + bytes(4)
    )
    assert observed(data) == ("tiff", "lossless", "same")


# WebP


@pytest.mark.parametrize(("lossless", "quality"), [(True, "lossless"), (False, "lossy")])
@pytest.mark.parametrize(
    ("mode", "options"),
    [("RGB", {}), ("RGBA", {}), ("RGB", {"exif": exif()}), ("RGB", {"icc_profile": bytes(3000)})],
)
def test_simple_and_extended_webp_files_are_lossless_or_lossy(
    lossless: bool, quality: str, mode: str, options: dict[str, Any]
) -> None:
    image = photograph()
    if mode == "RGBA":
        image.putalpha(Image.linear_gradient("L").resize(image.size))
    data = saved(image, "WEBP", lossless=lossless, **options)
    assert data[12:16] == (
        b"VP8X" if options or (mode, lossless) == ("RGBA", False) else b"VP8L" if lossless else b"VP8 "
    )
    assert observed(data) == ("webp", quality, "same")


def test_a_lossless_webp_file_with_a_long_colour_profile_is_lossless() -> None:
    data = saved(photograph(), "WEBP", lossless=True, icc_profile=bytes(10_000))
    assert observed(data) == ("webp", "lossless", "same")


def test_a_lossy_webp_file_whose_metadata_mention_the_lossless_format_is_lossy() -> None:
    data = saved(photograph(), "WEBP", icc_profile=b"VP8L" * 100)
    assert observed(data) == ("webp", "lossy", "same")


@pytest.mark.parametrize(("lossless", "quality"), [(True, "lossless"), (False, "lossy")])
def test_animated_webp_files_have_the_size_of_their_canvas(lossless: bool, quality: str) -> None:
    frames = [photograph(), photograph().transpose(Image.Transpose.FLIP_LEFT_RIGHT)]
    data = saved(frames[0], "WEBP", save_all=True, append_images=frames[1:], lossless=lossless)
    assert observed(data) == ("webp", quality, "same")


# JPEG


def estimated(data: bytes) -> int:
    """The quality that the first quantisation table of a JPEG shows."""
    return next(jpeg_quality(data, offset) for marker, offset in jpeg_headers(data) if marker == 0xFFDB)


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_the_estimated_quality_of_a_jpeg_is_within_one_of_the_true_one(mode: str) -> None:
    estimates = {quality: estimated(saved(SMALL.convert(mode), "JPEG", quality=quality)) for quality in range(1, 101)}
    assert max(abs(estimate - quality) for quality, estimate in estimates.items()) <= 1
    exact = [quality for quality, estimate in estimates.items() if estimate == quality]
    assert exact[-91:] == list(range(10, 101))


@pytest.mark.parametrize(
    ("quality", "band"),
    [
        *((1, "1-49"), (49, "1-49"), (50, "50-59"), (59, "50-59"), (60, "60-69"), (69, "60-69"), (70, "70-79")),
        *((79, "70-79"), (80, "80-89"), (89, "80-89"), (90, "90-100"), (95, "90-100"), (100, "90-100")),
    ],
)
@pytest.mark.parametrize(
    "options", [{}, {"progressive": True}, {"optimize": True}, {"exif": exif()}, {"subsampling": 0}]
)
def test_jpeg_files_have_the_band_of_their_quality(quality: int, band: str, options: dict[str, Any]) -> None:
    assert observed(saved(photograph(), "JPEG", quality=quality, **options)) == ("jpeg", band, "same")


def test_a_jpeg_with_a_long_colour_profile_and_comment_has_its_quality_and_size() -> None:
    data = saved(photograph(), "JPEG", quality=75, icc_profile=bytes(200_000), comment=b"a comment")
    assert observed(data) == ("jpeg", "70-79", "same")


def test_a_jpeg_of_cmyk_colours_has_its_quality() -> None:
    assert observed(saved(photograph(mode="CMYK"), "JPEG", quality=75)) == ("jpeg", "70-79", "same")


def test_a_jpeg_with_a_thumbnail_has_the_quality_of_the_image_itself() -> None:
    thumbnail = saved(photograph(8, 8), "JPEG", quality=20)
    data = saved(photograph(), "JPEG", quality=95)
    segment = b"\xff\xe1" + struct.pack(">H", 2 + len(thumbnail)) + thumbnail
    assert observed(data[:2] + segment + data[2:]) == ("jpeg", "90-100", "same")


def test_a_jpeg_with_fill_bytes_between_its_segments_is_a_jpeg() -> None:
    """ITU-T T.81, B.1.1.2: any marker may be preceded by any number of fill bytes 0xFF."""
    data = saved(photograph(), "JPEG", quality=75)
    start = data.index(b"\xff\xdb")
    assert observed(data[:start] + b"\xff\xff" + data[start:]) == ("jpeg", "70-79", "same")


# Sizes


@pytest.mark.parametrize(
    ("width", "height", "size"),
    [(30, 20, "same"), (20, 30, "same"), (20, 20, "same"), (21, 21, "larger"), (300, 19, "smaller"), (1, 1, "smaller")],
)
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF"])
def test_the_shorter_side_is_compared_with_that_of_the_input(width: int, height: int, size: str, kind: str) -> None:
    assert observed(saved(photograph(width, height), kind))[2] == size


@pytest.mark.parametrize(("side", "size"), [(255, "smaller"), (256, "same"), (257, "larger"), (224, "smaller")])
def test_with_a_resize_of_the_shorter_side_the_image_is_compared_with_that(side: int, size: str) -> None:
    spec = InputSpec(height=224, width=224, fit="crop", shorter_side=256)
    assert observed(saved(Image.new("L", (side, 300)), "PNG"), spec)[2] == size


@pytest.mark.parametrize("shape", [(20, 30), (20, 30, 1), (20, 30, 3), (20, 30, 4)])
def test_pixels_are_lossless_and_have_the_size_of_their_shape(shape: tuple[int, ...]) -> None:
    assert observe(np.zeros(shape, np.uint8), SPEC) == ("pixels", "lossless", "same")
    assert observe(np.zeros((40, 60), np.uint8), SPEC).size == "larger"


def test_a_file_without_a_readable_size_has_an_unknown_size() -> None:
    assert observe(b"MM\0*" + struct.pack(">IH", 8, 0), SPEC) == ("tiff", "lossless", "unknown")


# Labels


def test_lossless_formats_have_the_same_text() -> None:
    files = [saved(photograph(), kind) for kind in ("PNG", "BMP", "TIFF")]
    texts = {observe(data, SPEC).text for data in (*files, saved(photograph(), "WEBP", lossless=True))}
    assert texts == {observe(np.zeros((20, 30), np.uint8), SPEC).text} == {"lossless, same size"}


@pytest.mark.parametrize(
    ("kind", "options", "text"),
    [
        ("JPEG", {"quality": 75}, "jpeg 70-79, larger size"),
        ("WEBP", {"quality": 80}, "webp lossy, larger size"),
        ("GIF", {}, "gif palette, larger size"),
        ("TIFF", {"compression": "jpeg"}, "tiff lossy, larger size"),
    ],
)
def test_other_formats_have_their_own_text(kind: str, options: dict[str, Any], text: str) -> None:
    assert observe(saved(photograph(60, 40), kind, **options), SPEC).text == text


def test_every_value_is_listed_once() -> None:
    assert len(all_observed()) == len(ALL) == 4 * 14
    assert all(isinstance(one, ObservedEncoding) for one in ALL)


# Any bytes


FILES = [
    *(saved(photograph(), kind) for kind in ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF")),
    saved(photograph(), "WEBP", lossless=True),
    saved(photograph(mode="RGBA"), "WEBP", exif=exif()),
    saved(photograph(), "JPEG", progressive=True, exif=exif()),
    saved(photograph(), "TIFF", big_tiff=True),
    b"MM\0*" + bytes(40),
]
SIGNATURES = [data[:16] for data in FILES] + [b"BM", b"GIF", b"RIFF", b"II*\0", b"MM\0+", b"\xff\xd8\xff"]


@pytest.mark.parametrize("data", FILES, ids=lambda data: repr(data[:4]))
def test_a_truncated_header_is_described_without_an_error(data: bytes) -> None:
    for length in range(min(len(data), 700)):
        assert observe(data[:length], SPEC) in ALL


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(SIGNATURES), st.binary(max_size=200))
def test_any_bytes_after_a_signature_are_described_without_an_error(signature: bytes, rest: bytes) -> None:
    assert observe(signature + rest, SPEC) in ALL
    assert observe(rest, SPEC) in ALL


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(FILES), st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), min_size=1, max_size=8))
def test_a_damaged_file_is_described_without_an_error(data: bytes, changes: list[tuple[int, int]]) -> None:
    damaged = bytearray(data)
    for position, value in changes:
        damaged[position % len(data)] = value
    assert observe(bytes(damaged), SPEC) in ALL
