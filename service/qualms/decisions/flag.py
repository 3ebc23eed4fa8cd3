"""When to flag an image as unlike the training data, with a false-alarm rate that can be promised.

Everything here follows from the ranks of calibration scores that nothing else has touched. If a new
in-distribution image is exchangeable with them, p = (1 + #{sᵢ ≥ s})/(n + 1) satisfies P(p ≤ ε) ≤ ε whatever
the score (Bates et al. 2023). Flagging iff p ≤ k/(n + 1) has, given the calibration set, a false-alarm rate
distributed as Beta(k, n + 1 − k) for a continuous score, and lower with ties. Two rules choose k:

- marginal: k = ⌊ε(n + 1)⌋, so the rate is at most ε on average over calibration sets;
- confident: the largest k with P(Beta(k, n + 1 − k) > ε) ≤ 0.05, so it is at most ε for 95 % of them.

Neither promises that anything is detected, nor holds once the in-distribution images themselves drift.
"""

import math
from bisect import bisect_right
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from qualms.bundle.manifest import Guarantee
from qualms.bundle.scores import Direction, as_uncertainty
from qualms.decisions.binomial import beta_upper_quantile, binomial_cdf
from qualms.errors import OperatingPointError

_MISS = 0.05
"""Share of calibration sets for which a confident rate may exceed its target."""
_RATE_BOUND_TAIL = 0.001
"""Share of calibration sets whose false-alarm rate may exceed `rate_bound`."""
_ROUNDING = 1 + 1e-12
"""Targets are read to twelve digits: 0.29 of 100 is 29, though 0.29 * 100 is a little less."""


@dataclass(frozen=True)
class FlagPoint:
    """Where a score flags, and what is promised for it."""

    score: str
    direction: Direction
    target_fpr: float
    guarantee: Guarantee
    k: int
    """Flag iff p ≤ k/(n + 1)."""
    n: int
    threshold: float
    """The k-th most doubtful calibration score, in its own units; strictly more doubtful ones are flagged."""
    rate_bound: float
    """99.9 % upper quantile of the false-alarm rate given the calibration set, for alerts to test against."""

    def flags(self, values: npt.ArrayLike) -> npt.NDArray[np.bool_]:
        """Which scores (N,), in their own units, are flagged: exactly those with p ≤ k/(n + 1)."""
        return as_uncertainty(values, self.direction) > as_uncertainty(self.threshold, self.direction)

    def flags_ranks(self, ranks: npt.NDArray[np.intp]) -> npt.NDArray[np.bool_]:
        """The same for scores whose places among the calibration scores are known."""
        return ranks > self.n - self.k


def p_values(
    doubts: npt.NDArray[np.floating[Any]], calibration: npt.NDArray[np.floating[Any]]
) -> npt.NDArray[np.float64]:
    """Share of calibration at least as doubtful, the image itself counted in.

    doubts (N,) and calibration (n,), sorted ascending, both as `scores.doubt` makes them → (N,) in (0, 1].
    """
    return p_values_ranks(calibration.searchsorted(doubts), len(calibration))


def p_values_ranks(ranks: npt.NDArray[np.intp], n: int) -> npt.NDArray[np.float64]:
    """The same for scores with `ranks` (N,) of the n calibration scores strictly below them."""
    return (n + 1 - ranks) / (n + 1)


def choose_flag_point(
    calibration: npt.NDArray[np.floating[Any]],
    *,
    score: str,
    direction: Direction,
    target_fpr: float,
    guarantee: Guarantee = "confident",
) -> FlagPoint:
    """Choose the threshold for a target false-alarm rate, or refuse.

    calibration (n,): doubts of the calibration images, sorted ascending.
    """
    n = len(calibration)
    k = rank(n, target_fpr, guarantee)
    threshold = float(as_uncertainty(calibration[n - k], direction))
    if not math.isfinite(threshold):
        raise OperatingPointError(
            f"A {guarantee} false-alarm rate of {target_fpr} would put the threshold of {score!r} at "
            f"{threshold}, because the score is finite on too few of the {n:,} calibration images."
        )
    return FlagPoint(score, direction, target_fpr, guarantee, k, n, threshold, _rate_bound(k, n))


def rank(n: int, target_fpr: float, guarantee: Guarantee) -> int:
    """The k of a guarantee for n calibration images: at least 1, or a refusal."""
    if guarantee not in get_args(Guarantee):
        raise OperatingPointError(
            f"The guarantee {guarantee!r} is unknown; accepted are {' and '.join(get_args(Guarantee))}."
        )
    if not 0.0 < target_fpr < 1.0:
        raise OperatingPointError(f"The target false-alarm rate must lie strictly between 0 and 1, not {target_fpr}.")
    k = _confident_rank(n, target_fpr) if guarantee == "confident" else _marginal_rank(n, target_fpr)
    if k == 0:
        raise OperatingPointError(
            f"A {guarantee} false-alarm rate of {target_fpr} needs at least "
            f"{_smallest_n(target_fpr, guarantee):,.15g} calibration images, and there are {n:,}."
        )
    return k


@lru_cache(maxsize=1024)
def _confident_rank(n: int, target_fpr: float) -> int:
    """Largest k with P(Bin(n, ε) ≤ k − 1) ≤ 0.05, which is P(Beta(k, n + 1 − k) > ε) ≤ 0.05."""
    return bisect_right(range(n), _MISS, key=lambda j: binomial_cdf(j, n, target_fpr))


def _marginal_rank(n: int, target_fpr: float) -> int:
    """⌊ε(n + 1)⌋."""
    return min(n, math.floor(target_fpr * _ROUNDING * (n + 1)))


def _smallest_n(target_fpr: float, guarantee: Guarantee) -> float:
    """Calibration images from which k is at least 1; a float, since for the tiniest targets it overflows."""
    if guarantee == "confident":
        return float(np.ceil(math.log(_MISS) / math.log1p(-target_fpr)))
    return float(np.ceil(1 / (target_fpr * _ROUNDING) - 1))


@lru_cache(maxsize=1024)
def _rate_bound(k: int, n: int) -> float:
    return beta_upper_quantile(k, n, _RATE_BOUND_TAIL)
