"""Detection metrics of a method: OOD sets, its own errors and the base's errors."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from qualms_training.errors import ModelError
from qualms_training.paper.method import MethodOutput
from qualms_training.paper.noise_merit import ERRORS
from qualms_training.reporting.evaluation import detection
from qualms_training.reporting.report import METRICS

FALSE_ALARMS = 0.01
"""share of in-distribution images beyond the threshold of `Detection.detected`"""
TABLE_METRICS = {**METRICS, "detected": f"detected at {100 * FALSE_ALARMS:g} % false alarms"}
"""names of the fields of `Detection` in the tables"""


class Detection(BaseModel):
    """How well a score separates two sets of images, in percent."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    auroc: float
    aupr: float
    fpr95: float
    detected: float | None = None
    """share of positives beyond the threshold that 1 % of the negatives exceed; None in results of earlier versions"""


Detections = dict[str, Detection]
"""by score"""


class Measurements(BaseModel):
    """Metrics of one method with one seed under one protocol."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    error_rate: float
    """error rate of the method's predictions on the test set, in percent"""
    base_error_rate: float | None
    """error rate of the base's predictions, or None if the base's classes are not the data's"""
    ood: dict[str, Detections]
    """by column"""
    own_errors: Detections
    """detection of the method's own errors; empty if it makes none"""
    noise: dict[str, Detections] = {}
    """the basis of design choices: detection of noisy validation images, by noise, and of errors among validation images;
    empty for methods on images"""
    base_errors: Detections
    """detection of the base's errors, which are the same images for every method; empty if there are none"""


def measure(
    verdicts: Mapping[str, MethodOutput],
    labels: NDArray[np.int64],
    base_predictions: NDArray[np.int64] | None,
    negatives: Mapping[str, NDArray[np.bool_]] | None = None,
) -> Measurements:
    """Compute the metrics from the verdicts on `test` and on every column.

    `labels` and `base_predictions` (N,) belong to `test`; there are no `base_predictions` if the base's classes are not
    the data's. A column is compared with all test images, unless `negatives` has a mask (N,) of test images for it:
    columns that consist of test images are compared with the remaining ones.
    """
    test = verdicts["test"]
    check_finite({column: verdict.scores for column, verdict in verdicts.items()})
    own_errors = test.predictions != labels
    base_errors = None if base_predictions is None else base_predictions != labels
    ood = {}
    for column, verdict in verdicts.items():
        if column != "test":
            mask = (negatives or {}).get(column, np.ones(len(labels), dtype=bool))
            ood[column] = {name: detect(values[mask], verdict.scores[name]) for name, values in test.scores.items()}
    return Measurements(
        error_rate=100 * float(own_errors.mean()),
        base_error_rate=None if base_errors is None else 100 * float(base_errors.mean()),
        ood=ood,
        own_errors=_error_detections(test, own_errors),
        base_errors={} if base_errors is None else _error_detections(test, base_errors),
    )


def measure_noise(
    clean: MethodOutput, wrong: NDArray[np.bool_], noisy: Mapping[str, MethodOutput]
) -> dict[str, Detections]:
    """Metrics of separating clean images from noisy copies, by noise, and the `wrong` (N,) clean images from the others."""
    by_noise = {
        kind: {name: detect(values, verdict.scores[name]) for name, values in clean.scores.items()}
        for kind, verdict in noisy.items()
    }
    return {**by_noise, ERRORS: _error_detections(clean, wrong)}


def _error_detections(verdict: MethodOutput, wrong: NDArray[np.bool_]) -> Detections:
    if not 0 < wrong.sum() < len(wrong):
        return {}
    return {name: detect(values[~wrong], values[wrong]) for name, values in verdict.scores.items()}


def detect(negatives: NDArray[Any], positives: NDArray[Any]) -> Detection:
    """All metrics of an uncertainty that should be larger for the positives, (M,), than for the negatives, (N,)."""
    auroc, aupr, fpr95 = detection(negatives, positives)
    threshold = np.quantile(negatives, 1 - FALSE_ALARMS)
    return Detection(auroc=auroc, aupr=aupr, fpr95=fpr95, detected=100 * float((positives > threshold).mean()))


def check_finite(scores: Mapping[str, Mapping[str, NDArray[Any]]]) -> None:
    """Raise ModelError if a score, by set of images and name, has a value that is not finite."""
    for column, by_name in scores.items():
        for name, values in by_name.items():
            if not np.isfinite(values).all():
                raise ModelError(f"Score {name!r} has values on {column!r} that are not finite.")
