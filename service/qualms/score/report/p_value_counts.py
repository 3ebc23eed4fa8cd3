"""Counts of distinct p-values: all that the false discovery rate and the test of uniformity need, in constant memory.

A conformal p-value is a rank among n calibration images, so there are at most n + 1 distinct ones, however many images are
scored. With thresholds by predicted class, each group of classes has ranks of its own, and there are at most as many distinct
values as calibration images and groups together.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

_BUFFERED = 65_536
"""p-values that are collected before they are merged; merging few at a time would cost more than scoring them"""


class PValueCounts:
    """How often each p-value occurred."""

    def __init__(self) -> None:
        self._values: NDArray[np.float64] = np.empty(0)
        self._counts: NDArray[np.int64] = np.empty(0, np.int64)
        self._buffer: list[NDArray[np.float64]] = []
        self._buffered = 0
        self.total = 0
        """number of p-values that were added"""

    def add(self, p_values: ArrayLike) -> None:
        """Count p-values (N,); ValueError if one is not in (0, 1]."""
        added = np.array(p_values, dtype=np.float64).reshape(-1)
        if not np.all((added > 0) & (added <= 1)):
            raise ValueError("p-values must be above 0 and at most 1; images without a p-value must be left out.")
        self._buffer.append(added)
        self._buffered += len(added)
        self.total += len(added)
        if self._buffered >= _BUFFERED:
            self._merge()

    @property
    def values(self) -> NDArray[np.float64]:
        """(D,) the distinct p-values, ascending."""
        self._merge()
        return self._values

    @property
    def counts(self) -> NDArray[np.int64]:
        """(D,) how often each of `values` occurred."""
        self._merge()
        return self._counts

    def _merge(self) -> None:
        if not self._buffer:
            return
        values, counts = np.unique(np.concatenate(self._buffer), return_counts=True)
        self._buffer, self._buffered = [], 0
        merged, position = np.unique(np.concatenate([self._values, values]), return_inverse=True)
        both = np.concatenate([self._counts, counts])
        # Weights of bincount are float64, which is exact for counts below 2⁵³.
        self._counts = np.bincount(position, weights=both, minlength=len(merged)).astype(np.int64)
        self._values = merged
