"""Evaluate a bundle: every score on every stranger set, through the very path that serving takes."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.metrics import average_precision_score, roc_auc_score, roc_curve

from qualms.bundle.manifest import ErrorResult, Evaluation, GuaranteeResult, Manifest, OodResult
from qualms.bundle.runtime import Outputs
from qualms.bundle.scores import as_uncertainty
from qualms.decisions.operating_point import flag_point, trust_point
from qualms.errors import OperatingPointError

Doubts = dict[str, NDArray[np.float64]]

BASE_SCORES = ("base_entropy", "base_max_probability")
"""the frozen softmax's own doubt, for comparison; not flaggable outputs of the graph"""


def detection(negatives: NDArray[Any], positives: NDArray[Any]) -> tuple[float, float, float]:
    """AUROC, AUPR and FPR at 95 % TPR, in percent, of doubts where positives should be larger."""
    doubts = np.concatenate([negatives, positives])
    truth = np.arange(len(doubts)) >= len(negatives)
    # Points that a plot can do without are still operating points, and the one asked for may be among them.
    fpr, tpr, _ = roc_curve(truth, doubts, drop_intermediate=False)
    return (
        100 * float(roc_auc_score(truth, doubts)),
        100 * float(average_precision_score(truth, doubts)),
        100 * float(fpr[np.searchsorted(tpr, 0.95)]),
    )


def evaluate(
    manifest: Manifest,
    name: str,
    labels: NDArray[np.int64],
    outputs: Outputs,
    strangers: Mapping[str, Outputs],
    *,
    targets: Sequence[float],
    base_predictions: NDArray[np.int64] | None = None,
) -> Evaluation:
    """Results from the graph's outputs on the test set `name` and on the OOD sets.

    `base_predictions` are the base's own, from before anything was built on it; the graph's base if not given.
    Where the meta-model predicts, there are none to compare with.
    """
    doubts = all_doubts(outputs, manifest)
    results = []
    for other, found in strangers.items():
        strange = all_doubts(found, manifest)
        results += [_ood_result(other, score, doubts[score], strange[score]) for score in doubts]
    before = None
    if manifest.prediction == "base":
        before = outputs["base_probabilities"].argmax(axis=1) if base_predictions is None else base_predictions
    return Evaluation(
        test_data=name,
        n=len(labels),
        base_accuracy=None if before is None else 100 * float((before == labels).mean()),
        accuracy=100 * float((outputs["prediction"] == labels).mean()),
        identical_predictions=None if before is None else bool((outputs["prediction"] == before).all()),
        ood=results,
        misclassification=_misclassification(doubts, outputs["prediction"] != labels),
        realised=_realised(manifest, outputs, labels, targets),
    )


def all_doubts(outputs: Outputs, manifest: Manifest) -> Doubts:
    """Every score of the bundle and, if the base predicts, its own two, so that larger means more doubtful."""
    found = {name: as_uncertainty(outputs[name], spec.direction) for name, spec in manifest.scores.items()}
    if manifest.prediction == "meta":
        return found
    base = outputs["base_probabilities"].astype(np.float64)
    logarithms = np.log(np.maximum(base, np.finfo(np.float32).tiny))
    return {
        "base_entropy": -(base * logarithms).sum(axis=1),
        "base_max_probability": -base.max(axis=1),
        **found,
    }


def _ood_result(name: str, score: str, known: NDArray[Any], strange: NDArray[Any]) -> OodResult:
    auroc, aupr, fpr95 = detection(known, strange)
    return OodResult(data=name, score=score, auroc=auroc, aupr=aupr, fpr95=fpr95, n_id=len(known), n_ood=len(strange))


def _misclassification(doubts: Doubts, wrong: NDArray[np.bool_]) -> list[ErrorResult]:
    if not 0 < wrong.sum() < len(wrong):
        return []
    found = {score: detection(values[~wrong], values[wrong]) for score, values in doubts.items()}
    return [ErrorResult(score=score, auroc=auroc, aupr=aupr) for score, (auroc, aupr, _) in found.items()]


def _realised(
    manifest: Manifest, outputs: Outputs, labels: NDArray[np.int64], targets: Sequence[float]
) -> list[GuaranteeResult]:
    """What the promises of the default scores came to on the test set."""
    rows = []
    for target in targets:
        rows.append(_realised_false_alarms(manifest, outputs, target))
        rows.append(_realised_risk(manifest, outputs, labels, target))
    return rows


def _realised_false_alarms(manifest: Manifest, outputs: Outputs, target: float) -> GuaranteeResult:
    try:
        point = flag_point(manifest, target_fpr=target)
    except OperatingPointError:
        return GuaranteeResult(promise="false_alarm_rate", target=target, realised=None, n=0)
    flags = point.flags(outputs[point.score])
    return GuaranteeResult(promise="false_alarm_rate", target=target, realised=float(flags.mean()), n=len(flags))


def _realised_risk(manifest: Manifest, outputs: Outputs, labels: NDArray[np.int64], target: float) -> GuaranteeResult:
    try:
        point = trust_point(manifest, target)
    except OperatingPointError:
        return GuaranteeResult(promise="selective_risk", target=target, realised=None, n=0)
    accepted = point.accepts(outputs[point.score])
    wrong = outputs["prediction"] != labels
    risk = float(wrong[accepted].mean()) if accepted.any() else 0.0
    return GuaranteeResult(promise="selective_risk", target=target, realised=risk, n=int(accepted.sum()))
