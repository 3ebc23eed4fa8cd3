"""Decisions at the default operating point: what is flagged and accepted, beside what the softmax of the base can accept."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from qualms.bundle.evaluation_results import ServedOodResult, ServedResult, ServedTrust
from qualms.bundle.manifest import Manifest
from qualms.decisions.operating_point import OperatingPoint
from qualms.decisions.verdicts import Decider
from qualms_training.reporting.breakdown import Sent
from qualms_training.reporting.graph_runs import BASE_MAX_PROBABILITY, softmax_scores


def served_result(
    manifest: Manifest, sent: Sent, labels: NDArray[np.int64], ood: Mapping[str, Sent]
) -> ServedResult | None:
    """Counts of test images and of each OOD set at the default operating point; None if the calibration does not support it."""
    decider, point = Decider(manifest), OperatingPoint()
    verdicts = sent.verdicts(decider, point)
    if verdicts is None:
        return None
    wrong, trust, limit = sent.outputs["prediction"] != labels, None, None
    if verdicts.accepts is not None:
        accepted, errors = int(verdicts.accepts.sum()), int(wrong[verdicts.accepts].sum())
        softmax_accepted, softmax_wrong = None, None
        if manifest.prediction == "base":
            uncertainty = softmax_scores(sent.outputs)[BASE_MAX_PROBABILITY]
            rate = errors / accepted if accepted else manifest.operating.target_risk
            limit = loosest_threshold(uncertainty, wrong, rate)
            softmax_accepted, softmax_wrong = int((uncertainty <= limit).sum()), int(wrong[uncertainty <= limit].sum())
        trust = ServedTrust(
            target_risk=manifest.operating.target_risk,
            accepted=accepted,
            wrong=errors,
            softmax_accepted=softmax_accepted,
            softmax_wrong=softmax_wrong,
        )
    return ServedResult(
        score=manifest.operating.score,
        target_fpr=manifest.operating.target_fpr,
        n=len(labels),
        flagged=int(verdicts.flags.sum()),
        trust=trust,
        ood=[result for name, one in ood.items() if (result := _ood_result(name, decider, one, limit)) is not None],
    )


def loosest_threshold(uncertainty: NDArray[np.float64], wrong: NDArray[np.bool_], max_rate: float) -> float:
    """The largest of the values (N,) at or below which the error rate is at most `max_rate`; −∞ if there is none."""
    order = np.argsort(uncertainty, kind="stable")
    ascending = uncertainty[order]
    rates = np.cumsum(wrong[order]) / np.arange(1, len(order) + 1)
    last_of_ties = np.append(ascending[1:] > ascending[:-1], True)
    passing = np.flatnonzero((rates <= max_rate) & last_of_ties)
    return float(ascending[passing[-1]]) if len(passing) else -np.inf


def _ood_result(name: str, decider: Decider, sent: Sent, limit: float | None) -> ServedOodResult | None:
    """The counts of one OOD set; `limit`: the threshold of the softmax, None if there is none."""
    verdicts = sent.verdicts(decider, OperatingPoint())
    if verdicts is None:
        return None
    by_softmax = None if limit is None else int((softmax_scores(sent.outputs)[BASE_MAX_PROBABILITY] <= limit).sum())
    return ServedOodResult(
        data=name,
        n=len(verdicts.flags),
        flagged=int(verdicts.flags.sum()),
        accepted=None if verdicts.accepts is None else int(verdicts.accepts.sum()),
        softmax_accepted=by_softmax,
    )
