"""Encodings: how they are written, what they expand to, and the files that they make."""

import io

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from qualms.errors import EncodingError
from qualms.images import encodings
from qualms.images.encodings import (
    MAX_SETTINGS,
    Encoding,
    Step,
    all_settings,
    covers,
    parse_encoding,
    parse_encodings,
)
from qualms.images.input_spec import InputSpec
from qualms.images.observed import JPEG_QUALITIES, observe
from qualms.images.preprocess import preprocess

SPEC = InputSpec(height=16, width=16)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.fixture(scope="module")
def photograph() -> Image.Image:
    """An image of 24 × 20 pixels with gradients and some noise."""
    y, x = np.mgrid[0:20, 0:24]
    pixels = np.stack([9 * x, 10 * y, 5 * (x + y)], axis=-1) + rng().integers(0, 10, (20, 24, 3))
    return Image.fromarray(pixels.astype(np.uint8))


def opened(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data))


def pixels_of(data: bytes) -> NDArray[np.uint8]:
    return np.asarray(opened(data).convert("RGB"))


# Text


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("png", [Step("png")]),
        ("gif", [Step("gif")]),
        ("jpeg:75-95", [Step("jpeg", 75, 95)]),
        ("webp:80", [Step("webp", 80, 80)]),
        ("resize:1.5-3", [Step("resize", 1.5, 3)]),
        ("resize:2:bilinear", [Step("resize", 2, 2, "bilinear")]),
        ("resize:0.5:nearest", [Step("resize", 0.5, 0.5, "nearest")]),
        ("brightness:0.85-1.15", [Step("brightness", 0.85, 1.15)]),
        ("resize:2+jpeg:85", [Step("resize", 2, 2), Step("jpeg", 85, 85)]),
        (" brightness:2 + resize:1 + bmp ", [Step("brightness", 2, 2), Step("resize", 1, 1), Step("bmp")]),
    ],
)
def test_a_text_is_parsed_to_its_steps(text: str, steps: list[Step]) -> None:
    assert parse_encoding(text) == Encoding(tuple(steps))


@pytest.mark.parametrize(
    "text",
    [
        "png",
        "jpeg:75-95",
        "webp:1",
        "resize:1.5-3",
        "resize:2:lanczos",
        "brightness:0.85-1.15+resize:2+jpeg:85",
        "tiff",
    ],
)
def test_the_text_of_an_encoding_is_parsed_to_the_same_encoding(text: str) -> None:
    assert parse_encoding(text).text == text


def test_a_range_of_one_value_is_written_as_that_value() -> None:
    assert parse_encoding("jpeg:75-75").text == "jpeg:75"


@pytest.mark.parametrize(
    ("text", "name"),
    [("heif", "heif"), ("", ""), ("JPEG:75", "JPEG"), ("png+", ""), ("resize:2++jpeg:75", ""), ("jpg:80", "jpg")],
)
def test_an_unknown_step_is_refused_with_the_accepted_ones(text: str, name: str) -> None:
    with pytest.raises(EncodingError) as caught:
        parse_encoding(text)
    assert str(caught.value) == (
        f"The encoding {text!r} is unknown: {name!r} is not one of png, bmp, tiff, gif, jpeg, webp, resize, brightness; "
        "examples are png, jpeg:75-95, resize:1.5-3 and resize:2+jpeg:85."
    )


@pytest.mark.parametrize("name", ["png", "bmp", "tiff", "gif"])
@pytest.mark.parametrize("rest", ["", "9"])
def test_a_parameter_of_a_format_without_one_is_refused(name: str, rest: str) -> None:
    with pytest.raises(EncodingError) as caught:
        parse_encoding(f"{name}:{rest}")
    assert str(caught.value) == f"The encoding '{name}:{rest}' is not accepted: {name} takes no parameter."


@pytest.mark.parametrize(
    ("text", "accepted", "values"),
    [
        ("jpeg", "jpeg takes a whole number from 1 to 100", ""),
        ("jpeg:", "jpeg takes a whole number from 1 to 100", ""),
        ("jpeg:0", "jpeg takes a whole number from 1 to 100", "0"),
        ("jpeg:101", "jpeg takes a whole number from 1 to 100", "101"),
        ("jpeg:75.5", "jpeg takes a whole number from 1 to 100", "75.5"),
        ("jpeg:95-75", "jpeg takes a whole number from 1 to 100", "95-75"),
        ("jpeg:75-", "jpeg takes a whole number from 1 to 100", "75-"),
        ("jpeg:-75", "jpeg takes a whole number from 1 to 100", "-75"),
        ("jpeg:70-80-90", "jpeg takes a whole number from 1 to 100", "70-80-90"),
        ("webp:best", "webp takes a whole number from 1 to 100", "best"),
        ("resize:0", "resize takes a number from 0.1 to 8", "0"),
        ("resize:0.05-2", "resize takes a number from 0.1 to 8", "0.05-2"),
        ("resize:9", "resize takes a number from 0.1 to 8", "9"),
        ("resize:nan", "resize takes a number from 0.1 to 8", "nan"),
        ("resize:1-inf", "resize takes a number from 0.1 to 8", "1-inf"),
        ("brightness:5", "brightness takes a number from 0.1 to 4", "5"),
        ("resize:2+brightness:x+jpeg:75", "brightness takes a number from 0.1 to 4", "x"),
    ],
)
def test_a_parameter_out_of_range_is_refused_with_the_range(text: str, accepted: str, values: str) -> None:
    with pytest.raises(EncodingError) as caught:
        parse_encoding(text)
    assert str(caught.value) == (
        f"The encoding {text!r} is not accepted: {accepted}, or a range LOW-HIGH of them, not {values!r}."
    )


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("resize:2:cubic", "'cubic' after resize:2; accepted are nearest, bilinear, bicubic, lanczos"),
        ("resize:2:", "'' after resize:2; accepted are nearest, bilinear, bicubic, lanczos"),
        ("jpeg:75:fast", "'fast' after jpeg:75; jpeg takes one parameter"),
        ("brightness:1.1:bilinear", "'bilinear' after brightness:1.1; brightness takes one parameter"),
    ],
)
def test_an_unknown_method_is_refused_with_the_accepted_ones(text: str, problem: str) -> None:
    with pytest.raises(EncodingError) as caught:
        parse_encoding(text)
    assert str(caught.value) == f"The encoding {text!r} is not accepted: {problem}."


@pytest.mark.parametrize(("text", "step"), [("jpeg:85+resize:2", "jpeg:85"), ("resize:2+png+jpeg:75-80", "png")])
def test_a_file_format_must_be_the_last_step(text: str, step: str) -> None:
    with pytest.raises(EncodingError) as caught:
        parse_encoding(text)
    assert str(caught.value) == f"The encoding {text!r} goes on after {step}; a file format must be the last step."


# Settings


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("png", ["png"]),
        ("jpeg:80", ["jpeg:80"]),
        ("jpeg:75-95", ["jpeg:75", "jpeg:85", "jpeg:95"]),
        ("jpeg:80-84", ["jpeg:80", "jpeg:84"]),
        ("webp:70-90", ["webp:70", "webp:90"]),
        ("brightness:0.5-2", ["brightness:0.5", "brightness:2"]),
        ("resize:2", ["resize:2:bilinear", "resize:2:lanczos"]),
        ("resize:1.7-2.2:bicubic", ["resize:1.7:bicubic", "resize:2:bicubic", "resize:2.2:bicubic"]),
        ("resize:1-2:nearest", ["resize:1:nearest", "resize:1.5:nearest", "resize:2:nearest"]),
        ("resize:1.1-1.2:lanczos", ["resize:1.1:lanczos", "resize:1.2:lanczos"]),
        (
            "resize:2:bicubic+jpeg:75-95",
            ["resize:2:bicubic+jpeg:75", "resize:2:bicubic+jpeg:85", "resize:2:bicubic+jpeg:95"],
        ),
    ],
)
def test_settings_are_the_ends_of_ranges_and_factors_between_them(text: str, settings: list[str]) -> None:
    assert [setting.text for setting in parse_encoding(text).settings()] == settings


def test_the_settings_of_an_enlargement_are_those_of_the_blurriest_and_the_sharpest_method() -> None:
    settings = [setting.text for setting in parse_encoding("resize:1.5-3").settings()]
    assert settings == [
        f"resize:{factor:g}:{method}" for factor in (1.5, 2, 2.5, 3) for method in ("bilinear", "lanczos")
    ]


def test_a_setting_is_its_own_only_setting() -> None:
    for setting in all_settings(parse_encodings(["png", "jpeg:75-95", "resize:0.5-2+webp:60-80", "brightness:1.1"])):
        assert setting.settings() == [setting]


def test_equal_settings_of_several_encodings_are_listed_once() -> None:
    encodings = parse_encodings(["jpeg:75-95", "png", "jpeg:85-95", "png"])
    assert [setting.text for setting in all_settings(encodings)] == ["jpeg:75", "jpeg:85", "jpeg:95", "png"]


def test_encodings_with_too_many_settings_are_refused_with_their_number() -> None:
    texts = ["resize:0.5-8", "resize:0.5-8+jpeg:75"]
    with pytest.raises(EncodingError) as caught:
        parse_encodings([*texts, "png"])
    assert str(caught.value) == (
        "The encodings resize:0.5-8, resize:0.5-8+jpeg:75, png expand to 65 settings; at most 64 are accepted: use narrower "
        "ranges, or name the resampling method of a resize."
    )
    assert len(all_settings(parse_encodings(texts))) == MAX_SETTINGS


def test_a_long_chain_of_ranges_is_refused_without_listing_its_settings() -> None:
    with pytest.raises(EncodingError, match="settings; at most 64 are accepted"):
        parse_encodings(["+".join(["resize:0.1-8"] * 12)])


@pytest.mark.parametrize("text", ["jpeg:7_5", "jpeg: 75", "jpeg:٧٥", "jpeg:+75", "resize:1e0", "resize:.5"])
def test_only_plain_digits_are_numbers(text: str) -> None:
    with pytest.raises(EncodingError, match="is not accepted"):
        parse_encoding(text)


def test_the_text_of_an_encoding_has_the_digits_it_was_written_with() -> None:
    for text in ("resize:1.23456789", "brightness:1.0000001-1.0000002"):
        assert parse_encoding(text).text == text


def test_a_calibrated_range_of_qualities_has_a_setting_in_every_band_of_observed_qualities() -> None:
    for low, high in ((1, 100), (50, 95), (75, 95), (69, 71), (80, 84)):
        settings = [step.low or 0 for one in parse_encoding(f"jpeg:{low}-{high}").settings() for step in one.steps]
        touched = {band for band in JPEG_QUALITIES if band[0] <= high and band[1] >= low}
        assert {band for band in JPEG_QUALITIES if any(band[0] <= value <= band[1] for value in settings)} == touched


def test_no_encodings_are_an_empty_list() -> None:
    assert parse_encodings([]) == []


# Covering


@pytest.mark.parametrize(
    ("listed", "sent"),
    [
        ("png", "bmp"),
        ("tiff", "png"),
        ("gif", "gif"),
        ("jpeg:75-95", "jpeg:75-95"),
        ("jpeg:75-95", "jpeg:80"),
        ("resize:1.5-3", "resize:2:bilinear"),
        ("resize:1.5-3", "resize:2-3"),
        ("resize:1.5-3:nearest", "resize:2:nearest"),
        ("resize:2", "resize:2+png"),
        ("resize:1.5-3+jpeg:75-95", "resize:2:lanczos+jpeg:85"),
        ("brightness:0.85-1.15", "brightness:1.15"),
    ],
)
def test_an_encoding_covers_those_within_its_ranges(listed: str, sent: str) -> None:
    assert covers(parse_encoding(listed), parse_encoding(sent))


@pytest.mark.parametrize(
    ("listed", "sent"),
    [
        ("png", "jpeg:95"),
        ("png", "gif"),
        ("jpeg:75-95", "png"),
        ("jpeg:75-95", "jpeg:74"),
        ("jpeg:75-95", "jpeg:90-96"),
        ("jpeg:75-95", "webp:80"),
        ("resize:2:bilinear", "resize:2"),
        ("resize:2:bilinear", "resize:2:lanczos"),
        ("resize:1.5-3", "resize:2:nearest"),
        ("resize:1.5-3", "resize:2+jpeg:85"),
        ("resize:1.5-3+jpeg:85", "resize:2"),
        ("resize:2+brightness:1.1", "brightness:1.1+resize:2"),
    ],
)
def test_an_encoding_does_not_cover_those_outside_its_ranges(listed: str, sent: str) -> None:
    assert not covers(parse_encoding(listed), parse_encoding(sent))


@pytest.mark.parametrize("text", ["png", "gif", "jpeg:75-95", "webp:50", "resize:0.5-2", "resize:2+jpeg:75-95"])
def test_an_encoding_covers_itself_and_its_settings(text: str) -> None:
    encoding = parse_encoding(text)
    assert all(covers(encoding, sent) for sent in (encoding, *encoding.settings()))


# Files


@pytest.mark.parametrize(
    ("text", "kind"),
    [("png", "PNG"), ("bmp", "BMP"), ("tiff", "TIFF"), ("gif", "GIF"), ("jpeg:80", "JPEG"), ("webp:80", "WEBP")],
)
def test_the_file_has_the_named_format_and_the_size_of_the_image(photograph: Image.Image, text: str, kind: str) -> None:
    image = opened(parse_encoding(text).encode(photograph, rng()))
    assert (image.format, image.size) == (kind, photograph.size)


@pytest.mark.parametrize("text", ["png", "bmp", "tiff"])
def test_lossless_formats_keep_every_pixel(photograph: Image.Image, text: str) -> None:
    data = parse_encoding(text).encode(photograph, rng())
    np.testing.assert_array_equal(pixels_of(data), np.asarray(photograph))


def test_every_quality_of_a_range_is_used_and_no_other(photograph: Image.Image) -> None:
    encoding, generator = parse_encoding("jpeg:70-74"), rng(1)
    tables = {
        quality: opened(parse_encoding(f"jpeg:{quality}").encode(photograph, rng())).quantization  # type: ignore[attr-defined]
        for quality in range(69, 76)
    }
    used = set()
    for _ in range(60):
        table = opened(encoding.encode(photograph, generator)).quantization  # type: ignore[attr-defined]
        used |= {quality for quality, other in tables.items() if other == table}
    assert used == {70, 71, 72, 73, 74}


@pytest.mark.parametrize("quality", [30, 55, 65, 75, 85, 95])
def test_the_service_recognises_the_quality_of_an_encoded_jpeg(photograph: Image.Image, quality: int) -> None:
    low, high = map(int, observe(parse_encoding(f"jpeg:{quality}").encode(photograph, rng()), SPEC).quality.split("-"))
    assert low <= quality <= high


def test_the_file_is_smaller_at_a_lower_quality(photograph: Image.Image) -> None:
    for name in ("jpeg", "webp"):
        small, large = (parse_encoding(f"{name}:{quality}").encode(photograph, rng()) for quality in (10, 95))
        assert len(small) < len(large)


@pytest.mark.parametrize(
    ("text", "size"),
    [("resize:2", (48, 40)), ("resize:0.5", (12, 10)), ("resize:1.3", (31, 26)), ("resize:0.1", (2, 2))],
)
def test_a_resize_gives_a_png_of_the_rounded_size(photograph: Image.Image, text: str, size: tuple[int, int]) -> None:
    image = opened(parse_encoding(text).encode(photograph, rng()))
    assert (image.format, image.size) == ("PNG", size)


def test_a_side_has_at_least_one_pixel() -> None:
    assert opened(parse_encoding("resize:0.1").encode(Image.new("RGB", (30, 1)), rng())).size == (3, 1)


@pytest.mark.parametrize("method", ["nearest", "bilinear", "bicubic", "lanczos"])
def test_the_named_resampling_method_is_used(photograph: Image.Image, method: str) -> None:
    data = parse_encoding(f"resize:2:{method}").encode(photograph, rng())
    expected = photograph.resize((48, 40), Image.Resampling[method.upper()])
    np.testing.assert_array_equal(pixels_of(data), np.asarray(expected))


def test_factors_and_smooth_methods_are_drawn_from_the_whole_range(photograph: Image.Image) -> None:
    generator = rng(2)
    widths = [opened(parse_encoding("resize:1.5-3").encode(photograph, generator)).width for _ in range(60)]
    assert min(widths) in range(36, 40)
    assert max(widths) in range(68, 73)
    files = {parse_encoding("resize:2").encode(photograph, generator) for _ in range(30)}
    smooth = {
        parse_encoding(f"resize:2:{name}").encode(photograph, rng()) for name in ("bilinear", "bicubic", "lanczos")
    }
    assert files == smooth


def test_brightness_multiplies_the_pixel_values(photograph: Image.Image) -> None:
    data = parse_encoding("brightness:1.15").encode(photograph, rng())
    expected = np.minimum(255, np.asarray(photograph) * 1.15)
    assert np.abs(pixels_of(data) - expected).max() <= 1


def test_the_steps_of_a_chain_are_applied_in_their_order(photograph: Image.Image) -> None:
    data = parse_encoding("brightness:0.5+resize:2:nearest+jpeg:90").encode(photograph, rng())
    image = opened(data)
    assert (image.format, image.size) == ("JPEG", (48, 40))
    assert pixels_of(data).mean() == pytest.approx(np.asarray(photograph).mean() / 2, abs=1)


@pytest.mark.parametrize(
    "text", ["jpeg:20-95", "webp:20-95", "resize:0.5-3", "brightness:0.5-2", "resize:1-2+jpeg:30-90"]
)
def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(photograph: Image.Image, text: str) -> None:
    encoding = parse_encoding(text)
    first, again, other = (
        [encoding.encode(photograph, generator) for _ in range(3)] for generator in map(rng, (7, 7, 8))
    )
    assert first == again != other


@pytest.mark.parametrize("text", ["png", "bmp", "tiff", "gif", "jpeg:80", "webp:80", "resize:2", "brightness:1.1"])
@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "1", "LA", "I;16", "CMYK", "F"])
def test_images_of_any_mode_are_encoded(text: str, mode: str) -> None:
    if mode == "I;16":
        image = Image.fromarray(np.full((6, 6), 204 * 256, np.uint16))
    elif mode == "F":
        image = Image.fromarray(np.full((6, 6), 204 / 255, np.float32))
    else:
        image = Image.new("RGB", (6, 6), (204, 204, 204)).convert(mode, dither=Image.Dither.NONE)
    result = preprocess(parse_encoding(text).encode(image, rng()), InputSpec(height=6, width=6))
    expected = 255 if mode == "1" else min(255, 204 * (1.1 if text == "brightness:1.1" else 1))
    assert np.abs(result.astype(int) - expected).max() <= 3


def test_transparent_pixels_are_white() -> None:
    image = Image.new("RGBA", (6, 6), (0, 0, 0, 0))
    assert (pixels_of(parse_encoding("jpeg:90").encode(image, rng())) == 255).all()


@pytest.mark.parametrize("size", [(5, 40), (1, 16), (45, 1), (30, 33), (17, 22), (1, 999)])
@pytest.mark.parametrize("factor", [1.7, 2.9, 8])
def test_an_enlarged_image_has_no_more_pixels_than_preprocessing_accepts(
    monkeypatch: pytest.MonkeyPatch, size: tuple[int, int], factor: float
) -> None:
    monkeypatch.setattr(encodings, "MAX_PIXELS", 1000)
    image = opened(parse_encoding(f"resize:{factor}").encode(Image.new("L", size), rng()))
    assert size[0] * size[1] * 0.5 <= image.width * image.height <= 1000
