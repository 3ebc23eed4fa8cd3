"""Files, arrays and batches give the same pixels, and ImageError is the only error for any bytes."""

import io
import pickle
import random
import struct
import threading
import warnings
import zlib
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray
from PIL import Image

from qualms.errors import ImageError
from qualms.images.input_spec import InputSpec
from qualms.images.pillow_decoder import FORMATS, decode
from qualms.images.preprocess import conform, preprocess, preprocess_array, preprocess_batch

RGB = InputSpec(height=8, width=6)
GREY = InputSpec(height=8, width=6, colour="L")


def encode(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def pixels(*shape: int, seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def oriented(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


def png_header_of(width: int, height: int) -> bytes:
    """A PNG with this size in its header and no pixels."""
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunk = struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header))
    data = b"IDAT" + zlib.compress(b"")
    end = struct.pack(">I", len(data) - 4) + data + struct.pack(">I", zlib.crc32(data))
    return b"\x89PNG\r\n\x1a\n" + chunk + end


sides = st.integers(1, 12)
choices = {
    "colour": st.sampled_from(["RGB", "L"]),
    "resize": st.sampled_from(["nearest", "bilinear", "bicubic", "lanczos"]),
}
specs = st.one_of(
    st.builds(InputSpec, height=sides, width=sides, fit=st.sampled_from(["stretch", "crop"]), **choices),
    st.builds(InputSpec, height=sides, width=sides, fit=st.just("crop"), shorter_side=st.integers(12, 15), **choices),
)
shapes = st.one_of(st.tuples(sides, sides), st.tuples(sides, sides, st.sampled_from([1, 3, 4])))


@settings(deadline=None)
@given(array=hnp.arrays(np.uint8, shapes), spec=specs)
def test_png_bytes_array_and_batch_give_identical_pixels(array: NDArray[np.uint8], spec: InputSpec) -> None:
    plane = array[..., 0] if array.ndim == 3 and array.shape[-1] == 1 else array
    from_bytes = preprocess(encode(Image.fromarray(plane)), spec)
    assert from_bytes.dtype == np.uint8
    assert from_bytes.shape == spec.shape
    np.testing.assert_array_equal(from_bytes, preprocess_array(array, spec))
    np.testing.assert_array_equal(from_bytes, preprocess_batch(array[np.newaxis], spec)[0])


@pytest.mark.parametrize("kind", FORMATS)
def test_every_accepted_format_decodes(kind: str) -> None:
    image = Image.new("RGB", (6, 8), (200, 100, 50))
    result = preprocess(encode(image, kind), RGB)
    assert abs(result.astype(int) - (200, 100, 50)).max() <= 4


@pytest.mark.parametrize("kind", ["ICO", "PPM", "PCX", "TGA"])
def test_other_formats_are_unsupported(kind: str) -> None:
    with pytest.raises(ImageError, match="PNG, JPEG, WebP, BMP, GIF or TIFF") as caught:
        decode(encode(Image.new("RGB", (16, 16)), kind))
    assert caught.value.reason == "unsupported"


@pytest.mark.parametrize("data", [b"hello", b"%PDF-1.7", b"<svg xmlns='http://www.w3.org/2000/svg'/>", b"\0" * 100])
def test_bytes_that_are_not_an_image_are_unsupported(data: bytes) -> None:
    with pytest.raises(ImageError) as caught:
        decode(data)
    assert caught.value.reason == "unsupported"


@pytest.mark.parametrize(
    "data", [b"", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF89a", b"BM", b"II*\0", b"RIFF1234WEBP"]
)
def test_empty_files_and_signatures_without_data_are_malformed(data: bytes) -> None:
    with pytest.raises(ImageError) as caught:
        decode(data)
    assert caught.value.reason == "malformed"


@pytest.mark.parametrize("kind", FORMATS)
def test_a_truncated_file_is_malformed(kind: str) -> None:
    data = encode(Image.fromarray(pixels(40, 40, 3)), kind)
    with pytest.raises(ImageError) as caught:
        decode(data[: len(data) // 2])
    assert caught.value.reason == "malformed"


def test_a_width_of_zero_is_malformed() -> None:
    with pytest.raises(ImageError) as caught:
        decode(png_header_of(0, 5))
    assert caught.value.reason == "malformed"


@pytest.mark.parametrize(("width", "height"), [(11, 10), (12_000, 12_000), (60_000, 60_000)])
def test_too_many_pixels_are_refused_before_decoding(width: int, height: int) -> None:
    """The file has no pixels, so only a check of the header can refuse it as too large."""
    with pytest.raises(ImageError, match="100") as caught:
        decode(png_header_of(width, height), max_pixels=100)
    assert caught.value.reason == "too_large"


def test_max_pixels_are_accepted() -> None:
    assert decode(encode(Image.new("L", (10, 10))), max_pixels=100).size == (10, 10)


def test_damaged_files_raise_only_image_error() -> None:
    """Warnings are errors in the tests, so this also checks that decoding emits none."""
    rng = random.Random(0)
    valid = [
        encode(Image.fromarray(pixels(20, 20, 3)), kind, **options)
        for kind in FORMATS
        for options in ({}, {"exif": oriented(6)})
        if not (options and kind in ("BMP", "GIF"))
    ]
    for _ in range(1500):
        data = bytearray(rng.choice(valid))
        for _ in range(rng.choice([1, 3, 10])):
            data[rng.randrange(min(len(data), 150))] = rng.randrange(256)
        try:
            preprocess(bytes(data[: rng.randrange(1, 2 * len(data))]), RGB, max_pixels=10_000)
        except ImageError as error:
            assert error.reason in ("malformed", "unsupported", "too_large")


@given(
    data=st.binary(max_size=200),
    start=st.sampled_from([b"", b"II*\0", b"\xff\xd8\xff\xe1", b"GIF89a", b"BM"]),
)
@settings(deadline=None)
def test_random_bytes_decode_or_raise_image_error(data: bytes, start: bytes) -> None:
    try:
        decode(start + data, max_pixels=10_000)
    except ImageError as error:
        assert str(error).endswith(".")
        assert "\n" not in str(error)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "TIFF"])
def test_exif_orientation_is_applied_once(kind: str) -> None:
    left_white = np.zeros((16, 32), np.uint8)
    left_white[:, :16] = 255
    image = decode(encode(Image.fromarray(left_white).convert("RGB"), kind, exif=oriented(6)))
    assert image.size == (16, 32)
    upright = np.asarray(image.convert("L"))
    assert upright[:8].min() > 200
    assert upright[-8:].max() < 50


@pytest.mark.parametrize(
    "exif", [b"Exif\0\0garbage", b"Exif\0\0II*\0\xff\xff\xff\xff", b"Exif\0\0MM\0*\0\0\0\x08\xff\xff"]
)
def test_unreadable_exif_is_ignored(exif: bytes) -> None:
    data = encode(Image.new("RGB", (6, 8), "white"), "JPEG", exif=exif)
    assert preprocess(data, RGB).min() == 255


def test_transparent_images_are_composited_over_white() -> None:
    ink = np.zeros((8, 6, 4), np.uint8)
    ink[2:4, 2:4, 3] = 255
    result = preprocess(encode(Image.fromarray(ink)), GREY)
    assert result[2:4, 2:4].max() == 0
    assert result.sum() == 255 * (8 * 6 - 4)


def test_every_encoding_of_transparency_gives_white() -> None:
    rgba = Image.new("RGBA", (6, 8), (0, 0, 0, 0))
    palette = Image.new("P", (6, 8), 0)
    key = encode(Image.new("RGB", (6, 8), (1, 2, 3)), transparency=(1, 2, 3))
    grey16 = encode(Image.fromarray(np.full((8, 6), 300, np.uint16)), transparency=300)
    files = [
        encode(rgba),
        encode(rgba.convert("LA")),
        encode(rgba, "WEBP", lossless=True),
        encode(palette, "GIF", transparency=0),
        encode(palette, "PNG", transparency=b"\0"),
        encode(Image.new("L", (6, 8), 7), transparency=7),
        key,
        grey16,
    ]
    for data in files:
        assert preprocess(data, RGB).min() == 255


def test_half_transparent_black_is_mid_grey() -> None:
    array = np.zeros((8, 6, 4), np.uint8)
    array[..., 3] = 128
    assert set(preprocess_array(array, RGB).ravel().tolist()) == {127}


def test_16_bit_grey_is_reduced_to_its_high_byte() -> None:
    grey = pixels(8, 6)
    deep = grey.astype(np.uint16) * 256 + pixels(8, 6, seed=1)
    for kind in ("PNG", "TIFF"):
        np.testing.assert_array_equal(preprocess(encode(Image.fromarray(deep), kind), GREY)[..., 0], grey)


def test_32_bit_integer_tiff_with_16_bit_values_is_decoded() -> None:
    data = encode(Image.fromarray(np.full((8, 6), 0xABCD, np.int32)), "TIFF")
    assert set(preprocess(data, GREY).ravel().tolist()) == {0xAB}


def test_float_tiff_in_the_unit_interval_is_scaled() -> None:
    values = (pixels(8, 6) / 255).astype(np.float32)
    np.testing.assert_array_equal(preprocess(encode(Image.fromarray(values), "TIFF"), GREY)[..., 0], pixels(8, 6))


@pytest.mark.parametrize("bad", [np.float32(1.5), np.float32(-0.1), np.float32("nan"), np.int32(70_000), np.int32(-1)])
def test_pixel_values_outside_the_accepted_range_are_refused(bad: Any) -> None:
    values = np.full((8, 6), bad)
    with pytest.raises(ImageError, match="pixel values outside 0 to") as caught:
        preprocess(encode(Image.fromarray(values), "TIFF"), GREY)
    assert caught.value.reason == "unsupported"


@pytest.mark.parametrize("mode", ["1", "P", "CMYK", "YCbCr", "HSV", "RGBX", "RGBa", "PA"])
def test_white_stays_white_in_every_colour_mode(mode: str) -> None:
    white = Image.new("RGB", (6, 8), "white")
    image = white.convert("RGBA").convert(mode) if mode in ("RGBa", "PA") else white.convert(mode)
    assert conform(image, RGB).min() >= 254
    assert conform(image, GREY).min() >= 254


def test_lab_is_converted_to_rgb() -> None:
    """Lightness 118, a* 187, b* 166 is the red (200, 50, 50) according to littleCMS."""
    red = Image.merge("LAB", [Image.new("L", (6, 8), value) for value in (118, 187, 166)])
    assert abs(preprocess(encode(red, "TIFF"), RGB).astype(int) - (200, 50, 50)).max() <= 2


def test_the_first_frame_of_an_animation_is_used() -> None:
    frames = [Image.new("RGB", (6, 8), colour) for colour in ("white", "black")]
    for kind in ("GIF", "WEBP", "TIFF", "PNG"):
        data = encode(frames[0], kind, save_all=True, append_images=frames[1:])
        assert preprocess(data, RGB).min() > 250


def test_crop_preserves_the_aspect_ratio_and_the_centre() -> None:
    wide = np.zeros((8, 24), np.uint8)
    wide[:, 8:16] = 255
    square = InputSpec(height=8, width=8, colour="L", fit="crop")
    assert preprocess_array(wide, square).min() == 255
    assert preprocess_array(wide, square.model_copy(update={"fit": "stretch"})).min() == 0


def test_an_array_that_fits_is_returned_unchanged() -> None:
    array = pixels(8, 6, 3)
    assert preprocess_array(array, RGB) is array
    batch = pixels(5, 8, 6, 3)
    assert preprocess_batch(batch, RGB) is batch


def test_the_result_is_writable() -> None:
    assert preprocess(encode(Image.new("RGB", (6, 8))), RGB).flags.writeable


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((8, 6, 3), np.float32),
        np.zeros((8, 6), np.int64),
        np.zeros((8, 6, 2), np.uint8),
        np.zeros((8,), np.uint8),
        np.zeros((1, 8, 6, 3), np.uint8),
        np.zeros((0, 6, 3), np.uint8),
        np.zeros((8, 0), np.uint8),
    ],
)
def test_arrays_of_other_types_and_shapes_are_refused(array: Any) -> None:
    with pytest.raises(ImageError, match="uint8 of shape") as caught:
        preprocess_array(array, RGB)
    assert caught.value.reason == "shape"


@pytest.mark.parametrize("shape", [(8, 6), (2, 8, 6, 5), (2, 0, 6), (2, 8, 6, 3, 1)])
def test_batches_of_other_shapes_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ImageError) as caught:
        preprocess_batch(np.zeros(shape, np.uint8), RGB)
    assert caught.value.reason == "shape"


def test_an_empty_batch_is_accepted() -> None:
    assert preprocess_batch(np.zeros((0, 5, 5), np.uint8), RGB).shape == (0, 8, 6, 3)


def test_concurrent_decoding_restores_the_warning_filters() -> None:
    data = encode(Image.fromarray(pixels(30, 30, 3)))
    before = list(warnings.filters)
    threads = [threading.Thread(target=lambda: [decode(data) for _ in range(50)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert list(warnings.filters) == before


def test_a_pickled_image_error_has_its_reason() -> None:
    error = pickle.loads(pickle.dumps(ImageError("Too large.", reason="too_large")))
    assert (str(error), error.reason) == ("Too large.", "too_large")


@pytest.mark.parametrize("colour", ["L", "RGB"])
@pytest.mark.parametrize("mode", ["L", "LA", "RGB", "RGBA", "P", "CMYK", "YCbCr"])
def test_large_images_are_converted_in_strips_to_the_same_pixels(
    mode: str, colour: Literal["L", "RGB"], monkeypatch: pytest.MonkeyPatch
) -> None:
    pixels = np.random.default_rng(3).integers(0, 256, (61, 47, 4), np.uint8)
    pixels[5, 5:9] = pixels[0, 0]
    image = Image.fromarray(pixels)
    image = image.convert(mode) if mode in ("L", "LA", "RGB", "RGBA") else image.convert("RGB").convert(mode)
    if mode in ("P", "RGB", "L"):
        image.info["transparency"] = image.getpixel((5, 5))
    spec = InputSpec(height=61, width=47, colour=colour)
    whole = conform(image, spec)
    monkeypatch.setattr("qualms.images.pillow_decoder._STRIP_PIXELS", 500)
    assert (conform(image, spec) == whole).all()
