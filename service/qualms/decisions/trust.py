"""Trusted predictions: the loosest threshold with a guaranteed error rate (selective risk).

A prediction is accepted iff the image's flag score is strictly below the flag's threshold and its trust score is at or below
the trust threshold. A flagged image is thus never accepted. The guarantee: with 95 % confidence over calibration sets, the error
rate of accepted predictions is at most `target_risk`. Choosing the best of many thresholds by its estimated error rate would
break the guarantee, because the minimum of many estimates is biased. Fixed-sequence testing ("Learn then Test", Angelopoulos
et al.) preserves it:

- The thresholds are quantiles of another split, and the first one to be tested depends only on the targets and the
  numbers of calibration images. The hypotheses, "the risk at tⱼ exceeds the target", and their order are therefore
  fixed before any label of a calibration image is used.
- Each hypothesis is tested at 5 % by the exact binomial tail, from strict to loose, up to the first failure. An unsafe
  threshold can be returned only if the first unsafe one in the sequence passes its test. That is a single fixed test,
  so it happens for at most 5 % of calibration sets, for any number of thresholds.

The flag's threshold comes from the same calibration images, which does not break the guarantee. It is the k-th largest
calibration score τ. Given τ and the number of images below it, those images are independent draws from the distribution of images
with a flag score below τ, which is the distribution of the images that can be accepted. So the test counts only calibration
images strictly below τ and is exact for every τ, hence also on average over τ. Images with exactly the score τ are
neither flagged nor accepted: τ is one of the scores, so the calibration images at τ are not independent draws. For a
continuous score there are no others; for a score with ties the guarantee would otherwise not hold.

If the calibration images were sent in several settings (the form `worst`), a threshold passes only if it passes the test of every
setting, so the guarantee holds for each of them. The flag's threshold may then be an order statistic of another setting's scores of
the same images, and with the guarantee by-class there is one threshold per group of classes. In both cases the argument above is no
longer exact; the simulations in `tests/qualms/decisions/test_guarantees.py` include them. By-class, the target is reduced by the
largest factor by which the flag rates can distort the shares of the groups, (1 − ε)².

The guarantee holds for any scores; a poor score only reduces the number of accepted predictions. Earlier bundles have no paired
scores: their test counts all calibration images, so their error rate is guaranteed for the predictions at or below the trust
threshold, flagged or not.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from qualms.bundle.scores import Direction, as_uncertainty
from qualms.decisions.binomial import binomial_cdf, upper_bound
from qualms.errors import OperatingPointError

_CONFIDENCE = 0.95
_CHERNOFF_NATS = -math.log(1 - _CONFIDENCE) * (1 + 1e-9)


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
    encoding: str | None = None
    """The setting in which the images were sent; None if they are as stored."""


@dataclass(frozen=True)
class TrustPoint:
    """Trust threshold of a score for a target risk; `verdicts.decide` combines it with the flag."""

    score: str
    direction: Direction
    target_risk: float
    threshold: float
    """Raw value of the score; an image exactly at the threshold is accepted."""
    accepted: float
    """Fraction of the calibration images that were counted as accepted, in the setting with the fewest."""
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


def choose_trust_point(
    evidence: Sequence[RiskEvidence], *, score: str, direction: Direction, target_risk: float, safety: float = 1.0
) -> TrustPoint:
    """The last threshold that passes its test from strict to loose; OperatingPointError if none passes.

    There is one RiskEvidence per setting, and a threshold must pass in all of them. The tests use `safety` × `target_risk`.
    """
    if not 0.0 < target_risk < 1.0:
        raise OperatingPointError(
            f"The target risk must lie strictly between 0 and 1, not {target_risk}.", "target_risk"
        )
    start, passed = _first_level(evidence, target_risk), None
    failed = evidence[0]
    for j in range(start, len(evidence[0].expected)):
        tests = {one: _passes(one, j, safety * target_risk) for one in evidence}
        if not all(tests.values()):
            failed = next(one for one, passes in tests.items() if not passes)
            break
        passed = j
    if passed is None:
        errors, accepted = int(failed.errors[start]), int(failed.accepted[start])
        which = "least uncertain ones that are not flagged" if failed.joint else "least uncertain ones"
        sent = f", sent as {failed.encoding}," if failed.encoding else ""
        raise OperatingPointError(
            f"A target risk of {target_risk} is not supported by the {failed.n:,} calibration images: "
            f"{errors:,} of the {accepted:,} {which}{sent} are misclassified, so the risk is at most "
            f"{upper_bound(errors, accepted, _CONFIDENCE):.2g} with {_CONFIDENCE:.0%} confidence.",
            "target_risk",
        )
    return TrustPoint(
        score,
        direction,
        target_risk,
        threshold=float(as_uncertainty(evidence[0].thresholds[passed], direction)),
        accepted=min(int(one.accepted[passed]) / one.n for one in evidence),
        joint=evidence[0].joint,
    )


def _passes(evidence: RiskEvidence, j: int, target_risk: float) -> bool:
    """Whether the exact test rejects that the risk at threshold j exceeds the target.

    Chernoff's bound on the tail decides most cases: it is never below the exact tail, and a hundred times as fast.
    """
    errors, accepted = int(evidence.errors[j]), int(evidence.accepted[j])
    rate = errors / accepted if accepted else 1.0
    if rate >= target_risk:  # Chernoff's bound needs a rate below the target
        return binomial_cdf(errors, accepted, target_risk) <= 1 - _CONFIDENCE
    divergence = (1 - rate) * math.log((1 - rate) / (1 - target_risk))
    if errors:
        divergence += rate * math.log(rate / target_risk)
    return accepted * divergence >= _CHERNOFF_NATS or binomial_cdf(errors, accepted, target_risk) <= 1 - _CONFIDENCE


def _first_level(evidence: Sequence[RiskEvidence], target_risk: float) -> int:
    """Index of the first level to test, which does not depend on errors.

    Fewer than m = log 0.05 / log(1 − r) images cannot pass the test even without an error. If the first level expects
    exactly m images, about half of all calibration sets fail there, because fewer images are accepted or one is wrong.
    So the first level is the one that expects 3m images or, in a small calibration set, the geometric mean of m and
    the number of images at the last level.

    The candidate thresholds come from images as stored. With several settings, or if fewer than m images are accepted at that level
    because the calibration images differ from those, the first level is the one that accepts as many as wanted in every setting.
    """
    expected, n = evidence[0].expected, evidence[0].n
    min_images = math.log(1 - _CONFIDENCE) / math.log1p(-target_risk)
    max_images = float(expected[-1])
    if max_images < min_images:
        raise OperatingPointError(
            f"A target risk of {target_risk} needs at least {np.ceil(min_images):,.15g} accepted calibration "
            f"images without an error; the loosest threshold accepts about {max_images:,.0f} of {n:,}, which "
            f"support {upper_bound(0, int(max_images), _CONFIDENCE):.2g} at best.",
            "target_risk",
        )
    wanted = min(3 * min_images, math.sqrt(min_images * max_images))
    start = int(np.argmax(expected >= wanted))
    accepted = np.min([one.accepted for one in evidence], axis=0)
    if (len(evidence) > 1 or accepted[start] < min_images) and accepted[-1] >= wanted:
        start = int(np.argmax(accepted >= wanted))
    return start
