"""Trusted predictions: the loosest threshold with a guaranteed error rate (selective risk).

The guarantee: with 95 % confidence over calibration sets, the error rate of accepted predictions is at most
`target_risk`. Choosing the best of many thresholds by its estimated error rate would break the guarantee, because the
minimum of many estimates is biased. Fixed-sequence testing ("Learn then Test", Angelopoulos et al.) preserves it:

- The thresholds are quantiles of another split, and the first one to be tested depends only on the target and the
  number of calibration images. The hypotheses, "the risk at tⱼ exceeds the target", and their order are therefore
  fixed before any calibration image is used.
- Each hypothesis is tested at 5 % by the exact binomial tail, from strict to loose, up to the first failure. An unsafe
  threshold can be returned only if the first unsafe one in the sequence passes its test. That is a single fixed test,
  so it happens for at most 5 % of calibration sets, for any number of thresholds.

The guarantee holds for any score; a poor score only reduces the number of accepted predictions.
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

_CONFIDENCE = 0.95


@dataclass(frozen=True, eq=False)
class RiskEvidence:
    """Counts of labelled calibration images at a fixed grid of J thresholds."""

    levels: npt.NDArray[np.float64]
    """(J,) ascending in (0, 1]: quantile levels of the thresholds on the fit split."""
    thresholds: npt.NDArray[np.float64]
    """(J,) ascending, finite, as uncertainty."""
    accepted: npt.NDArray[np.int64]
    """(J,) calibration images with uncertainty ≤ threshold."""
    errors: npt.NDArray[np.int64]
    """(J,) wrong predictions among them."""
    n: int
    """Number of all calibration images."""


@dataclass(frozen=True)
class TrustPoint:
    """Trust threshold of a score for a target risk."""

    score: str
    direction: Direction
    target_risk: float
    threshold: float
    """Raw value of the score; an image exactly at the threshold is accepted."""
    accepted: float
    """Fraction of the calibration images that are accepted."""

    def accepts(self, values: npt.ArrayLike) -> npt.NDArray[np.bool_]:
        """Whether each of the raw scores (N,) is trusted; non-finite scores are not."""
        uncertainty = as_uncertainty(values, self.direction)
        return (uncertainty <= self._max_uncertainty) & (uncertainty > -np.inf)

    @cached_property
    def _max_uncertainty(self) -> float:
        return float(as_uncertainty(self.threshold, self.direction))


def count_accepted(
    uncertainty: npt.NDArray[np.floating[Any]],
    wrong: npt.NDArray[np.bool_],
    thresholds: npt.NDArray[np.floating[Any]],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Count the accepted images, and the errors among them, at each threshold.

    uncertainty (n,), wrong (n,), thresholds (J,) → accepted (J,), errors (J,). Only finite values are accepted.
    """
    finite = np.isfinite(uncertainty)
    order = np.argsort(uncertainty[finite])
    accepted = np.searchsorted(uncertainty[finite][order], thresholds, side="right").astype(np.int64)
    errors_among_first = np.concatenate(([0], np.cumsum(wrong[finite][order], dtype=np.int64)))
    return accepted, errors_among_first[accepted]


def choose_trust_point(evidence: RiskEvidence, *, score: str, direction: Direction, target_risk: float) -> TrustPoint:
    """The last threshold that passes its test from strict to loose; OperatingPointError if none passes."""
    if not 0.0 < target_risk < 1.0:
        raise OperatingPointError(f"The target risk must lie strictly between 0 and 1, not {target_risk}.")
    start = _first_level(evidence.levels, evidence.n, target_risk)
    passed = None
    for j in range(start, len(evidence.levels)):
        if binomial_cdf(int(evidence.errors[j]), int(evidence.accepted[j]), target_risk) > 1 - _CONFIDENCE:
            break
        passed = j
    if passed is None:
        errors, accepted = int(evidence.errors[start]), int(evidence.accepted[start])
        raise OperatingPointError(
            f"A target risk of {target_risk} is not supported by the {evidence.n:,} calibration images: "
            f"{errors:,} of the {accepted:,} least uncertain ones are misclassified, so the risk is at most "
            f"{upper_bound(errors, accepted, _CONFIDENCE):.2g} with {_CONFIDENCE:.0%} confidence."
        )
    return TrustPoint(
        score,
        direction,
        target_risk,
        threshold=float(as_uncertainty(evidence.thresholds[passed], direction)),
        accepted=int(evidence.accepted[passed]) / evidence.n,
    )


def _first_level(levels: npt.NDArray[np.float64], n: int, target_risk: float) -> int:
    """Index of the first level to test, which depends only on the target and n.

    Fewer than m = log 0.05 / log(1 − r) images cannot pass the test even without an error. If the first level expects
    exactly m images, about half of all calibration sets fail there, because fewer images are accepted or one is wrong.
    So the first level is the one that expects 3m images or, in a small calibration set, the geometric mean of m and
    the number of images at the last level.
    """
    min_images = math.log(1 - _CONFIDENCE) / math.log1p(-target_risk)
    expected = levels * n
    max_images = float(expected[-1])
    if max_images < min_images:
        raise OperatingPointError(
            f"A target risk of {target_risk} needs at least {np.ceil(min_images):,.15g} accepted calibration "
            f"images without an error; the loosest threshold accepts about {max_images:,.0f} of {n:,}, which "
            f"support {upper_bound(0, int(max_images), _CONFIDENCE):.2g} at best."
        )
    return int(np.argmax(expected >= min(3 * min_images, math.sqrt(min_images * max_images))))
