"""Set two bundles, or two runs over the same seeds, side by side."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from qualms.bundle.file import Bundle, open_bundle
from qualms.bundle.manifest import Evaluation
from qualms_training.console import Display
from qualms_training.errors import DataError
from qualms_training.reporting.report import Grid, to_rich


def compare_runs(first: Path, second: Path, display: Display | None = None) -> Grid:
    """Print AUROC of B minus AUROC of A, by score and set, paired seed by seed, and both meta-models' sizes."""
    display = display or Display()
    ours, theirs = _bundles(first), _bundles(second)
    seeds = sorted(set(ours) & set(theirs))
    if not seeds:
        raise DataError(f"{first} has the seeds {sorted(ours)} and {second} has {sorted(theirs)}; none is in both.")
    pairs = [(_evaluation(ours[seed]), _evaluation(theirs[seed])) for seed in seeds]
    grid = difference_grid(pairs, f"{second} minus {first}, AUROC in points, {len(seeds)} seed(s)")
    display.console.print(to_rich(grid))
    for path, bundle in ((first, ours[seeds[0]]), (second, theirs[seeds[0]])):
        origin = bundle.manifest.provenance
        display.note(
            f"{path}: {origin.recipe_name}, base {origin.base['parameters']:,} and {origin.meta['form']} meta-model "
            f"{origin.meta['parameters']:,} parameters, graph {len(bundle.graph) / 1e6:.2f} MB"
        )
    return grid


def difference_grid(pairs: Sequence[tuple[Evaluation, Evaluation]], title: str) -> Grid:
    """Mean (and spread) of the AUROC differences over pairs, for what both sides have."""
    tables = [tuple({(row.score, row.data): row.auroc for row in side.ood} for side in pair) for pair in pairs]
    shared = [key for key in tables[0][0] if all(key in side for pair in tables for side in pair)]
    if not shared:
        raise DataError("The two were not evaluated on any common score and data set.")
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
    """By seed: one bundle, or those of a run folder."""
    files = sorted(path.glob("seed-*/model.onnx")) if path.is_dir() else [path]
    if not files:
        raise DataError(f"Folder {path} holds no seed-*/model.onnx; give a bundle or the --out folder of a run.")
    bundles = [open_bundle(file) for file in files]
    return {bundle.manifest.provenance.seed: bundle for bundle in bundles}


def _evaluation(bundle: Bundle) -> Evaluation:
    if bundle.manifest.evaluation is None:
        raise DataError(f"{bundle.path} has not been evaluated; run its recipe's stage evaluate first.")
    return bundle.manifest.evaluation
