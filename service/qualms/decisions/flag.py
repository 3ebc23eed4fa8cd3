"""OOD flags with a guaranteed false-alarm rate.

The method uses only the rank of a score among calibration scores that were not used for training. If a new
in-distribution image is exchangeable with the calibration images, p = (1 + #{sᵢ ≥ s})/(n + 1) satisfies P(p ≤ ε) ≤ ε
for any score (Bates et al. 2023). An image is flagged iff p ≤ k/(n + 1). Given the calibration set, the false-alarm
rate is then distributed as Beta(k, n + 1 − k) for a continuous score, and is lower with ties. Two rules choose k:

- marginal: k = ⌊ε(n + 1)⌋, so that the rate is at most ε on average over calibration sets;
- confident: the largest k with P(Beta(k, n + 1 − k) > ε) ≤ 0.05, so that the rate is at most ε for 95 % of them;
- by-class: the confident rule for each predicted class, see `qualms.decisions.by_class`.

No rule guarantees a detection rate, and none holds after the in-distribution images have drifted.

If the calibration images were sent in several settings (the form `worst`), let t be the largest of the settings' thresholds.
In every setting, the images above t are at most those above its own threshold, so the guarantee holds for each setting.
The same is true of the largest p-value. Both are those of the envelope of the sorted scores, whose j-th value is the
largest of the settings' j-th values.
"""

import math
from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from qualms.bundle.parts import Guarantee
from qualms.bundle.scores import Direction, as_uncertainty
from qualms.decisions.binomial import beta_upper_quantile, binomial_cdf
from qualms.errors import OperatingPointError

_MISS_PROBABILITY = 0.05
"""Fraction of calibration sets for which a confident rate may exceed its target."""
_RATE_BOUND_TAIL = 0.001
"""Fraction of calibration sets whose false-alarm rate may exceed `rate_bound`."""
_RANK_WINDOW = 3
_ROUNDING = 1 + 1e-12
"""Compensates rounding of the target: 0.29 of 100 images are 29, but 0.29 * 100 < 29 in floating point."""


@dataclass(frozen=True)
class FlagPoint:
    """Flag threshold of a score and its guarantee."""

    score: str
    direction: Direction
    target_fpr: float
    guarantee: Guarantee
    k: int
    """Flag iff p ≤ k/(n + 1)."""
    n: int
    threshold: float
    """Raw value of the k-th most uncertain calibration score; images with strictly more uncertainty are flagged."""

    @property
    def rate_bound(self) -> float:
        """99.9 % quantile of the false-alarm rate given the calibration set, the limit for alerts."""
        return _rate_bound(self.k, self.n)

    def flags(self, values: npt.ArrayLike) -> npt.NDArray[np.bool_]:
        """Flags (N,) of raw scores (N,): true for exactly those with p ≤ k/(n + 1)."""
        return as_uncertainty(values, self.direction) > self._threshold_uncertainty

    def is_below(self, uncertainty: npt.NDArray[np.float64]) -> npt.NDArray[np.bool_]:
        """Whether each uncertainty (N,) is strictly below the threshold."""
        return uncertainty < self._threshold_uncertainty

    def flags_from_ranks(self, ranks: npt.NDArray[np.intp]) -> npt.NDArray[np.bool_]:
        """Flags (N,) from `ranks` (N,), the number of calibration scores strictly below each score."""
        return ranks > self.n - self.k

    @cached_property
    def _threshold_uncertainty(self) -> float:
        return float(as_uncertainty(self.threshold, self.direction))


def p_values(
    uncertainty: npt.NDArray[np.floating[Any]], calibration: npt.NDArray[np.floating[Any]]
) -> npt.NDArray[np.float64]:
    """p-values (N,) in (0, 1]: the fraction of the calibration images and the image itself that are at least as uncertain.

    uncertainty (N,) and calibration (n,) are values of `scores.as_uncertainty`; calibration is sorted ascending.
    """
    return p_values_from_ranks(calibration.searchsorted(uncertainty), len(calibration))


def p_values_from_ranks(ranks: npt.NDArray[np.intp], n: int) -> npt.NDArray[np.float64]:
    """p-values (N,) from `ranks` (N,), the number of the n calibration scores strictly below each score."""
    return (n + 1 - ranks) / (n + 1)


def choose_flag_point(
    calibration: npt.NDArray[np.floating[Any]],
    *,
    score: str,
    direction: Direction,
    target_fpr: float,
    guarantee: Guarantee = "confident",
) -> FlagPoint:
    """Choose the threshold for a target false-alarm rate; OperatingPointError if the calibration set is too small.

    calibration (n,): uncertainty of the calibration images, sorted ascending.
    """
    n = len(calibration)
    k = rank(n, target_fpr, guarantee)
    threshold = float(as_uncertainty(calibration[n - k], direction))
    if not math.isfinite(threshold):
        raise OperatingPointError(
            f"A {guarantee} false-alarm rate of {target_fpr} would set the threshold of {score!r} to {threshold}, "
            f"because too few of the {n:,} calibration images have a finite score.",
            "target_fpr",
        )
    return FlagPoint(score, direction, target_fpr, guarantee, k, n, threshold)


def rank(n: int, target_fpr: float, guarantee: Guarantee) -> int:
    """The rank k ≥ 1 of a guarantee for n calibration images; OperatingPointError if n is too small."""
    if guarantee not in get_args(Guarantee):
        raise OperatingPointError(
            f"The guarantee {guarantee!r} is unknown; accepted are {', '.join(get_args(Guarantee))}.", "guarantee"
        )
    if not 0.0 < target_fpr < 1.0:
        raise OperatingPointError(
            f"The target false-alarm rate must lie strictly between 0 and 1, not {target_fpr}.", "target_fpr"
        )
    k = _marginal_rank(n, target_fpr) if guarantee == "marginal" else _confident_rank(n, target_fpr)
    if k == 0:
        raise OperatingPointError(
            f"A {guarantee} false-alarm rate of {target_fpr} needs at least "
            f"{smallest_n(target_fpr, guarantee):,.15g} calibration images; there are {n:,}.",
            "target_fpr",
        )
    return k


@lru_cache(maxsize=1024)
def _confident_rank(n: int, target_fpr: float) -> int:
    """Largest k with P(Bin(n, ε) ≤ k − 1) ≤ 0.05, which is P(Beta(k, n + 1 − k) > ε) ≤ 0.05."""

    def cdf(j: int) -> float:
        return binomial_cdf(j, n, target_fpr)

    # The normal approximation is off by at most a few ranks, which saves most of the bisection.
    guess = n * target_fpr - 1.645 * math.sqrt(n * target_fpr * (1 - target_fpr))
    low, high = max(0, math.floor(guess) - _RANK_WINDOW), min(n, math.ceil(guess) + _RANK_WINDOW)
    if low >= high or (low > 0 and cdf(low - 1) > _MISS_PROBABILITY) or (high < n and cdf(high) <= _MISS_PROBABILITY):
        low, high = 0, n
    return low + bisect_right(range(low, high), _MISS_PROBABILITY, key=cdf)


def _marginal_rank(n: int, target_fpr: float) -> int:
    """⌊ε(n + 1)⌋."""
    return min(n, math.floor(target_fpr * _ROUNDING * (n + 1)))


def smallest_n(target_fpr: float, guarantee: Guarantee) -> float:
    """Smallest n with k ≥ 1, as a float because it overflows for very small targets."""
    if guarantee == "marginal":
        return float(np.ceil(1 / (target_fpr * _ROUNDING) - 1))
    return float(np.ceil(math.log(_MISS_PROBABILITY) / math.log1p(-target_fpr)))


@lru_cache(maxsize=1024)
def _rate_bound(k: int, n: int) -> float:
    return beta_upper_quantile(k, n, _RATE_BOUND_TAIL)
