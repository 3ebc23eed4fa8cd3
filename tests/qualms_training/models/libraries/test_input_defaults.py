"""The configurations of timm and Hugging Face become input settings; what cannot be described is named."""

from typing import Any

import pytest

from qualms_training.models.libraries.input_defaults import from_hugging_face_config, from_timm_config

IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
HALF = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}


@pytest.mark.parametrize(
    ("config", "fit", "shorter_side", "differs"),
    [
        ({"crop_pct": 0.875}, "crop", 256, None),
        ({"crop_pct": 0.9}, "crop", 248, None),
        ({"crop_pct": 1.0}, "crop", None, None),
        ({"crop_pct": 1.0, "crop_mode": "squash"}, "stretch", None, None),
        ({"crop_pct": 0.9, "crop_mode": "squash"}, "stretch", None, "crops after stretching"),
        ({"crop_pct": 0.9, "crop_mode": "border"}, "crop", 248, "crop_mode 'border' pads images"),
        ({"interpolation": "random"}, "crop", None, "interpolation 'random' is not available"),
        ({"input_size": (3, 224, 192), "crop_pct": 0.9}, "crop", None, "an input that is not square"),
    ],
)
def test_timm_crops_by_crop_pct(
    config: dict[str, Any], fit: str, shorter_side: int | None, differs: str | None
) -> None:
    defaults = from_timm_config({"input_size": (3, 224, 224), **IMAGENET, **config})
    assert defaults is not None
    assert (defaults.fit, defaults.shorter_side) == (fit, shorter_side)
    assert (defaults.differs is None) if differs is None else differs in str(defaults.differs)


@pytest.mark.parametrize(
    ("config", "size", "fit", "shorter_side", "differs"),
    [
        ({"size": {"height": 32, "width": 48}}, (32, 48), "stretch", None, None),
        ({"size": 224}, (224, 224), "stretch", None, None),
        ({"size": {"shortest_edge": 256}, "do_center_crop": True, "crop_size": 224}, (224, 224), "crop", 256, None),
        ({"size": {"shortest_edge": 224}, "crop_pct": 0.875}, (224, 224), "crop", 256, None),
        ({"size": {"shortest_edge": 384}, "crop_pct": 0.875}, (384, 384), "stretch", None, None),
        ({"size": {"shortest_edge": 224}}, (224, 224), "crop", None, "keep their aspect ratio"),
        ({"size": 256, "do_center_crop": True, "crop_size": 224}, (224, 224), "crop", 256, "stretched before"),
        ({"size": 224, "do_resize": False}, (224, 224), "stretch", None, "do_resize is false"),
        ({"size": 224, "rescale_offset": True}, (224, 224), "stretch", None, "rescale_offset"),
    ],
)
def test_hugging_face_sizes(
    config: dict[str, Any], size: tuple[int, int], fit: str, shorter_side: int | None, differs: str | None
) -> None:
    defaults = from_hugging_face_config({**HALF, **config})
    assert defaults is not None
    assert ((defaults.height, defaults.width), defaults.fit, defaults.shorter_side) == (size, fit, shorter_side)
    assert (defaults.differs is None) if differs is None else differs in str(defaults.differs)


@pytest.mark.parametrize(
    ("config", "mean", "std"),
    [
        ({}, 0.5, 0.5),
        ({"do_normalize": False}, 0.0, 1.0),
        ({"image_mean": [0.4], "image_std": 0.2}, 0.4, 0.2),
        ({"do_rescale": False, "image_mean": [127.5] * 3, "image_std": [127.5] * 3}, 0.5, 0.5),
        ({"rescale_factor": 1 / 127.5, "image_mean": [1.0] * 3, "image_std": [1.0] * 3}, 0.5, 0.5),
    ],
)
def test_hugging_face_normalisation_is_for_pixels_scaled_to_one(
    config: dict[str, Any], mean: float, std: float
) -> None:
    defaults = from_hugging_face_config({"size": 32, **HALF, **config})
    assert defaults is not None
    assert defaults.mean == pytest.approx((mean,) * 3)
    assert defaults.std == pytest.approx((std,) * 3)


def test_configurations_without_a_size_give_no_defaults() -> None:
    assert from_timm_config({"mean": (0.5,), "std": (0.5,)}) is None
    assert from_hugging_face_config(HALF) is None
