"""Which predictions may be relied on: the laxest threshold whose error rate can be promised.

The promise: with 95 % confidence over calibration sets, accepted predictions are wrong at a rate of at most
`target_risk`. Trying many thresholds and keeping one that looks good would break it, since the luckiest of
many estimates is too low. Two things keep it (fixed-sequence testing, as in "Learn then Test" by Angelopoulos
et al.):

- The thresholds are quantiles of another split, and the walk over them starts at a level that depends on the
  target and the number of calibration images only. So which hypotheses, "the risk at tⱼ exceeds the target",
  are tested, and in which order, is settled before a calibration image is looked at.
- Each is tested at 5 % by the exact binomial tail, from strict to lax, up to the first failure. An unsafe
  threshold can be returned only if the first unsafe one of the sequence passes its test. That is one fixed
  test, so it happens for at most 5 % of calibration sets, however many thresholds stand around it.

Nothing is assumed of the score: a poor one costs acceptance, not the promise.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from qualms.bundle.scores import Direction, as_uncertainty
from qualms.decisions.binomial import binomial_cdf, upper_bound
from qualms.errors import OperatingPointError


@dataclass(frozen=True, eq=False)
class RiskEvidence:
    """What the labelled calibration images say about a fixed grid of J thresholds."""

    levels: npt.NDArray[np.float64]
    """(J,) ascending in (0, 1]: the quantiles of the fit split's doubts that the thresholds are."""
    thresholds: npt.NDArray[np.float64]
    """(J,) ascending, finite, in doubt."""
    accepted: npt.NDArray[np.int64]
    """(J,) calibration images with doubt ≤ threshold."""
    errors: npt.NDArray[np.int64]
    """(J,) wrong predictions among them."""
    n: int
    """All calibration images."""


@dataclass(frozen=True)
class TrustPoint:
    """Where a score stops being trusted."""

    score: str
    direction: Direction
    target_risk: float
    threshold: float
    """In the score's own units; what is exactly as doubtful is still accepted."""
    accepted: float
    """Share of the calibration images that are accepted."""

    def accepts(self, values: npt.ArrayLike) -> npt.NDArray[np.bool_]:
        """Which scores (N,), in their own units, are trusted; one that is not a finite number never is."""
        doubts = as_uncertainty(values, self.direction)
        return (doubts <= self._threshold_doubt) & (doubts > -np.inf)

    @cached_property
    def _threshold_doubt(self) -> float:
        """Finite, so that an infinite doubt exceeds it."""
        return float(as_uncertainty(self.threshold, self.direction))


def tally(
    doubts: npt.NDArray[np.floating[Any]],
    wrong: npt.NDArray[np.bool_],
    thresholds: npt.NDArray[np.floating[Any]],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Count the accepted images, and the errors among them, at each threshold.

    doubts (n,), wrong (n,), thresholds (J,) → accepted (J,), errors (J,). Only finite doubts are accepted.
    """
    finite = np.isfinite(doubts)
    order = np.argsort(doubts[finite])
    accepted = np.searchsorted(doubts[finite][order], thresholds, side="right").astype(np.int64)
    errors_among_first = np.concatenate(([0], np.cumsum(wrong[finite][order], dtype=np.int64)))
    return accepted, errors_among_first[accepted]


def risk_threshold(evidence: RiskEvidence, target_risk: float, confidence: float = 0.95) -> float:
    """Walk from strict to lax and return the last threshold, in doubt, that passes; refuse if none does."""
    if not 0.0 < target_risk < 1.0:
        raise OperatingPointError(f"The target risk must lie strictly between 0 and 1, not {target_risk}.")
    start = _first_level(evidence.levels, evidence.n, target_risk, confidence)
    passed = None
    for j in range(start, len(evidence.levels)):
        errors, accepted = int(evidence.errors[j]), int(evidence.accepted[j])
        if binomial_cdf(errors, accepted, target_risk) > 1 - confidence:
            break
        passed = j
    if passed is None:
        errors, accepted = int(evidence.errors[start]), int(evidence.accepted[start])
        raise OperatingPointError(
            f"A target risk of {target_risk} is not supported by the {evidence.n:,} calibration images: "
            f"{errors:,} of the {accepted:,} least doubtful are misclassified, which bounds the risk with "
            f"{confidence:.0%} confidence by {upper_bound(errors, accepted, confidence):.2g} only."
        )
    return float(evidence.thresholds[passed])


def choose_trust_point(
    evidence: RiskEvidence, *, score: str, direction: Direction, target_risk: float, confidence: float = 0.95
) -> TrustPoint:
    """Choose the threshold for a target risk, or refuse."""
    threshold = risk_threshold(evidence, target_risk, confidence)
    j = int(np.searchsorted(evidence.thresholds, threshold))
    return TrustPoint(
        score,
        direction,
        target_risk,
        threshold=float(as_uncertainty(threshold, direction)),
        accepted=int(evidence.accepted[j]) / evidence.n,
    )


def _first_level(levels: npt.NDArray[np.float64], n: int, target_risk: float, confidence: float) -> int:
    """Index of the level where the walk starts, from the target and n alone.

    Fewer than m = log 0.05 / log(1 − r) images cannot pass even without an error. A walk that starts where m
    are expected fails about every other time, because a few less turn up or one of them is wrong. So it
    starts where 3m are, or, if the calibration set is too small, midway (geometrically) between m and all.
    """
    fewest = math.log(1 - confidence) / math.log1p(-target_risk)
    expected = levels * n
    most = float(expected[-1])
    if most < fewest:
        raise OperatingPointError(
            f"A target risk of {target_risk} needs at least {np.ceil(fewest):,.15g} accepted calibration "
            f"images without an error, and of {n:,} the laxest threshold accepts about {most:,.0f}, which "
            f"support {upper_bound(0, int(most), confidence):.2g} at best."
        )
    return int(np.argmax(expected >= min(3 * fewest, math.sqrt(fewest * most))))
