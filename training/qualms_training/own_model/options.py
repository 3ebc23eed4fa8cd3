"""The options of `qualms fit`, `qualms init` and `qualms.fit`; every one but the model has a default."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path
from typing import Any, Literal, get_args

from qualms_training.data.class_lists import read_class_list
from qualms_training.errors import RecipeError
from qualms_training.recipe import FOLDER_PREFIX, MODEL_SUFFIXES

Seen = Literal["all", "other-data"]
"""the training images of the given data that the base was trained on: all of them, or none"""


@dataclass(frozen=True)
class InputOptions:
    """The model's input as the user gives it; None stands for the value in the model's own configuration."""

    height: int | None = None
    width: int | None = None
    colour: Literal["RGB", "L"] | None = None
    resize: str | None = None
    fit: Literal["stretch", "crop"] | None = None
    shorter_side: int | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if (self.mean is None) != (self.std is None):
            raise RecipeError("The mean and the standard deviation of the normalisation must be given together.")
        if (self.height is None) != (self.width is None):
            raise RecipeError("The height and the width of the input must be given together.")


@dataclass(frozen=True)
class FitOptions:
    """Everything that the user may choose; the rest follows from the model and the data."""

    model: str
    weights: str | None = None
    name: str = "model"
    data: str = ""
    """a folder of images, or the name of a data set"""
    ood: tuple[str, ...] = ()
    classes: tuple[str, ...] | None = None
    """class names in the order of the logits"""
    weights_saw: Seen | None = None
    """None stands for `all`: fit, calibration and test images then come from the held-out images"""
    input: InputOptions = InputOptions()
    taps: tuple[str, ...] | None = None
    distance: bool = True
    """whether the distance from the training data is a term of the flag score"""
    logits: str | None = None
    target_fpr: float = 0.01
    target_risk: float = 0.05
    as_sent: tuple[str, ...] = ()
    form: Literal["worst", "by-size", "mixture"] = "worst"
    epochs: int = 20

    def __post_init__(self) -> None:
        for option, value in (("--target-fpr", self.target_fpr), ("--target-risk", self.target_risk)):
            if not 0 < value < 1:
                raise RecipeError(
                    f"{option} (`{option[2:].replace('-', '_')}` in Python) is {value:g}; accepted are shares between 0 and 1, "
                    "such as 0.01 for 1 %."
                )


def parse_options(given: Mapping[str, Any]) -> FitOptions:
    """The options of a command line; RecipeError names an option whose value cannot be read."""
    model, saw, colour, resize = str(given["model"]), given.get("weights_saw"), given.get("colour"), given.get("resize")
    for option, value, accepted in (
        ("--weights-saw", saw, get_args(Seen)),
        ("--colour", colour, ("RGB", "L")),
        ("--resize", resize, ("nearest", "bilinear", "bicubic", "lanczos")),
    ):
        if value is not None and value not in accepted:
            raise RecipeError(f"{option} is {value!r}; accepted are {', '.join(accepted)}.")
    height, width = _size(given.get("size"))
    crop, classes = given.get("crop"), given.get("classes")
    return FitOptions(
        model=model,
        weights=given.get("weights"),
        name=given.get("name") or model_name(model),
        data=given.get("data", ""),
        ood=tuple(map(data_name, given.get("ood") or ())),
        classes=None if classes is None else tuple(read_class_list(classes)),
        weights_saw=saw,
        input=InputOptions(
            height=height,
            width=width,
            colour=colour,
            resize=resize,
            fit=None if crop is None else "crop" if crop else "stretch",
            shorter_side=crop or None,
            mean=_numbers("--mean", given.get("mean")),
            std=_numbers("--std", given.get("std")),
        ),
        taps=_parts(given.get("tap")),
        distance=not given.get("no_distance", False),
        logits=given.get("logits"),
        target_fpr=given.get("target_fpr", 0.01),
        target_risk=given.get("target_risk", 0.05),
        as_sent=_parts(given.get("as_sent")) or (),
        form=given["form"].value if "form" in given else "worst",
        epochs=given.get("epochs", 20),
    )


def model_name(model: str) -> str:
    """A name for the served model, from the option --model."""
    last = Path(model).stem if model.endswith(MODEL_SUFFIXES) else re.split(r"[:/]", model)[-1]
    return re.sub(r"[^a-z0-9._-]+", "-", last.lower()).strip("-._")[:64] or "model"


def data_name(text: str | PathLike[str]) -> str:
    """The name by which data are loaded: `folder:PATH` for a folder, unchanged for the name of a data set."""
    if isinstance(text, PathLike):
        return f"{FOLDER_PREFIX}{fspath(text)}"
    is_folder = os.sep in text or Path(text).expanduser().is_dir()
    return f"{FOLDER_PREFIX}{text}" if is_folder and not text.startswith(FOLDER_PREFIX) else text


def listed(name: str, values: Any) -> tuple[Any, ...]:
    """The names or paths of an argument in Python; one alone counts as a list of one, and no other objects are accepted."""
    values = (values,) if isinstance(values, str | PathLike) else values
    wrong = next((one for one in values if not isinstance(one, str | PathLike)), None) if _is_list(values) else values
    if wrong is not None:
        raise RecipeError(
            f"`{name}` holds an object of type {type(wrong).__name__}; accepted are names{' and folders' if name == 'ood' else ''}."
        )
    return tuple(values)


def _is_list(values: Any) -> bool:
    return isinstance(values, Sequence) or hasattr(values, "tolist")


def _parts(text: str | None) -> tuple[str, ...] | None:
    return None if text is None else tuple(part.strip() for part in text.split(","))


def _size(text: str | None) -> tuple[int | None, int | None]:
    if text is None:
        return None, None
    numbers = re.fullmatch(r"(\d{1,4})(?:[x×](\d{1,4}))?", text.strip())
    if numbers is None:
        raise RecipeError(f"--size is {text!r}; accepted are pixels such as 224, or height and width such as 224x320.")
    return int(numbers[1]), int(numbers[2] or numbers[1])


def _numbers(option: str, text: str | None) -> tuple[float, ...] | None:
    try:
        return None if text is None else tuple(float(part) for part in text.split(","))
    except ValueError:
        raise RecipeError(f"{option} is {text!r}; accepted is one number per channel, such as 0.5,0.5,0.5.") from None
