"""Run a recipe: check it, run every stage for every seed, and report the evaluations."""

import importlib
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import torch
from rich.markup import escape
from torch import nn

from qualms.bundle.evaluation_results import Evaluation
from qualms.bundle.file import open_bundle
from qualms.cluster.connection import ClusterOptions
from qualms.machine.cpu import available_cores
from qualms_training.checks.estimates import peak_memory
from qualms_training.console import Display, duration
from qualms_training.data import DataSource
from qualms_training.errors import QualmsError
from qualms_training.files import save_json, save_text
from qualms_training.recipe import Recipe
from qualms_training.reporting.report import accuracy_line, all_grids, to_markdown
from qualms_training.reporting.summary import print_report, summary_grids
from qualms_training.stages import Stage, check
from qualms_training.stages.context import RunContext
from qualms_training.stages.provenance import versions


def train_recipe(
    recipe: Recipe,
    *,
    out: Path,
    cache: Path,
    data_dir: DataSource,
    seeds: Sequence[int],
    device: torch.device,
    only: str | None = None,
    allow_chance: bool = False,
    given_base: nn.Module | None = None,
    show_all: bool = False,
    print_tables: bool = True,
    display: Display | None = None,
    cluster: ClusterOptions | None = None,
) -> list[Evaluation]:
    """Run every stage, or `only` one, for each seed; print and save the tables if the evaluations were made.

    With `allow_chance`, a base whose accuracy is near chance is accepted. `given_base` is a Python object
    in place of the model that the recipe names. With `show_all`, all tables are printed instead of the rows that decide; without
    `print_tables`, none.
    With `cluster`, the frozen base runs on that Ray cluster.
    """
    display = display or Display()
    display.note(f"[bold]{recipe.name}[/bold]: {escape(recipe.description)}")
    for seed in seeds:
        recipe.check_seed(seed)
    for folder in (out, cache):
        _check_folder(folder)

    folders = {seed: out / f"seed-{seed}" for seed in seeds}
    for seed, folder in folders.items():
        display.note(f"[bold cyan]seed {seed}[/bold cyan] on {device}")
        context = RunContext(
            recipe,
            seed,
            folder,
            cache,
            data_dir,
            device,
            display,
            only,
            allow_chance=allow_chance,
            given_base=given_base,
            cluster=cluster,
        )
        with _available_threads():
            if seed == seeds[0]:
                check.run(context)
                save_settings(recipe, device, out)
                _make_folder(cache)
            run_stages(context, [stage for stage in Stage if only in (None, stage)])

    if only not in (None, Stage.evaluate):
        return []
    return report_evaluations(
        recipe,
        [folder / "model.onnx" for folder in folders.values()],
        out,
        display,
        show_all=show_all,
        print_tables=print_tables,
    )


@contextmanager
def _available_threads() -> Iterator[None]:
    """In this context, PyTorch has at most one thread per available core.

    By default it ignores the CPU quota of a container, and threads without a core wait for each other.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(min(before, available_cores()))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def run_stages(context: RunContext, stages: Iterable[Stage]) -> None:
    """Run stages of one seed, in the given order, and display the time that each took and the largest memory."""
    times = []
    for stage in stages:
        context.display.note(f"[bold]{stage}[/bold]")
        start = time.monotonic()
        importlib.import_module(f"qualms_training.stages.{stage}").run(context)
        times.append(f"{stage} {duration(time.monotonic() - start)}")
    context.display.note(f"Time: {', '.join(times)}; largest memory {peak_memory() / 1e9:.1f} GB.")


def save_settings(recipe: Recipe, device: torch.device, out: Path) -> None:
    """Write recipe, library versions and device to `out`/run.json."""
    settings = {"recipe": recipe.model_dump(mode="json"), "versions": versions(), "device": str(device)}
    try:
        save_json(out / "run.json", settings)
    except OSError as error:
        raise QualmsError(f"Folder {out} cannot be written to: {error.strerror}.") from error


def report_evaluations(
    recipe: Recipe,
    bundles: Sequence[Path],
    out: Path,
    display: Display,
    *,
    show_all: bool = False,
    print_tables: bool = True,
) -> list[Evaluation]:
    """The evaluations in the bundles of all seeds: the rows that decide are printed, all tables written to `out`/report.md.

    With `show_all`, all tables are printed, too; without `print_tables`, none.
    """
    manifests = [open_bundle(bundle).manifest for bundle in bundles]
    evaluations = [manifest.evaluation for manifest in manifests if manifest.evaluation is not None]
    if print_tables:
        print_report(evaluations, recipe.paper_id, display, show_all=show_all)
        if not show_all:
            display.note(accuracy_line(evaluations))
    grids = [*summary_grids(evaluations, recipe.operating.score), *all_grids(evaluations, recipe.paper_id)]
    head = f"# {recipe.name} {recipe.version}\n\n{recipe.description}\n\n{accuracy_line(evaluations)}\n"
    save_text(out / "report.md", "\n".join([head, *(to_markdown(grid) for grid in grids)]))
    display.note(
        f"All tables: {escape(str(out / 'report.md'))}, or --all; each seed's folder holds model.onnx, evaluation.json and plots."
    )
    return evaluations


def _check_folder(folder: Path) -> None:
    """QualmsError if files cannot be written below the folder; it is made later, when all checks have passed."""
    present = next(path for path in (folder, *folder.parents) if path.exists())
    if not present.is_dir():
        raise QualmsError(f"Folder {folder} cannot be made: {present} is a file.")
    if not os.access(present, os.W_OK | os.X_OK):
        raise QualmsError(f"Folder {folder} cannot be written to: {present} is read-only for this user.")


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise QualmsError(f"Folder {folder} cannot be made: {error.strerror}.") from error


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
