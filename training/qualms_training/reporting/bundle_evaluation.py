"""Evaluate a finished bundle again, with nothing but the file and data."""

from pathlib import Path
from typing import Any

from qualms.bundle.file import open_bundle
from qualms.bundle.manifest import Evaluation
from qualms.bundle.runtime import GraphRunner, check_golden
from qualms_training.console import Display
from qualms_training.data.prepare import ood_sets, prepare
from qualms_training.errors import DataError, RecipeError
from qualms_training.recipe import check_recipe
from qualms_training.reporting.evaluation import evaluate
from qualms_training.reporting.report import accuracy_line, all_grids, to_rich


def evaluate_bundle(
    model: Path, data_dir: Path | None, ood: list[str] | None = None, display: Display | None = None
) -> Evaluation:
    """Print the tables of `model` on its recipe's test set and on `ood`, by default the recipe's strangers.

    The splits are drawn again from the recorded recipe and seed, so that the test images are the held-out ones.
    """
    display = display or Display()
    bundle = open_bundle(model)
    origin = bundle.manifest.provenance
    recipe = check_recipe(origin.recipe, f"recorded in {model}")
    if ood:
        recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update={"ood": ood})})
    runner = GraphRunner(bundle.graph)
    check_golden(runner, bundle.manifest)
    data = prepare(recipe, origin.seed, data_dir, display)
    _check_same(data.record, origin.data)
    if list(data.classes) != bundle.manifest.classes:
        raise RecipeError(f"The data set {recipe.data.id!r} has other classes than the bundle was made for.")
    test = data.parts["test"]
    others = ood_sets(recipe, test, data_dir, display)
    with display.bar("evaluating", len(test.labels) + sum(map(len, others.values()))) as advance:
        known = runner(test.images, progress=advance)
        strange = {name: runner(images, progress=advance) for name, images in others.items()}
    result = evaluate(bundle.manifest, recipe.data.id, test.labels, known, strange, targets=recipe.report_targets)
    for grid in all_grids([result], recipe.paper_id):
        display.console.print(to_rich(grid))
    display.note(accuracy_line([result]))
    return result


def _check_same(found: dict[str, Any], recorded: dict[str, Any]) -> None:
    """Refuse data that are not those of the run: their test images may be such as the model was trained on."""
    for split, digest in found["sha256"].items():
        if digest != recorded.get("sha256", {}).get(split):
            raise DataError(
                f"Data set {found['id']!r} (split {split!r}) is not the one that the bundle was made with: "
                "its images, labels or classes have changed since."
            )
    if found["splits"] != recorded.get("splits"):
        raise DataError(f"Data set {found['id']!r} is not split as it was when the bundle was made.")
