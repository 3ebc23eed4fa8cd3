"""Convert a run of an earlier version, whose α is the meta-model's own, to the joined α; nothing is trained again.

Base and meta-model are kept. The stages after them run as in `qualms train`, and write the new bundle. Everything that can be
missing is checked for all seeds before the first file is written.
"""

import json
import re
from pathlib import Path
from typing import Any

import torch

from qualms.bundle.evaluation_results import Evaluation
from qualms.bundle.scores import DEFAULT_FLAG_SCORE, DEFAULT_TRUST_SCORE
from qualms_training.console import Display
from qualms_training.errors import ConversionError
from qualms_training.recipe import Recipe, check_recipe
from qualms_training.run import report_evaluations, run_stages, save_settings
from qualms_training.stages import Stage, check, fit
from qualms_training.stages.context import RunContext

STAGES = (Stage.combine, Stage.export, Stage.calibrate, Stage.evaluate)
EARLIER_FLAG_SCORES = ("fused", "mutual_information")
"""defaults of earlier versions, with and without a fused score"""
EARLIER_TRUST_SCORE = "error_probability"


class ConversionContext(RunContext):
    """A run whose base and meta-model may be read, but not trained."""

    def check_may_run(self, stage: str) -> None:
        """Raise ConversionError if `stage` would train a network."""
        if stage == Stage.base:
            raise ConversionError(
                f"{self.folder} cannot be converted: {self.cache} has no base that was trained with the recipe, data and "
                "model code of this run; --cache names the folder that the run used."
            )
        if stage == Stage.fit:
            raise ConversionError(
                f"{self.folder} cannot be converted: its meta-model was not trained with the recipe in run.json and the "
                "present data, base and model code."
            )


def convert_run(
    folder: Path, *, cache: Path, data_dir: Path | None, device: torch.device, display: Display | None = None
) -> list[Evaluation]:
    """Convert every seed of the run in `folder`; print and save the tables of the new evaluations."""
    display = display or Display()
    recipe, seeds = recorded_recipe(folder), _seeds(folder)

    def context(seed: int) -> ConversionContext:
        return ConversionContext(recipe, seed, folder / f"seed-{seed}", cache, data_dir, device, display)

    for seed in seeds:
        _check(context(seed))
    save_settings(recipe, device, folder)
    for seed in seeds:
        display.note(f"[bold cyan]seed {seed}[/bold cyan] on {device}")
        run_stages(context(seed), STAGES)
    return report_evaluations(recipe, [context(seed).bundle_file for seed in seeds], folder, display)


def recorded_recipe(folder: Path) -> Recipe:
    """The recipe in `folder`/run.json; if an earlier version wrote it, with the present defaults in place of the earlier ones."""
    file = folder / "run.json"
    try:
        document = json.loads(file.read_text(encoding="utf-8"))["recipe"]
    except FileNotFoundError:
        raise ConversionError(f"{folder} cannot be converted: it has no run.json, so it is not a run folder.") from None
    except (OSError, ValueError, KeyError, TypeError):
        raise ConversionError(f"{folder} cannot be converted: its run.json is damaged.") from None
    recipe = check_recipe(document, f"recorded in {file}")
    return recipe if "distance" in document else _with_present_scores(recipe)


def _with_present_scores(recipe: Recipe) -> Recipe:
    operating, changes = recipe.operating, dict[str, Any]()
    if operating.score in EARLIER_FLAG_SCORES:
        changes["score"] = DEFAULT_FLAG_SCORE
    if operating.trust_score == EARLIER_TRUST_SCORE:
        changes["trust_score"] = DEFAULT_TRUST_SCORE
    return recipe.model_copy(update={"operating": operating.model_copy(update=changes)})


def _seeds(folder: Path) -> list[int]:
    names = [re.fullmatch(r"seed-(\d+)", path.name) for path in folder.iterdir() if path.is_dir()]
    seeds = sorted(int(name[1]) for name in names if name)
    if not seeds:
        raise ConversionError(f"{folder} cannot be converted: it has no folder seed-0 or of another seed.")
    return seeds


def _check(context: RunContext) -> None:
    """Raise a QualmsError if base, meta-model or data are missing or outdated."""
    for name in ("stages.json", "meta.pt", "fit.json"):
        if not (context.folder / name).exists():
            raise ConversionError(
                f"{context.folder} cannot be converted: it has no {name}, so its meta-model was not trained to the end."
            )
    context.recipe.check_seed(context.seed)
    check.run(context)
    fit.fitted_meta(context)
