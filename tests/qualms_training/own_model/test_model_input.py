"""The input of a model as a user gives it in Python."""

from typing import Any

import numpy as np
import pytest

from qualms_training.data.dataset import Images
from qualms_training.errors import RecipeError
from qualms_training.models.libraries.input_defaults import InputDefaults
from qualms_training.own_model.model_input import input_section, options_from_object
from qualms_training.own_model.options import InputOptions

MEAN, STD = (0.5, 0.5, 0.5), (0.2, 0.2, 0.2)


class Processor:
    """As an image processor of transformers."""

    image_mean = MEAN

    def to_dict(self) -> dict[str, Any]:
        size = {"height": 224, "width": 224}
        return {"size": size, "resample": 3, "image_mean": list(MEAN), "image_std": list(STD)}


def test_a_size_may_be_one_number_or_two() -> None:
    assert options_from_object({"size": 32}) == InputOptions(height=32, width=32)
    assert options_from_object({"size": [32, 48]}) == InputOptions(height=32, width=48)


def test_mean_and_std_are_numbers_lists_or_arrays() -> None:
    assert options_from_object({"size": 32, "mean": 0.5, "std": np.array([0.2])}).mean == (0.5,)
    with pytest.raises(RecipeError, match="`input` has the mean 'imagenet'; accepted is one number per channel"):
        options_from_object({"size": 32, "mean": "imagenet", "std": 1})
    with pytest.raises(RecipeError, match="height and the width of the input must be given together"):
        options_from_object({"height": 32})


@pytest.mark.parametrize("size", ["224", (3, 224, 224), 224.0, None])
def test_other_sizes_are_named(size: object) -> None:
    with pytest.raises(RecipeError, match="`input` has the size .*; accepted are pixels such as 224"):
        options_from_object({"size": size})


def test_the_crop_and_the_filter_of_a_timm_configuration_are_used() -> None:
    config = {"input_size": (3, 224, 224), "interpolation": "bicubic", "mean": MEAN, "std": STD, "crop_pct": 0.875}
    given = options_from_object(config)
    assert (given.height, given.fit, given.shorter_side, given.resize) == (224, "crop", 256, "bicubic")
    assert (given.mean, given.std) == (MEAN, STD)
    with pytest.raises(RecipeError, match="`input` lacks the size, the mean"):
        options_from_object({"input_size": (3, 224, 224)})


def test_an_image_processor_of_hugging_face_is_an_input() -> None:
    given = options_from_object(Processor())
    assert (given.height, given.fit, given.resize, given.std) == (224, "stretch", "bicubic", STD)


@pytest.mark.parametrize(
    ("side", "images", "expected"),
    [(32, 32, None), (32, 40, 36), (48, 32, None), (None, 32, 36)],
    ids=["images of that size", "larger images", "another size than the configuration's", "no size given"],
)
def test_images_of_the_given_size_are_not_enlarged_and_cut(side: int | None, images: int, expected: int | None) -> None:
    defaults = InputDefaults(32, 32, "RGB", "bicubic", "crop", 36, MEAN, STD, "timm's")
    pixels = Images("photos", "train", np.zeros((3, images, images, 3), np.uint8))
    section, _ = input_section(InputOptions(height=side, width=side), defaults, pixels, 3)
    assert section.get("shorter_side") == expected


def test_other_objects_are_refused_with_what_is_accepted() -> None:
    with pytest.raises(RecipeError, match=r"`input` is int; accepted are a dict .* weights\.transforms\(\)"):
        options_from_object(224)
