"""The input that a pretrained model was trained on, from its own configuration: timm's, torchvision's or Hugging Face's."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

Resize = Literal["nearest", "bilinear", "bicubic", "lanczos"]
_RESIZE: dict[object, Resize] = {
    "nearest": "nearest",
    "bilinear": "bilinear",
    "bicubic": "bicubic",
    "lanczos": "lanczos",
}
_PILLOW: dict[object, Resize] = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}
_CONVNEXT_STRETCHES_FROM = (
    384  # pixels: from this size on, ConvNextImageProcessor neither keeps the aspect ratio nor crops
)


@dataclass(frozen=True)
class InputDefaults:
    """The input that a model was made for, in the terms of qualms.images.input_spec.InputSpec."""

    height: int
    width: int
    colour: Literal["RGB", "L"]
    resize: Resize
    fit: Literal["stretch", "crop"]
    shorter_side: int | None
    mean: tuple[float, ...]
    """by colour, for pixels scaled to [0, 1]"""
    std: tuple[float, ...]
    source: str
    """where the values are from, such as "timm's pretrained_cfg" """
    differs: str | None = None
    """how the model's own preprocessing differs from these values because they cannot describe it, or None"""

    def for_channels(self, channels: int | None) -> "InputDefaults":
        """These values for a network whose first layer takes `channels`; the mean of the colours if it is grey."""
        if channels != 1:
            return self
        if len(self.mean) == 1:
            return replace(self, colour="L")
        mean, std = sum(self.mean) / len(self.mean), sum(self.std) / len(self.std)
        source = f"{self.source}, with the colours' mean and std averaged for grey images"
        return replace(self, colour="L", mean=(mean,), std=(std,), source=source)


def from_timm_config(config: Mapping[str, Any]) -> InputDefaults | None:
    """The input of a timm model by its `pretrained_cfg`; None if that does not hold it."""
    if not config.get("input_size") or not config.get("mean") or not config.get("std"):
        return None
    _, height, width = config["input_size"]
    share, mode = config.get("crop_pct") or 1.0, config.get("crop_mode") or "center"
    side = math.floor(min(height, width) / share)
    differs = []
    if mode not in {"center", "squash"}:
        differs.append(f"crop_mode {mode!r} pads images; here their centre is cropped")
    if mode == "squash" and share < 1:
        differs.append(
            f"with crop_mode 'squash', crop_pct {share} crops after stretching; here images are stretched only"
        )
    if height != width and share < 1 and mode != "squash":
        differs.append(f"crop_pct {share} of an input that is not square is left out")
    resize, unknown = _resize(_RESIZE, config.get("interpolation", "bilinear"))
    crop = mode != "squash"
    return InputDefaults(
        height=height,
        width=width,
        colour="RGB",
        resize=resize,
        fit="crop" if crop else "stretch",
        shorter_side=side if crop and height == width and side > height else None,
        mean=_floats(config["mean"]),
        std=_floats(config["std"]),
        source="timm's pretrained_cfg",
        differs="; ".join([*differs, *unknown]) or None,
    )


def from_torchvision_weights(weights: Any, *, of_file: bool) -> InputDefaults:
    """The input of a member of a torchvision weights enum; `of_file` if other weights, from a file, will be used."""
    transforms = weights.transforms()
    (size, *_), (side, *_) = transforms.crop_size, transforms.resize_size
    resize, unknown = _resize(_RESIZE, transforms.interpolation.value)
    name = f"torchvision's {type(weights).__name__}.{weights.name}"
    return InputDefaults(
        height=size,
        width=size,
        colour="RGB",
        resize=resize,
        fit="crop",
        shorter_side=side if side > size else None,
        mean=_floats(transforms.mean),
        std=_floats(transforms.std),
        source=f"{name}, assumed, because the weights file does not say" if of_file else name,
        differs="; ".join(unknown) or None,
    )


def from_hugging_face_config(config: Mapping[str, Any]) -> InputDefaults | None:
    """The input of a Hugging Face model by its preprocessor_config.json; None if that does not hold a size."""
    size, crop_size = _sides(config.get("size")), _sides(config.get("crop_size"))
    crops = bool(config.get("do_center_crop")) and crop_size is not None
    differs = []
    if not config.get("do_resize", True):
        differs.append("do_resize is false; here images are resized")
    shorter_side: int | None = None
    if isinstance(size, int):  # the shorter side
        if crops:
            assert crop_size is not None
            height, width = _pair(crop_size)
            fit, shorter_side = "crop", size
        elif "crop_pct" in config and size < _CONVNEXT_STRETCHES_FROM:
            height, width = size, size
            fit, shorter_side = "crop", int(size / (config["crop_pct"] or 1.0))
        elif "crop_pct" in config:
            height, width, fit = size, size, "stretch"
        else:
            height, width, fit = size, size, "crop"
            differs.append("images keep their aspect ratio; here their centre is cropped to a square")
    elif size is not None:
        (height, width), fit = size, "stretch"
        if crops and crop_size is not None and _pair(crop_size) != size:
            (height, width), fit = _pair(crop_size), "crop"
            shorter_side = min(size)
            differs.append("images are stretched before they are cropped; here they keep their aspect ratio")
    else:
        return None
    if shorter_side is not None and shorter_side <= max(height, width):
        shorter_side = None
    resize, unknown = _resize(_PILLOW, config.get("resample", 2))
    mean, std = _hugging_face_normalisation(config)
    if config.get("rescale_offset") or config.get("include_top"):
        differs.append("rescale_offset and include_top are left out")
    return InputDefaults(
        height=height,
        width=width,
        colour="RGB",
        resize=resize,
        fit="crop" if fit == "crop" else "stretch",
        shorter_side=shorter_side,
        mean=mean,
        std=std,
        source="the model's preprocessor_config.json",
        differs="; ".join([*differs, *unknown]) or None,
    )


def _hugging_face_normalisation(config: Mapping[str, Any]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and std for pixels scaled to [0, 1], whatever the configuration's own scale is."""
    scale = 255 * config.get("rescale_factor", 1 / 255) if config.get("do_rescale", True) else 255.0
    mean, std = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
    if config.get("do_normalize", True) and config.get("image_mean") and config.get("image_std"):
        mean, std = _colours(config["image_mean"]), _colours(config["image_std"])
    scale = 1.0 if math.isclose(scale, 1.0) else scale
    return tuple(value / scale for value in mean), tuple(value / scale for value in std)


def _sides(size: object) -> int | tuple[int, int] | None:
    """The shorter side, or height and width, of a Hugging Face size, which is a number or an object."""
    if isinstance(size, Mapping):
        if size.get("height") and size.get("width"):
            return int(size["height"]), int(size["width"])
        return int(size["shortest_edge"]) if size.get("shortest_edge") else None
    if isinstance(size, Sequence) and len(size) == 2:
        return int(size[0]), int(size[1])
    return (size, size) if isinstance(size, int) else None


def _pair(size: int | tuple[int, int]) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else size


def _resize(names: Mapping[object, Resize], value: object) -> tuple[Resize, list[str]]:
    """The resize filter of that name or number, and what differs if there is none."""
    if value in names:
        return names[value], []
    return "bilinear", [f"interpolation {value!r} is not available; here it is bilinear"]


def _floats(values: Sequence[float]) -> tuple[float, ...]:
    return tuple(float(value) for value in values)


def _colours(values: float | Sequence[float]) -> tuple[float, float, float]:
    """Three numbers, of which a configuration may give one: grey models have one."""
    numbers = (values,) if isinstance(values, int | float) else tuple(values)
    red, green, blue = 3 * numbers if len(numbers) == 1 else numbers
    return float(red), float(green), float(blue)
