"""Paired bootstrap of AUROCs: several scores of the same images are evaluated on the same resamples of the images."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

CHUNK = 32
"""resamples that are evaluated together; the tables of one chunk fit into the processor's cache"""
LEVEL = 0.95

Array = NDArray[np.float64]


class Interval(NamedTuple):
    """A difference and its percentile interval at `LEVEL`."""

    difference: float
    lower: float
    upper: float

    def __str__(self) -> str:
        difference, lower, upper = (f"{round(value, 2) + 0.0:+.2f}" for value in self)  # + 0.0 turns −0 into 0
        return f"{difference} [{lower}, {upper}]"


def interval(difference: float, resampled: Array) -> Interval:
    """The interval of a difference from its values on resamples, (B,)."""
    lower, upper = np.quantile(resampled, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(difference, float(lower), float(upper))


def resampled_aurocs(
    negatives: Sequence[NDArray[Any]],
    positives: Sequence[Sequence[NDArray[Any]]],
    resamples: int,
    rng: np.random.Generator,
    progress: Callable[[int], None] = lambda resamples: None,
) -> Array:
    """AUROC in percent of R scores on S sets of positives, for B resamples with replacement, (R, S, B).

    `negatives` has R arrays (N,), and `positives` R lists of S arrays (M_s,). Negatives and each set of positives are
    drawn separately, and all scores see the same draws.
    """
    count, sizes = len(negatives[0]), [len(values) for values in positives[0]]
    orders = [np.argsort(values) for values in negatives]
    ranks = [
        [_Ranks.of(values[order], positive) for positive in sets]
        for values, order, sets in zip(negatives, orders, positives, strict=True)
    ]
    result = np.empty((len(negatives), len(sizes), resamples))
    for start in range(0, resamples, CHUNK):
        chunk = slice(start, min(start + CHUNK, resamples))
        width = chunk.stop - start
        drawn = _draws(count, width, rng)
        drawn_positives = [_draws(size, width, rng) for size in sizes]
        below = np.zeros((count + 1, width))
        for row, order in enumerate(orders):
            # Row i of `below` is how many drawn negatives are among the i smallest.
            np.cumsum(drawn[order], axis=0, out=below[1:])
            for column, size in enumerate(sizes):
                pairs = ranks[row][column].ordered_pairs(below, drawn_positives[column])
                result[row, column, chunk] = 100 * pairs / (count * size)
        progress(width)
    return result


class _Ranks(NamedTuple):
    """Positions of positives among sorted negatives."""

    below: NDArray[np.int64]
    """(M,) how many negatives are smaller"""
    tied: NDArray[np.int64]
    """indices of the positives that equal a negative"""
    not_above: NDArray[np.int64]
    """how many negatives are smaller or equal, for the tied positives"""

    @classmethod
    def of(cls, ordered: NDArray[Any], positives: NDArray[Any]) -> "_Ranks":
        below, not_above = (np.searchsorted(ordered, positives, side) for side in ("left", "right"))
        tied = np.flatnonzero(not_above > below)
        return cls(below, tied, not_above[tied])

    def ordered_pairs(self, below: Array, drawn: Array) -> Array:
        """How many pairs of drawn images are in the right order, ties counted as half, (B,).

        `below` (N + 1, B) are cumulative counts of the sorted negatives, and `drawn` (M, B) counts of the positives.
        """
        pairs = np.einsum("mb,mb->b", below.take(self.below, axis=0), drawn)
        if len(self.tied):
            equal = below.take(self.not_above, axis=0) - below.take(self.below[self.tied], axis=0)
            pairs += np.einsum("mb,mb->b", equal, drawn[self.tied]) / 2
        return np.asarray(pairs)


def _draws(count: int, resamples: int, rng: np.random.Generator) -> Array:
    """How often each of `count` images is drawn in each resample, (count, resamples)."""
    draws = [np.bincount(rng.integers(count, size=count), minlength=count) for _ in range(resamples)]
    return np.stack(draws, axis=1).astype(np.float64)
