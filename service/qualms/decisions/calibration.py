"""Calibration data and reference distributions from the graph's outputs on held-out images."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qualms.bundle.manifest import Calibration, Reference, TrustGrid
from qualms.bundle.scores import ScoreSpec
from qualms.errors import DataError

REFERENCE_LEVELS = (0.0, 0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.999, 1.0)
TRUST_LEVELS = 100
"""Number of candidate trust thresholds; more of them do not weaken the fixed-sequence test."""

Outputs = Mapping[str, NDArray[Any]]


def trust_grid(fit_uncertainty: NDArray[np.floating[Any]]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Levels and thresholds (J,) for the selective-risk test, from the uncertainty (M,) of the fit split.

    The calibration split may only test the thresholds, so they are chosen on the fit split.
    """
    levels = np.arange(1, TRUST_LEVELS + 1, dtype=np.float32) / np.float32(TRUST_LEVELS)
    finite = fit_uncertainty[np.isfinite(fit_uncertainty)]
    if not len(finite):
        raise DataError("The fit split has no finite trust scores, so no threshold can be chosen.")
    # The method `higher` returns observed values, so tied scores are on the same side of the threshold.
    return levels, np.quantile(finite, levels, method="higher").astype(np.float32)


def calibrate(
    outputs: Outputs,
    labels: NDArray[np.int64],
    scores: Mapping[str, ScoreSpec],
    grid: tuple[NDArray[np.float32], NDArray[np.float32]],
    *,
    split: str,
    data: str,
    data_sha256: str,
) -> Calibration:
    """The scores and errors of the n calibration images, from the graph's `outputs` for them; `grid` is a `trust_grid`."""
    for name in scores:
        if non_finite := int((~np.isfinite(outputs[name])).sum()):
            raise DataError(f"{non_finite} of {len(labels)} calibration images have no finite {name}.")
    levels, thresholds = grid
    return Calibration(
        n=len(labels),
        split=split,
        data=data,
        data_sha256=data_sha256,
        scores={name: outputs[name] for name in scores},
        wrong=np.flatnonzero(outputs["prediction"] != labels).tolist(),
        trust=TrustGrid(levels=levels, thresholds=thresholds),
    )


def reference(outputs: Outputs, scores: Mapping[str, ScoreSpec], classes: int) -> Reference:
    """Quantiles of each score and the fraction of each predicted class on in-distribution images."""
    shares = np.bincount(outputs["prediction"], minlength=classes) / len(outputs["prediction"])
    return Reference(
        levels=list(REFERENCE_LEVELS),
        quantiles={name: [float(q) for q in np.quantile(outputs[name], REFERENCE_LEVELS)] for name in scores},
        class_shares=[float(share) for share in shares],
    )
