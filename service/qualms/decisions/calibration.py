"""Calibration data and reference distributions from the graph's outputs on held-out images."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qualms.bundle.calibration_data import AsSent, Calibration, PairedScores, TrustGrid
from qualms.bundle.manifest import Reference, SetMethod
from qualms.bundle.scores import Direction, ScoreSpec
from qualms.decisions.prediction_sets import label_scores
from qualms.errors import DataError

REFERENCE_LEVELS = (0.0, 0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.999, 1.0)
TRUST_LEVELS = 100
"""Number of candidate trust thresholds; more of them do not weaken the fixed-sequence test."""

Outputs = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class CalibrationSource:
    """Where the calibration images come from; the fields are those of `Calibration`."""

    split: str
    data: str
    data_sha256: str
    as_sent: AsSent | None = None
    observed: dict[str, int] = field(default_factory=dict)
    fingerprints: NDArray[np.uint64] | None = None
    trimmed: float | None = None

    def fields(self) -> dict[str, Any]:
        """The fields as keyword arguments."""
        return {one.name: getattr(self, one.name) for one in fields(self)}


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
    labels: NDArray[np.int64] | None,
    scores: Mapping[str, ScoreSpec],
    grid: tuple[NDArray[np.float32], NDArray[np.float32]],
    *,
    source: CalibrationSource,
    sets: SetMethod = SetMethod(),  # noqa: B008  # immutable
) -> Calibration:
    """The calibration from the graph's `outputs` for its n images; `grid` is a `trust_grid`.

    Without `labels` (n,), the calibration supports flags, but no guarantees on errors.
    """
    _check_finite(outputs, scores)
    levels, thresholds = grid
    return Calibration(
        n=len(outputs["prediction"]),
        **source.fields(),
        scores={name: outputs[name] for name in scores},
        wrong=_wrong(outputs, labels),
        trust=TrustGrid(levels=levels, thresholds=thresholds),
        predictions=outputs["prediction"],
        label_scores=None if labels is None else label_scores(outputs["probabilities"], labels, sets),
    )


def calibrate_worst(
    settings: Mapping[str, Outputs],
    labels: NDArray[np.int64] | None,
    scores: Mapping[str, ScoreSpec],
    grid: tuple[NDArray[np.float32], NDArray[np.float32]],
    *,
    paired: Iterable[str],
    sizes: Mapping[str, str] | None = None,
    source: CalibrationSource,
    sets: SetMethod = SetMethod(),  # noqa: B008  # immutable
) -> Calibration:
    """The calibration from the graph's outputs in each setting; `paired` names flag and trust score.

    The form is `worst` or, with the size of each setting's images in `sizes`, `by-size`.
    """
    for outputs in settings.values():
        _check_finite(outputs, scores)
    levels, thresholds = grid
    return Calibration(
        n=len(next(iter(settings.values()))["prediction"]),
        **source.fields(),
        scores={
            name: _envelope([outputs[name] for outputs in settings.values()], spec.direction)
            for name, spec in scores.items()
        },
        trust=TrustGrid(levels=levels, thresholds=thresholds),
        settings=[
            PairedScores(
                encoding=encoding,
                size=None if sizes is None else sizes[encoding],
                scores={name: outputs[name] for name in paired},
                predictions=outputs["prediction"],
                wrong=_wrong(outputs, labels),
                label_scores=None if labels is None else label_scores(outputs["probabilities"], labels, sets),
            )
            for encoding, outputs in settings.items()
        ],
    )


def reference(samples: Iterable[Outputs], scores: Mapping[str, ScoreSpec], classes: int) -> Reference:
    """Quantiles of each score and the fraction of each predicted class on in-distribution images, in all settings together."""
    samples = list(samples)
    predictions = np.concatenate([outputs["prediction"] for outputs in samples])
    shares = np.bincount(predictions, minlength=classes) / len(predictions)
    values = {name: np.concatenate([outputs[name] for outputs in samples]) for name in scores}
    return Reference(
        levels=list(REFERENCE_LEVELS),
        quantiles={name: [float(q) for q in np.quantile(values[name], REFERENCE_LEVELS)] for name in scores},
        class_shares=[float(share) for share in shares],
    )


def _check_finite(outputs: Outputs, scores: Mapping[str, ScoreSpec]) -> None:
    for name in scores:
        values = outputs[name]
        if non_finite := int((~np.isfinite(values)).sum()):
            raise DataError(f"{non_finite} of {len(values)} calibration images have no finite {name}.")


def _wrong(outputs: Outputs, labels: NDArray[np.int64] | None) -> list[int] | None:
    return None if labels is None else np.flatnonzero(outputs["prediction"] != labels).tolist()


def _envelope(values: list[NDArray[np.float32]], direction: Direction) -> NDArray[np.float32]:
    """The largest of the settings' j-th smallest uncertainties, for each j, as raw values (n,)."""
    uncertainty: NDArray[np.float32] = np.max(
        [np.sort(-one if direction == "lower" else one) for one in values], axis=0
    )
    return -uncertainty if direction == "lower" else uncertainty
