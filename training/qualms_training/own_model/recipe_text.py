"""A recipe as TOML with comments, for `qualms init`: what `qualms fit` would use, to edit."""

import json
import os
from pathlib import Path
from typing import Any

from qualms_training.recipe import Recipe, map_paths

COMMENTS = {
    "distance": "whether the distance from the training data is a term of the flag score",
    "prediction": "base: your classifier's own class is served; meta: the base has other classes, and the meta-model predicts",
    "data.id": "folder:PATH (relative to this file), or the name of NAME-SPLIT.npz files",
    "data.held_out": "source of fit and calibration images: test if the base was trained on the training images",
    "data.ood": "OOD sets to evaluate on, such as folder:PATH",
    "data.corrupted": "also evaluate on corrupted test images",
    "data.limit": "largest number of images of an OOD set",
    "data.classes": "in the order of the logits",
    "data.splits": "a target of 1 % needs at least 299 calibration images",
    "input.shorter_side": "length of the shorter side before the centre crop",
    "base.weights": "a state-dict file, DEFAULT for the library's weights, or included",
    "base.weights_saw": "training images that the weights were trained on: all, train-split or other-data (none)",
    "base.taps": "dotted module names that `qualms taps MODEL` lists, or auto",
    "meta.statistics": "of each tap over space: mean, max, std",
    "meta.grid": "each statistic is taken in grid × grid cells",
    "operating.target_fpr": "largest share of in-distribution images that are flagged",
    "operating.target_risk": "largest error rate of accepted predictions",
    "calibration.as_sent": "encodings in which images will be sent, such as jpeg:75-95; empty: as stored",
    "report_limit": "largest number of test images per encoding",
}
_UNUSED = {"base": ("epochs", "lr", "batch", "optimizer", "momentum", "nesterov", "schedule", "milestones", "factors")}
"""keys that have no effect where the weights are given"""


def recipe_text(recipe: Recipe, folder: Path) -> str:
    """The recipe as the TOML of a file in `folder`: every setting that was given or chosen, with paths relative to the file."""
    given = recipe.model_dump(mode="json", exclude_unset=True)
    map_paths(given, lambda path: os.path.relpath(path, folder))
    sections = {key: value for key, value in given.items() if isinstance(value, dict)}
    lines = [_line("", key, value) for key, value in given.items() if key not in sections]
    for name, values in sections.items():
        lines += ["", f"[{name}]"]
        lines += [_line(name, key, value) for key, value in values.items() if key not in _UNUSED.get(name, ())]
    return "\n".join(lines) + "\n"


def _line(section: str, key: str, value: Any) -> str:
    comment = COMMENTS.get(f"{section}.{key}" if section else key)
    return f"{key} = {_value(value)}" + (f"  # {comment}" if comment else "")


def _value(value: Any) -> str:
    """A TOML value; JSON's notation of strings, numbers, booleans and lists is TOML's, too."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_value(one)}" for key, one in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(_value, value)) + "]"
    return json.dumps(value, ensure_ascii=False)
