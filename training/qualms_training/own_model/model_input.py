"""The input of a user's model: what the user gives, else the model's own configuration, else what the images suggest."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np
from PIL import Image
from pydantic import ValidationError

from qualms.bundle.manifest import first_problem
from qualms_training.data.dataset import Images
from qualms_training.errors import DataError, RecipeError
from qualms_training.models.libraries.input_defaults import InputDefaults, from_hugging_face_config, from_timm_config
from qualms_training.own_model.options import InputOptions
from qualms_training.recipe import InputSection

IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
"""the normalisation that most networks with ImageNet weights, and networks trained from them, use"""
LOOKED_AT = 16
"""images whose size is looked at"""


def input_section(
    given: InputOptions, defaults: InputDefaults | None, images: Images, channels: int | None
) -> tuple[dict[str, Any], list[str]]:
    """The section `input` of the recipe, and sentences that say where its values are from.

    `channels` is what the network's first layer takes, if that is known: grey images if it is 1, else RGB unless the user gives
    another colour.
    """
    values, notes = dict[str, Any](), list[str]()
    if defaults is not None:
        values = {one.name: getattr(defaults, one.name) for one in fields(InputDefaults)}
        source, differs = values.pop("source"), values.pop("differs")
        notes.append(f"Input: {source}.")
        if differs:
            notes.append(f"The model's own preprocessing differs from ours: {differs}.")
    else:
        values, notes = _from_images(given, images, channels)
    if given.height is not None and given.shorter_side is None:
        asked = (given.height, given.width)
        if given.height != values.get("height") or _sizes(images) == {asked}:
            values["shorter_side"] = (
                None  # that of another size, or one that would enlarge and cut images of the right size
            )
    values |= {one.name: value for one in fields(InputOptions) if (value := getattr(given, one.name)) is not None}
    if given.fit == "stretch":
        values["shorter_side"] = None
    notes.insert(1 if defaults is not None else len(notes), _described(values))
    section = {
        name: list(value) if isinstance(value, tuple) else value for name, value in values.items() if value is not None
    }
    try:
        InputSection.model_validate(section)
    except ValidationError as error:
        raise RecipeError(f"The input is not valid: {first_problem(error)}.") from None
    return section, notes


def _described(values: Mapping[str, Any]) -> str:
    """The input in words."""
    cut = f", cut from images whose shorter side is {values['shorter_side']}" if values.get("shorter_side") else ""
    numbers = ", ".join(
        f"{name} {' '.join(f'{one:g}' for one in values[name])}" for name in ("mean", "std") if values.get(name)
    )
    return f"That is {values['height']} × {values['width']} pixels{cut}, {values['colour']}{', ' if numbers else ''}{numbers}."


def _from_images(given: InputOptions, images: Images, channels: int | None) -> tuple[dict[str, Any], list[str]]:
    """Values for a model without a configuration."""
    notes = ["Input: the model has no configuration of its own."]
    values: dict[str, Any] = {"colour": "L" if channels == 1 else "RGB"}
    if given.height is None:
        values["height"], values["width"] = common_size(images)
        notes.append(f"Size: {values['height']} × {values['width']} pixels, as the images.")
    if given.mean is None:
        grey = values["colour"] == "L" or given.colour == "L"
        values |= {name: (float(np.mean(value)),) if grey else value for name, value in IMAGENET.items()}
        notes.append("Normalisation: that of ImageNet, assumed; --mean and --std give another one.")
    return values, notes


def common_size(images: Images) -> tuple[int, int]:
    """Height and width that some of the images share; DataError if they differ."""
    sizes = _sizes(images)
    if len(sizes) > 1:
        listed = ", ".join(f"{height} × {width}" for height, width in sorted(sizes)[:3])
        raise DataError(
            f"The model has no configuration of its own, and the images have several sizes ({listed}, …): give its input size with "
            "--size, or `input` in Python."
        )
    return sizes.pop()


def _sizes(images: Images) -> set[tuple[int, int]]:
    """Heights and widths of some of the images."""
    return {_size(images, index) for index in np.linspace(0, len(images) - 1, LOOKED_AT).astype(int).tolist()}


def _size(images: Images, index: int) -> tuple[int, int]:
    if isinstance(images.images, tuple):
        try:
            with Image.open(images.images[index]) as image:
                return image.height, image.width
        except OSError as error:
            raise DataError(f"File {images.images[index]} is not usable: {error}.") from error
    height, width = images.images[index].shape[:2]
    return height, width


def options_from_object(value: Any) -> InputOptions:
    """The input as `qualms.fit` takes it: a mapping, or an object such as torchvision's `weights.transforms()`."""
    if value is None or isinstance(value, InputOptions):
        return value or InputOptions()
    if isinstance(value, Mapping):
        return _from_mapping(value)
    if hasattr(value, "image_mean") and hasattr(value, "to_dict"):
        return _from_defaults(from_hugging_face_config(value.to_dict()))
    if all(hasattr(value, name) for name in ("crop_size", "resize_size", "mean", "std")):
        side, shorter = value.crop_size[0], value.resize_size[0]
        return InputOptions(
            height=side,
            width=side,
            resize=value.interpolation.value,
            fit="crop",
            shorter_side=shorter if shorter > side else None,
            mean=tuple(value.mean),
            std=tuple(value.std),
        )
    raise RecipeError(
        f"`input` is {type(value).__name__}; accepted are a dict with height, width, mean and std, torchvision's "
        "weights.transforms(), timm's resolve_model_data_config(model) and a Hugging Face image processor."
    )


def _from_defaults(defaults: InputDefaults | None) -> InputOptions:
    """The options for a configuration that a library returned."""
    if defaults is None:
        raise RecipeError(
            "`input` lacks the size, the mean or the standard deviation; give height, width, mean and std."
        )
    return InputOptions(
        height=defaults.height,
        width=defaults.width,
        resize=defaults.resize,
        fit=defaults.fit,
        shorter_side=defaults.shorter_side,
        mean=defaults.mean,
        std=defaults.std,
    )


def _from_mapping(value: Mapping[str, Any]) -> InputOptions:
    accepted = [one.name for one in fields(InputOptions)]
    if "input_size" in value:  # timm's resolve_model_data_config
        return _from_defaults(from_timm_config(value))
    if "size" in value:
        height, width = _sides(value["size"])
        value = {"height": height, "width": width, **{key: one for key, one in value.items() if key != "size"}}
    if unknown := [key for key in value if key not in accepted]:
        raise RecipeError(f"`input` has the key {unknown[0]!r}; accepted are size, {', '.join(accepted)}.")
    known: dict[str, Any] = {key: _numbers(key, one) if key in ("mean", "std") else one for key, one in value.items()}
    return InputOptions(**known)


def _numbers(key: str, values: Any) -> tuple[float, ...] | None:
    """One number per channel, of a list, an array or a tensor."""
    if values is None:
        return None
    try:
        return tuple(map(float, np.atleast_1d(values)))
    except (TypeError, ValueError):
        raise RecipeError(f"`input` has the {key} {values!r}; accepted is one number per channel.") from None


def _sides(size: Any) -> tuple[int, int]:
    """Height and width of a size: one number, or two."""
    sides = tuple(size) if isinstance(size, tuple | list) else (size, size)
    if len(sides) != 2 or not all(isinstance(side, int) for side in sides):
        raise RecipeError(f"`input` has the size {size!r}; accepted are pixels such as 224, or (height, width).")
    return sides[0], sides[1]
