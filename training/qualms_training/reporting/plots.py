"""Histograms of each score on the test set and on the OOD sets."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from qualms.bundle.manifest import Manifest
from qualms.bundle.runtime import Outputs
from qualms.decisions.calibration_set import CalibrationSet
from qualms.decisions.operating_point import OperatingPoint
from qualms.errors import OperatingPointError
from qualms.files import atomic_path


def save_plots(folder: Path, manifest: Manifest, outputs: Outputs, ood_outputs: Mapping[str, Outputs]) -> None:
    """Write one image per score, `folder/<score>.png`, with one histogram per data set."""
    for score in manifest.scores:
        with atomic_path(folder / f"{score}.png") as file:
            _histograms(score, manifest, outputs, ood_outputs).savefig(file, dpi=120)


def _histograms(score: str, manifest: Manifest, outputs: Outputs, ood_outputs: Mapping[str, Outputs]) -> Figure:
    figure = Figure(figsize=(9, 1.3 * (len(ood_outputs) + 1) + 0.6), layout="constrained")
    FigureCanvasAgg(figure)
    sets = {"test set": outputs[score], **{name: ood[score] for name, ood in ood_outputs.items()}}
    low, high = (float(f(np.concatenate(list(sets.values())))) for f in (np.min, np.max))
    edges = np.linspace(low, high if high > low else low + 1, 81)
    rows = figure.subplots(len(sets), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (name, values) in zip(rows, sets.items(), strict=True):
        axes.hist(values, bins=edges, color="#1b7f79" if name == "test set" else "#c8553d")
        axes.set_ylabel(name, rotation=0, ha="right", va="center")
        axes.set_yticks([])
        axes.spines[["top", "right", "left"]].set_visible(False)
        _draw_threshold(axes, score, manifest)
    rows[-1].set_xlabel(f"{score} (dashed: flag threshold for a false-alarm rate of {manifest.operating.target_fpr:g})")
    figure.suptitle(f"{manifest.name} {manifest.version}: {score}")
    return figure


def _draw_threshold(axes: object, score: str, manifest: Manifest) -> None:
    try:
        threshold = CalibrationSet(manifest).flag_point(OperatingPoint(score)).threshold
    except OperatingPointError:
        return
    axes.axvline(threshold, color="black", linestyle="--", linewidth=1)  # type: ignore[attr-defined]
