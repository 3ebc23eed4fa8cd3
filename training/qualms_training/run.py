"""Run a recipe: check it, run every stage for every seed, and report the evaluations."""

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
from rich.markup import escape

from qualms.bundle.file import open_bundle
from qualms.bundle.manifest import Evaluation
from qualms_training.console import Display
from qualms_training.errors import QualmsError
from qualms_training.files import save_json, save_text
from qualms_training.recipe import Recipe
from qualms_training.reporting.report import accuracy_line, all_grids, to_markdown, to_rich
from qualms_training.stages import Stage, check
from qualms_training.stages.context import RunContext
from qualms_training.stages.provenance import versions


def train_recipe(
    recipe: Recipe,
    *,
    out: Path,
    cache: Path,
    data_dir: Path | None,
    seeds: Sequence[int],
    device: torch.device,
    only: str | None = None,
    display: Display | None = None,
) -> list[Evaluation]:
    """Run every stage, or `only` one, for each seed; print and save the tables if the evaluations were made."""
    display = display or Display()
    display.note(f"[bold]{recipe.name}[/bold]: {escape(recipe.description)}")
    for seed in seeds:
        recipe.check_seed(seed)

    folders = {seed: out / f"seed-{seed}" for seed in seeds}
    for seed, folder in folders.items():
        display.note(f"[bold cyan]seed {seed}[/bold cyan] on {device}")
        context = RunContext(recipe, seed, folder, cache, data_dir, device, display, only)
        if seed == seeds[0]:
            check.run(context)
            _save_settings(recipe, device, out / "run.json")
            _make_folder(cache)
        for stage in Stage:
            if only in (None, stage):
                display.note(f"[bold]{stage}[/bold]")
                importlib.import_module(f"qualms_training.stages.{stage}").run(context)

    if only not in (None, Stage.evaluate):
        return []
    manifests = [open_bundle(folder / "model.onnx").manifest for folder in folders.values()]
    evaluations = [manifest.evaluation for manifest in manifests if manifest.evaluation is not None]
    _report(recipe, evaluations, out, display)
    return evaluations


def _save_settings(recipe: Recipe, device: torch.device, file: Path) -> None:
    settings = {"recipe": recipe.model_dump(mode="json"), "versions": versions(), "device": str(device)}
    try:
        save_json(file, settings)
    except OSError as error:
        raise QualmsError(f"Folder {file.parent} cannot be written to: {error.strerror}.") from error


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise QualmsError(f"Folder {folder} cannot be made: {error.strerror}.") from error


def _report(recipe: Recipe, evaluations: Sequence[Evaluation], out: Path, display: Display) -> None:
    """Print the tables and write them to `out/report.md`."""
    grids = all_grids(evaluations, recipe.paper_id)
    for grid in grids:
        display.console.print(to_rich(grid))
    display.note(accuracy_line(evaluations))
    head = f"# {recipe.name} {recipe.version}\n\n{recipe.description}\n\n{accuracy_line(evaluations)}\n"
    save_text(out / "report.md", "\n".join([head, *(to_markdown(grid) for grid in grids)]))
    display.note(
        f"Report: {escape(str(out / 'report.md'))}; each seed's folder holds model.onnx, evaluation.json and plots."
    )


def pick_device(name: Literal["auto", "cpu", "cuda"]) -> torch.device:
    """The torch device for `name`; `auto` is CUDA if it is available, else the CPU."""
    if name not in ("auto", "cpu", "cuda"):
        raise QualmsError(f"Device {name!r} is unknown; accepted are 'auto', 'cpu' and 'cuda'.")
    if name == "cpu":
        return torch.device("cpu")
    if torch.cuda.is_available():
        return torch.device("cuda")
    if name == "cuda":
        reason = "found no GPU" if torch.version.cuda else "was built without CUDA"
        raise QualmsError(f"Device 'cuda' is not available: PyTorch {torch.__version__} {reason}; use 'cpu' or 'auto'.")
    return torch.device("cpu")
