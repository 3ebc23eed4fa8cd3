"""From the graph's outputs on held-out images to the numbers the decisions rest on."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qualms.bundle.manifest import Calibration, Reference, Trust
from qualms.bundle.scores import ScoreSpec, as_uncertainty
from qualms.decisions.trust import tally
from qualms.errors import DataError

REFERENCE_LEVELS = (0.0, 0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.999, 1.0)
TRUST_LEVELS = 100
"""how fine the grid of candidate thresholds is; the fixed-sequence test makes a finer one free of charge"""

Outputs = Mapping[str, NDArray[Any]]


def trust_grid(fit_doubts: NDArray[np.floating[Any]]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Levels and thresholds (J,) for the selective-risk test, from the fit split's doubts (M,).

    They come from a split of their own so that the calibration split tests them and does not choose them.
    """
    levels = np.arange(1, TRUST_LEVELS + 1, dtype=np.float32) / np.float32(TRUST_LEVELS)
    finite = fit_doubts[np.isfinite(fit_doubts)]
    if not len(finite):
        raise DataError("The fit split gives no finite trust scores, so no threshold can be placed.")
    # `higher` returns observed values, so that ties in the score fall on one side of the threshold.
    return levels, np.quantile(finite, levels, method="higher").astype(np.float32)


def calibrate(
    outputs: Outputs,
    labels: NDArray[np.int64],
    scores: Mapping[str, ScoreSpec],
    trust_score: str,
    grid: tuple[NDArray[np.float32], NDArray[np.float32]],
    *,
    split: str,
    data: str,
    data_sha256: str,
) -> Calibration:
    """Sort each score and count errors at each trust threshold; `outputs` are the graph's on n images."""
    for name in scores:
        if bad := int((~np.isfinite(outputs[name])).sum()):
            raise DataError(f"{bad} of {len(labels)} calibration images give no finite {name}.")
    levels, thresholds = grid
    doubts = as_uncertainty(outputs[trust_score], scores[trust_score].direction)
    accepted, errors = tally(doubts, outputs["prediction"] != labels, thresholds)
    return Calibration(
        n=len(labels),
        split=split,
        data=data,
        data_sha256=data_sha256,
        scores={name: np.sort(outputs[name].astype(np.float32)) for name in scores},
        trust=Trust(
            levels=levels,
            thresholds=thresholds,
            accepted=[int(count) for count in accepted],
            errors=[int(count) for count in errors],
        ),
    )


def reference(outputs: Outputs, scores: Mapping[str, ScoreSpec], classes: int) -> Reference:
    """Quantiles of each score and shares of each predicted class on in-distribution images."""
    shares = np.bincount(outputs["prediction"], minlength=classes) / len(outputs["prediction"])
    return Reference(
        levels=list(REFERENCE_LEVELS),
        quantiles={name: [float(q) for q in np.quantile(outputs[name], REFERENCE_LEVELS)] for name in scores},
        class_shares=[float(share) for share in shares],
    )
