"""Trusted predictions: the loosest threshold with a guaranteed error rate (selective risk).

A prediction is accepted iff the image's flag score is strictly below the flag's threshold and its trust score is at or below
the trust threshold. A flagged image is thus never accepted. The guarantee: with 95 % confidence over calibration sets, the error
rate of accepted predictions is at most `target_risk`. Choosing the best of many thresholds by its estimated error rate would
break the guarantee, because the minimum of many estimates is biased. Fixed-sequence testing ("Learn then Test", Angelopoulos
et al.) preserves it:

- The thresholds are quantiles of another split, and the first one to be tested depends only on the targets and the
  number of calibration images. The hypotheses, "the risk at tⱼ exceeds the target", and their order are therefore
  fixed before any calibration image is used.
- Each hypothesis is tested at 5 % by the exact binomial tail, from strict to loose, up to the first failure. An unsafe
  threshold can be returned only if the first unsafe one in the sequence passes its test. That is a single fixed test,
  so it happens for at most 5 % of calibration sets, for any number of thresholds.

The flag's threshold comes from the same calibration images, which does not break the guarantee. It is the k-th largest
calibration score τ. Given τ and the number of images below it, those images are independent draws from the distribution of images
with a flag score below τ, which is the distribution of the images that can be accepted. So the test counts only calibration
images strictly below τ and is exact for every τ, hence also on average over τ. Images with exactly the score τ are
neither flagged nor accepted: τ is one of the scores, so the calibration images at τ are not independent draws. For a
continuous score there are no others; for a score with ties the guarantee would otherwise not hold.

The guarantee holds for any scores; a poor score only reduces the number of accepted predictions. Earlier bundles have no paired
scores: their test counts all calibration images, so their error rate is guaranteed for the predictions at or below the trust
threshold, flagged or not.
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

    expected: npt.NDArray[np.float64]
    """(J,) ascending: expected number of accepted images, a function of n and the targets alone."""
    thresholds: npt.NDArray[np.float64]
    """(J,) ascending, finite, as uncertainty."""
    accepted: npt.NDArray[np.int64]
    """(J,) calibration images with uncertainty ≤ threshold."""
    errors: npt.NDArray[np.int64]
    """(J,) wrong predictions among them."""
    n: int
    """Number of all calibration images."""
    joint: bool
    """Whether only images strictly below the flag's threshold are counted."""


@dataclass(frozen=True)
class TrustPoint:
    """Trust threshold of a score for a target risk; `verdicts.decide` combines it with the flag."""

    score: str
    direction: Direction
    target_risk: float
    threshold: float
    """Raw value of the score; an image exactly at the threshold is accepted."""
    accepted: float
    """Fraction of the calibration images that were counted as accepted."""
    joint: bool
    """Whether the guarantee is for images that are not flagged; else it is for flagged ones too."""

    def accepts(self, values: npt.ArrayLike) -> npt.NDArray[np.bool_]:
        """Whether each of the raw scores (N,) is at or below the threshold; non-finite scores are not."""
        uncertainty = as_uncertainty(values, self.direction)
        return (uncertainty <= self._max_uncertainty) & (uncertainty > -np.inf)

    @property
    def condition(self) -> str:
        """When a prediction is accepted, in words."""
        sign = "≤" if self.direction == "higher" else "≥"
        return f"not flagged and {self.score} {sign} {self.threshold:.6g}"

    @cached_property
    def _max_uncertainty(self) -> float:
        return float(as_uncertainty(self.threshold, self.direction))


def count_accepted(
    uncertainty: npt.NDArray[np.floating[Any]],
    wrong: npt.NDArray[np.bool_],
    thresholds: npt.NDArray[np.floating[Any]],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Count the accepted images, and the errors among them, at each threshold.

    uncertainty (n,) ascending, wrong (n,), thresholds (J,) → accepted (J,), errors (J,).
    """
    accepted = uncertainty.searchsorted(thresholds, side="right").astype(np.int64)
    errors_among_first = np.concatenate(([0], np.cumsum(wrong, dtype=np.int64)))
    return accepted, errors_among_first[accepted]


def choose_trust_point(evidence: RiskEvidence, *, score: str, direction: Direction, target_risk: float) -> TrustPoint:
    """The last threshold that passes its test from strict to loose; OperatingPointError if none passes."""
    if not 0.0 < target_risk < 1.0:
        raise OperatingPointError(f"The target risk must lie strictly between 0 and 1, not {target_risk}.")
    start = _first_level(evidence, target_risk)
    passed = None
    for j in range(start, len(evidence.expected)):
        if binomial_cdf(int(evidence.errors[j]), int(evidence.accepted[j]), target_risk) > 1 - _CONFIDENCE:
            break
        passed = j
    if passed is None:
        errors, accepted = int(evidence.errors[start]), int(evidence.accepted[start])
        which = "least uncertain ones that are not flagged" if evidence.joint else "least uncertain ones"
        raise OperatingPointError(
            f"A target risk of {target_risk} is not supported by the {evidence.n:,} calibration images: "
            f"{errors:,} of the {accepted:,} {which} are misclassified, so the risk is at most "
            f"{upper_bound(errors, accepted, _CONFIDENCE):.2g} with {_CONFIDENCE:.0%} confidence."
        )
    return TrustPoint(
        score,
        direction,
        target_risk,
        threshold=float(as_uncertainty(evidence.thresholds[passed], direction)),
        accepted=int(evidence.accepted[passed]) / evidence.n,
        joint=evidence.joint,
    )


def _first_level(evidence: RiskEvidence, target_risk: float) -> int:
    """Index of the first level to test, which depends only on the targets and n.

    Fewer than m = log 0.05 / log(1 − r) images cannot pass the test even without an error. If the first level expects
    exactly m images, about half of all calibration sets fail there, because fewer images are accepted or one is wrong.
    So the first level is the one that expects 3m images or, in a small calibration set, the geometric mean of m and
    the number of images at the last level.
    """
    min_images = math.log(1 - _CONFIDENCE) / math.log1p(-target_risk)
    max_images = float(evidence.expected[-1])
    if max_images < min_images:
        raise OperatingPointError(
            f"A target risk of {target_risk} needs at least {np.ceil(min_images):,.15g} accepted calibration "
            f"images without an error; the loosest threshold accepts about {max_images:,.0f} of {evidence.n:,}, which "
            f"support {upper_bound(0, int(max_images), _CONFIDENCE):.2g} at best."
        )
    return int(np.argmax(evidence.expected >= min(3 * min_images, math.sqrt(min_images * max_images))))
