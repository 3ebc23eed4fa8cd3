"""Compare the evaluations of two bundles, or of two runs seed by seed."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from qualms.bundle.evaluation_results import Evaluation
from qualms.bundle.file import Bundle, open_bundle
from qualms_training.console import Display
from qualms_training.errors import DataError
from qualms_training.reporting.report import Grid, to_rich


def compare_runs(first: Path, second: Path, display: Display | None = None) -> Grid:
    """Print the AUROC of `second` minus that of `first`, paired by seed, for each score and OOD set, and both sizes."""
    display = display or Display()
    bundles_a, bundles_b = _bundles(first), _bundles(second)
    seeds = sorted(set(bundles_a) & set(bundles_b))
    if not seeds:
        raise DataError(
            f"{first} has the seeds {sorted(bundles_a)} and {second} has {sorted(bundles_b)}; none is in both."
        )
    pairs = [(_evaluation(bundles_a[seed]), _evaluation(bundles_b[seed])) for seed in seeds]
    grid = _difference_grid(pairs, f"{second} minus {first}, AUROC in points, {len(seeds)} seed(s)")
    display.console.print(to_rich(grid))
    for path, bundle in ((first, bundles_a[seeds[0]]), (second, bundles_b[seeds[0]])):
        origin = bundle.manifest.provenance
        display.note(
            f"{path}: {origin.recipe_name}, base {origin.base['parameters']:,} and {origin.meta['form']} meta-model "
            f"{origin.meta['parameters']:,} parameters, graph {len(bundle.graph) / 1e6:.2f} MB"
        )
    return grid


def _difference_grid(pairs: Sequence[tuple[Evaluation, Evaluation]], title: str) -> Grid:
    """Mean and standard deviation of the AUROC differences, for scores and OOD sets that all evaluations have."""
    tables = [tuple({(row.score, row.data): row.auroc for row in side.ood} for side in pair) for pair in pairs]
    shared = [key for key in tables[0][0] if all(key in side for pair in tables for side in pair)]
    if not shared:
        raise DataError("The two evaluations have no score and OOD set in common.")
    sets = list(dict.fromkeys(data for _, data in shared))
    rows = []
    for score in dict.fromkeys(score for score, _ in shared):
        cells = []
        for data in sets:
            changes = [b[score, data] - a[score, data] for a, b in tables if (score, data) in a]
            spread = f" ± {np.std(changes):.2f}" if len(changes) > 1 else ""
            cells.append(f"{np.mean(changes):+.2f}{spread}" if (score, data) in shared else "–")
        rows.append((score, cells))
    return Grid(title, sets, rows)


def _bundles(path: Path) -> dict[int, Bundle]:
    """By seed: the bundle at `path`, or all bundles of a run folder."""
    files = sorted(path.glob("seed-*/model.onnx")) if path.is_dir() else [path]
    if not files:
        raise DataError(f"Folder {path} holds no seed-*/model.onnx; give a bundle or the --out folder of a run.")
    bundles = [open_bundle(file) for file in files]
    return {bundle.manifest.provenance.seed: bundle for bundle in bundles}


def _evaluation(bundle: Bundle) -> Evaluation:
    if bundle.manifest.evaluation is None:
        raise DataError(f"{bundle.path} has no evaluation; run the stage evaluate of its recipe first.")
    return bundle.manifest.evaluation
