"""`shorter_side` gives the same pixels as torchvision's Resize and CenterCrop."""

import io

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from qualms.images.input_spec import InputSpec
from qualms.images.pillow_decoder import MAX_ASPECT_RATIO
from qualms.images.preprocess import preprocess, preprocess_array, preprocess_batch
from qualms_training.errors import ExtraMissingError
from qualms_training.models.libraries.torchvision_compat import import_torchvision

SPEC = InputSpec(height=22, width=18, resize="bilinear", fit="crop", shorter_side=25)
SIZES = [
    (22, 18),
    (18, 22),
    (25, 25),
    (25, 40),
    (41, 25),
    (7, 5),
    (1, 1),
    (1, 9),
    (33, 34),
    (97, 61),
    (60, 121),
    (300, 20),
]
FILTERS = ["nearest", "bilinear", "bicubic", "lanczos"]


def pixels(height: int, width: int, *channels: int) -> NDArray[np.uint8]:
    return np.random.default_rng(height * width).integers(0, 256, (height, width, *channels), dtype=np.uint8)


def reference_pixels(array: NDArray[np.uint8], spec: InputSpec) -> NDArray[np.uint8]:
    """`Resize(int)` and `CenterCrop` of torchvision's documentation for PIL images."""
    image, side = Image.fromarray(array), spec.shorter_side
    assert side is not None
    height, width = array.shape[:2]
    if height > width:
        resized = image.resize((side, int(side * height / width)), Image.Resampling[spec.resize.upper()])
    else:
        resized = image.resize((int(side * width / height), side), Image.Resampling[spec.resize.upper()])
    top = int(round((resized.height - spec.height) / 2.0))  # noqa: RUF046  # same expression as in torchvision
    left = int(round((resized.width - spec.width) / 2.0))  # noqa: RUF046
    return np.asarray(resized)[top : top + spec.height, left : left + spec.width]


@pytest.mark.parametrize("resize", FILTERS)
@pytest.mark.parametrize(("height", "width"), SIZES)
def test_pixels_equal_the_reference_implementation(height: int, width: int, resize: str) -> None:
    spec = InputSpec.model_validate({**SPEC.model_dump(), "resize": resize})
    image = pixels(height, width, 3)
    np.testing.assert_array_equal(preprocess_array(image, spec), reference_pixels(image, spec))


@pytest.mark.slow
@pytest.mark.parametrize("resize", FILTERS)
@pytest.mark.parametrize(("height", "width"), [*SIZES, (224, 224), (256, 256), (333, 500), (500, 375)])
def test_pixels_equal_torchvision(height: int, width: int, resize: str) -> None:
    try:
        transforms = import_torchvision().transforms
    except ExtraMissingError as error:
        pytest.skip(str(error))
    spec = InputSpec.model_validate({"height": 224, "width": 224, "fit": "crop", "shorter_side": 256, "resize": resize})
    transform = transforms.Compose(
        [transforms.Resize(256, transforms.InterpolationMode(resize)), transforms.CenterCrop(224)]
    )
    image = pixels(height, width, 3)
    np.testing.assert_array_equal(preprocess_array(image, spec), np.asarray(transform(Image.fromarray(image))))


@pytest.mark.parametrize("channels", [(), (1,), (3,)])
def test_an_image_of_the_input_size_is_also_resized_and_cropped(channels: tuple[int, ...]) -> None:
    image = pixels(SPEC.height, SPEC.width, *channels)
    colour = image if channels == (3,) else np.repeat(image.reshape(SPEC.height, SPEC.width, 1), 3, axis=-1)
    expected = reference_pixels(colour, SPEC)
    assert (expected != colour).any()
    buffer = io.BytesIO()
    Image.fromarray(colour).save(buffer, "PNG")
    np.testing.assert_array_equal(preprocess(buffer.getvalue(), SPEC), expected)
    np.testing.assert_array_equal(preprocess_array(image, SPEC), expected)
    np.testing.assert_array_equal(preprocess_batch(image[np.newaxis], SPEC)[0], expected)


def test_an_image_with_the_right_shorter_side_is_only_cropped() -> None:
    image = pixels(25, 40, 3)
    np.testing.assert_array_equal(preprocess_array(image, SPEC), image[2:24, 11:29])  # 1.5 rounds to 2


@pytest.mark.parametrize("landscape", [False, True])
def test_the_maximal_aspect_ratio_is_resized_as_in_torchvision(landscape: bool) -> None:
    image = pixels(3 * MAX_ASPECT_RATIO, 3, 3)
    image = image.transpose(1, 0, 2).copy() if landscape else image
    np.testing.assert_array_equal(preprocess_array(image, SPEC), reference_pixels(image, SPEC))


@pytest.mark.parametrize("landscape", [False, True])
@pytest.mark.parametrize("length", [5 * MAX_ASPECT_RATIO + 2, 20 * MAX_ASPECT_RATIO, 20 * MAX_ASPECT_RATIO + 1])
def test_the_centre_of_a_longer_image_is_preserved(length: int, landscape: bool) -> None:
    image = pixels(length, 5, 3)
    image = image.transpose(1, 0, 2).copy() if landscape else image
    np.testing.assert_allclose(
        preprocess_array(image, SPEC).astype(int), reference_pixels(image, SPEC).astype(int), atol=1
    )


@pytest.mark.parametrize("shape", [(60_000, 1), (1, 60_000)])
def test_an_extreme_aspect_ratio_is_cropped_before_resizing(shape: tuple[int, int]) -> None:
    """Without the crop, the resized image would have 25 × 50,000,000 pixels, more than a gigabyte."""
    assert preprocess_array(np.full(shape, 9, np.uint8), SPEC).tolist() == np.full(SPEC.shape, 9).tolist()
