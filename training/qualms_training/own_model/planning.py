"""Plan a run for a user's model: load it, look at the data, and choose every setting that the user did not give."""

import os
from pathlib import Path
from typing import Any

import torch
from rich.markup import escape

from qualms.bundle.manifest import Predictor
from qualms_training.console import Display
from qualms_training.data import DataSource, ImageSet, load
from qualms_training.data.class_lists import has_numbers, in_class_order, missing_classes
from qualms_training.data.layout import SplitPlan, find_layout, plan_splits
from qualms_training.data.sources.npz import DOWNLOADABLE
from qualms_training.data.sources.synthetic import SETS
from qualms_training.data.split_sizes import HeldOut, plan_sizes
from qualms_training.errors import DataError, ModelError, QualmsError, did_you_mean
from qualms_training.files import save_text
from qualms_training.models import NAMES
from qualms_training.models.channels import expected_channels
from qualms_training.models.logits import are_probabilities, find_logits, return_logits
from qualms_training.models.source import LoadedBase, load_base
from qualms_training.models.unusable_input import run_errors_explained
from qualms_training.own_model.default_recipe import default_recipe
from qualms_training.own_model.model_input import common_size, input_section
from qualms_training.own_model.options import FitOptions
from qualms_training.own_model.recipe_text import recipe_text
from qualms_training.recipe import FOLDER_PREFIX, Recipe, is_model_file


def plan_recipe(options: FitOptions, data_dir: DataSource, display: Display) -> Recipe:
    """The recipe for the model and data of the options; where its settings are from is displayed."""
    plan = _split_plan(options, data_dir)
    train = load(plan.id, "train", data_dir)
    base = load_base(options.model, weights=options.weights, **_known_sizes(options, train))
    return recipe_for(base, options, plan, train, display)


def _known_sizes(options: FitOptions, images: ImageSet) -> dict[str, int]:
    """Sizes that the model may need to be loaded: those given, and for models without a configuration those of the images."""
    sizes = {"height": options.input.height, "width": options.input.width}
    if options.input.height is None and (is_model_file(options.model) or options.model in NAMES):
        sizes["height"], sizes["width"] = common_size(images)
    if is_model_file(options.model):
        sizes["channels"] = 1 if options.input.colour == "L" else 3
    return {name: size for name, size in sizes.items() if size is not None}


def recipe_for(base: LoadedBase, options: FitOptions, plan: SplitPlan, train: ImageSet, display: Display) -> Recipe:
    """The recipe for a loaded model; where its settings are from is displayed."""
    display.note(f"[bold]{escape(options.model)}[/bold], {escape(base.weights_source)}")
    spec, notes = input_section(options.input, base.input, train, expected_channels(base.module))
    logits, about_logits = count_logits(base, options, spec)
    prediction, classes, about_classes = _classes(base, options, train, logits)
    about_base = [sentence for sentence in (base.opaque, about_logits) if sentence]
    for sentence in [*notes, *about_base, *plan.explanation, about_classes]:
        display.note(f"  {escape(sentence)}")
    data: dict[str, Any] = {"id": plan.id, "held_out": plan.held_out, "splits": plan.splits}
    if classes is not None:
        data["classes"] = list(classes)
    return default_recipe(
        options,
        spec=spec,
        data=data,
        prediction=prediction,
        seen=options.weights_saw or "all",
        classes=len(classes or train.classes),
    )


def count_logits(base: LoadedBase, options: FitOptions, spec: dict[str, Any]) -> tuple[int, str | None]:
    """The number of logits, from a run on black images of the model's input, and a sentence if they are probabilities."""
    channels = 1 if spec["colour"] == "L" else 3
    example = torch.zeros(2, channels, spec["height"], spec["width"])
    with (
        run_errors_explained(options.model, base.module, channels, spec["height"], spec["width"]),
        torch.inference_mode(),
    ):
        output = find_logits(base.module(example), options.logits)
        logits = int(return_logits(base.module, example, options.logits)(example).shape[1])
    if logits < 2:
        raise ModelError(
            f"{options.model} has one logit, and a classifier needs one per class: wrap a network of two classes in one that "
            "returns torch.cat([torch.zeros_like(z), z], dim=1) for its logit z (N, 1), which has the same probabilities."
        )
    sentence = (
        "The model returns probabilities: their logarithms are its logits, so that its probabilities do not change."
    )
    return logits, sentence if are_probabilities(output) else None


def _classes(
    base: LoadedBase, options: FitOptions, train: ImageSet, logits: int
) -> tuple[Predictor, tuple[str, ...] | None, str]:
    """The network that predicts, the order of the classes if it is not that of the data, and a sentence about both."""
    if options.classes is not None:
        if len(options.classes) != logits:
            raise DataError(
                f"The list of classes has {len(options.classes):,} names, and the model has {logits:,} logits; it needs one name "
                "per logit."
            )
        in_class_order(train, list(options.classes))  # raises DataError if it lacks a class of the data
        return "base", options.classes, f"{logits:,} classes in the given order."
    if base.classes is not None and len(base.classes) == logits and set(train.classes) <= set(base.classes):
        return "base", base.classes, f"{logits:,} classes in the order of the model's own list of names."
    if logits == len(train.classes):
        first, last = train.classes[0], train.classes[-1]
        others = ""
        if base.classes is not None and len(base.classes) == logits:
            unknown = next(name for name in train.classes if name not in base.classes)
            others = f" The model's own names ({', '.join(base.classes[:3])}, …) are not used: {unknown!r} is not among them."
        order = "in alphabetical order"
        if all(name.isdecimal() for name in train.classes):
            is_numeric = list(train.classes) == sorted(train.classes, key=int)
            order = (
                "in the order of their numbers"
                if is_numeric
                else "sorted as text, such as 10 before 2 (--classes FILE)"
            )
        return (
            "base",
            None,
            f"{logits:,} classes {order}, {first} to {last}: that must be the order of the logits.{others}",
        )
    if has_numbers(train) and missing_classes(train) == ["0"] and logits == len(train.classes) - 1:
        raise DataError(
            f"{train.title} has labels from 1 to {logits}, and the model has {logits:,} logits: number the classes from 0, as the "
            "logits are."
        )
    return (
        "meta",
        None,
        f"Transfer: the model has {logits:,} logits and the data have {len(train.classes):,} classes, so the meta-model predicts "
        "the data's classes from the model's features. To serve the model's own classes instead, give as many class folders as "
        "it has logits.",
    )


def _split_plan(options: FitOptions, data_dir: DataSource) -> SplitPlan:
    """How the data are split: a folder by its layout, a named data set by its two files."""
    folder = Path(options.data.removeprefix(FOLDER_PREFIX)).expanduser()
    if options.data.startswith(FOLDER_PREFIX) or folder.is_dir() or os.sep in options.data:
        saw = options.weights_saw or "all"
        return plan_splits(find_layout(folder), weights_saw=saw, target_fpr=options.target_fpr)
    if not (options.data in {*SETS, *DOWNLOADABLE} or data_dir is not None or "QUALMS_DATA" in os.environ):
        near = [one.name for one in folder.parent.iterdir() if one.is_dir()]
        raise DataError(
            f"There is no folder {options.data!r}{did_you_mean(folder.name, near)} --data takes a folder of class folders, or the "
            "NAME of files NAME-train.npz and NAME-test.npz in the folder of QUALMS_DATA."
        )
    return plan_named(options.data, options, data_dir)


def plan_named(name: str, options: FitOptions, data_dir: DataSource) -> SplitPlan:
    """The splits of a data set that has a train and a test part."""
    counts = [len(load(name, split, data_dir)) for split in ("train", "test")]
    if options.weights_saw == "other-data":
        held_out: HeldOut = "train"
        reason = f"The base has seen no image of {name}, so all splits but test come from its training images"
    else:
        held_out = "test"
        reason = (
            f"The base may have seen the training part of {name}, so fit and calibration images come from the others"
        )
    titles = (f"The training part of {name}", f"The held-out part of {name}")
    sizes = plan_sizes(*counts, held_out=held_out, target_fpr=options.target_fpr, titles=titles)
    listed = ", ".join(f"{count:,} {split}" for split, count in {**sizes.splits, "test": sizes.test}.items())
    return SplitPlan(name, sizes.held_out, sizes.splits, sizes.test, [f"{reason}: {listed}."])


def save_recipe(recipe: Recipe, path: Path) -> None:
    """Write the recipe as TOML."""
    try:
        save_text(path, recipe_text(recipe, path.parent))
    except OSError as error:
        raise QualmsError(f"Recipe {path} cannot be written: {error.strerror}.") from error
