"""Fit a model that is a Python object to images that are Python objects, for `qualms.fit`: the same run as the command's."""

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from qualms_training.console import Display
from qualms_training.data.class_lists import name_numbers
from qualms_training.data.dataset import ImageSet
from qualms_training.data.layout import find_layout
from qualms_training.data.sources.given_sets import GivenSets
from qualms_training.data.sources.objects import as_image_set
from qualms_training.errors import DataError, ModelError, RecipeError
from qualms_training.models.source import base_of_module
from qualms_training.models.wrappers import unwrapped
from qualms_training.own_model.default_recipe import OBJECT_PREFIX
from qualms_training.own_model.model_input import options_from_object
from qualms_training.own_model.options import FitOptions, data_name, listed
from qualms_training.own_model.planning import plan_named, recipe_for
from qualms_training.run import pick_device, report_evaluations, train_recipe
from qualms_training.stages.base import copied

DATA = "given images"
"""name of the data set in messages and in the manifest"""


def fit_objects(
    model: Any,
    train: Any,
    held_out: Any,
    *,
    input: Any,  # noqa: A002  # as in qualms.fit
    classes: Sequence[str] | None,
    ood: Sequence[str | Path],
    name: str,
    out: Path | None,
    taps: Sequence[str] | None,
    logits: str | None,
    target_fpr: float,
    target_risk: float,
    as_sent: Sequence[str],
    form: Literal["worst", "by-size", "mixture"],
    epochs: int,
    seed: int,
    allow_chance: bool,
    device: Literal["auto", "cpu", "cuda"],
    display: Display | None = None,
) -> tuple[Path, Callable[[bool], None]]:
    """The bundle's file, and a function that prints the report; the arguments are those of `qualms.fit`."""
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"The model is {type(model).__name__}; accepted is a torch.nn.Module, and `qualms fit --model` takes names and files."
        )
    if isinstance(classes, str | Path):
        raise RecipeError(f"`classes` is {str(classes)!r}; accepted is a list of names in the order of the logits.")
    if seed < 0:
        raise RecipeError(f"`seed` is {seed}; accepted are 0 and larger numbers.")
    display = display or Display()
    options = FitOptions(
        model=f"{OBJECT_PREFIX}{type(unwrapped(model)).__name__}",
        name=name,
        ood=tuple(map(data_name, listed("ood", ood))),
        classes=None if classes is None else tuple(classes),
        input=options_from_object(input),
        taps=None if taps is None else listed("taps", taps),
        logits=logits,
        target_fpr=target_fpr,
        target_risk=target_risk,
        as_sent=listed("as_sent", as_sent),
        form=form,
        epochs=epochs,
    )
    train_set, test_set = name_numbers(*_sets(train, held_out, display), classes)
    sets = GivenSets({(DATA, "train"): train_set, (DATA, "test"): test_set})
    plan = plan_named(DATA, options, sets)
    recipe = recipe_for(base_of_module(copied(model)), options, plan, train_set, display)
    folder = Path(tempfile.mkdtemp(prefix="qualms-")) if out is None else out

    def report(show_all: bool) -> None:
        report_evaluations(recipe, [bundle], folder, display, show_all=show_all)

    bundle = folder / f"seed-{seed}" / "model.onnx"
    with torch.random.fork_rng(devices=[]):  # the caller's random numbers stay as they are
        train_recipe(
            recipe,
            out=folder,
            cache=folder / "cache",
            data_dir=sets,
            seeds=[seed],
            device=pick_device(device),
            allow_chance=allow_chance,
            given_base=model,
            print_tables=False,
            display=display,
        )
    return bundle, report


def _sets(train: Any, held_out: Any, display: Display) -> tuple[ImageSet, ImageSet]:
    """Training and held-out images; a folder alone is divided by its layout."""
    if held_out is not None:
        return as_image_set(train, name=DATA, split="train"), as_image_set(held_out, name=DATA, split="test")
    if not isinstance(train, str | Path):
        raise DataError(
            "held_out is missing: thresholds are calibrated on images that the model was not trained on. Give them in the "
            "same form as train, or give a folder that holds both."
        )
    layout = find_layout(Path(train).expanduser())
    if layout.undivided is not None:
        display.note(
            f"{layout.root} has no split folders, so half of each class is held out: valid only if the model has seen none of "
            "these images."
        )
    first, second = (as_image_set(layout.read(split), name=DATA, split=split) for split in ("train", "test"))
    return first, second
