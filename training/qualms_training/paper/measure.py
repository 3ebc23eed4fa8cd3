"""What a method's verdicts come to: detection of strangers, and of its own and the base's errors."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from qualms_training.errors import ModelError
from qualms_training.meta.fusion import ERRORS
from qualms_training.paper.method import Verdict
from qualms_training.reporting.evaluation import detection


class Detection(BaseModel):
    """In percent."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    auroc: float
    aupr: float
    fpr95: float


Detections = dict[str, Detection]
"""by score"""


class Measured(BaseModel):
    """One method, one seed, one protocol."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    error_rate: float
    """of the method's own predictions on the test set, in percent"""
    base_error_rate: float | None
    """None where the base's classes are not the data's"""
    ood: dict[str, Detections]
    """by column"""
    own_errors: Detections
    """of the method's own predictions; empty where it makes none"""
    noise: dict[str, Detections] = {}
    """on validation images, by kind of noise, and their errors: what choices are made by; empty for a whole network"""
    base_errors: Detections
    """of the base's predictions: the same images are wrong for every method; empty where it has none"""


def measure(
    verdicts: Mapping[str, Verdict],
    labels: NDArray[np.int64],
    base_predictions: NDArray[np.int64] | None,
    apart: Mapping[str, NDArray[np.bool_]] | None = None,
) -> Measured:
    """From verdicts on `test` and on every column; labels and predictions (N,) are those of `test`.

    There are no `base_predictions` where the base's classes are not the data's.
    `apart` names columns that are made of test images, and which of those (N,) are left to compare them with.
    """
    test = verdicts["test"]
    _check_finite(verdicts)
    own = test.predictions != labels
    bases = None if base_predictions is None else base_predictions != labels
    ood = {}
    for column, verdict in verdicts.items():
        if column != "test":
            kept = (apart or {}).get(column, np.ones(len(labels), dtype=bool))
            ood[column] = {name: _detection(values[kept], verdict.scores[name]) for name, values in test.scores.items()}
    return Measured(
        error_rate=100 * float(own.mean()),
        base_error_rate=None if bases is None else 100 * float(bases.mean()),
        ood=ood,
        own_errors=_errors(test, own),
        base_errors={} if bases is None else _errors(test, bases),
    )


def _errors(test: Verdict, wrong: NDArray[np.bool_]) -> Detections:
    if not 0 < wrong.sum() < len(wrong):
        return {}
    return {name: _detection(values[~wrong], values[wrong]) for name, values in test.scores.items()}


def _detection(negatives: NDArray[Any], positives: NDArray[Any]) -> Detection:
    auroc, aupr, fpr95 = detection(negatives, positives)
    return Detection(auroc=auroc, aupr=aupr, fpr95=fpr95)


def measure_noise(known: Verdict, wrong: NDArray[np.bool_], noisy: Mapping[str, Verdict]) -> dict[str, Detections]:
    """How validation images are told from noisy copies, and which of them are `wrong` (N,) from the others."""
    found = {
        kind: {name: _detection(values, verdict.scores[name]) for name, values in known.scores.items()}
        for kind, verdict in noisy.items()
    }
    return {**found, ERRORS: _errors(known, wrong)}


def _check_finite(verdicts: Mapping[str, Verdict]) -> None:
    for column, verdict in verdicts.items():
        for name, values in verdict.scores.items():
            if not np.isfinite(values).all():
                raise ModelError(f"Score {name!r} on {column!r} is not finite.")
