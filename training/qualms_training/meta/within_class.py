"""Variation of features inside classes, from rows that are read in parts and never all at once.

Features of ImageNet do not fit in memory. Each pass over them reads a few megabytes at a time, and no pass needs more memory
than a covariance matrix of a narrow tap or a few directions of a wide one.
"""

from collections.abc import Iterator
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

PART = 4_000_000
"""elements that are converted to double precision at once"""
MAX_ROWS = 100_000
"""rows from which variances are estimated; of more, an evenly spaced selection is used"""
MAX_COVARIANCE_WIDTH = 2000
"""width up to which the covariance matrix is computed; wider taps use randomised subspace iteration"""
OVERSAMPLING, ITERATIONS = 16, 6
"""further directions and passes of the subspace iteration (Halko, Martinsson & Tropp, SIAM Review 2011)"""
ROWS_PER_DIRECTION = 4
"""degrees of freedom for each direction: with fewer, the smallest of the variances are mostly chance, and far too small"""

Rows = NDArray[np.float64]


class WithinClass:
    """Rows (N, D) of unit length, relative to the mean of their class."""

    def __init__(self, features: NDArray[Any], labels: NDArray[np.int64], classes: int, min_length: float) -> None:
        """`features` may be memory-mapped; rows shorter than `min_length` are divided by it instead of their length."""
        self._features = features
        self._labels = np.asarray(labels)
        self._min_length = min_length
        self._width = features.shape[1]
        self._step = -(-len(self._labels) // MAX_ROWS)
        self.counts = np.bincount(self._labels, minlength=classes)

    @cached_property
    def means(self) -> Rows:
        """(K, D); a class without images, or with one, which has no variation inside, gets the mean of all."""
        sums = np.zeros((len(self.counts), self._width))
        for part, labels in self._unit_rows():
            ones = (np.ones(len(labels)), (labels, np.arange(len(labels))))
            sums += np.asarray(sparse.csr_array(ones, shape=(len(sums), len(labels))) @ part)
        means = sums / np.maximum(self.counts, 1)[:, None]
        means[self.counts < 2] = sums.sum(axis=0) / len(self._labels)
        return np.asarray(means)

    def largest_variances(self, count: int) -> tuple[Rows, Rows]:
        """At most `count` variances (R,), in descending order, and their directions (D, R).

        Where there are fewer rows than columns, variances are shrunken towards their mean (Ledoit & Wolf, Journal of
        Multivariate Analysis 2004).
        """
        rows = len(self._labels[:: self._step])
        degrees = len(self._labels) - int((self.counts > 1).sum())
        count = min(count, max(1, degrees // ROWS_PER_DIRECTION))
        if self._width <= MAX_COVARIANCE_WIDTH:
            covariance = sum(part.T @ part for part in self._centred_rows()) / rows
            squares = float(np.square(covariance).sum())
            values, vectors = np.linalg.eigh(covariance)
        else:
            values, vectors, squares = self._subspace(count + OVERSAMPLING, rows)
        values, vectors = values[::-1][:count], vectors[:, ::-1][:, :count]  # eigh sorts in ascending order
        if rows < self._width:
            values = self._shrunken(values, squares, rows)
        return values, vectors

    def _subspace(self, count: int, rows: int) -> tuple[Rows, Rows, float]:
        """The largest variances and their directions, in ascending order, and the sum of squares of the covariance."""
        basis = np.random.default_rng(0).normal(size=(self._width, min(count, self._width)))
        image = self._times_covariance(basis, rows)
        squares = float(np.square(image).sum()) / basis.shape[1]  # its expectation, for random directions
        for _ in range(ITERATIONS):
            basis = np.linalg.qr(image)[0]
            image = self._times_covariance(basis, rows)
        values, rotation = np.linalg.eigh(basis.T @ image)
        return values, basis @ rotation, squares

    def _times_covariance(self, directions: Rows, rows: int) -> Rows:
        """The covariance (D, D) times `directions` (D, R)."""
        return np.asarray(sum(part.T @ (part @ directions) for part in self._centred_rows()) / rows)

    def _shrunken(self, values: Rows, squares: float, rows: int) -> Rows:
        """`values` moved towards their mean by the share that minimises the expected error of the covariance."""
        lengths = np.concatenate([np.square(part).sum(axis=1) for part in self._centred_rows()])
        mean = lengths.mean() / self._width
        spread = squares - self._width * mean**2
        error = (np.square(lengths).mean() - squares) / rows
        share = min(max(error / spread, 0.0), 1.0) if spread > 0 else 1.0
        return np.asarray((1 - share) * values + share * mean)

    def _centred_rows(self) -> Iterator[Rows]:
        for part, labels in self._unit_rows(self._step):
            yield part - self.means[labels]

    def _unit_rows(self, step: int = 1) -> Iterator[tuple[Rows, NDArray[np.int64]]]:
        """Every `step`-th row, divided by its length, and its label."""
        stride = max(1, PART // self._width) * step
        for start in range(0, len(self._labels), stride):
            chosen = slice(start, start + stride, step)
            part = np.asarray(self._features[chosen], dtype=np.float64)
            yield unit_rows(part, self._min_length), self._labels[chosen]


def unit_rows(rows: Rows, min_length: float) -> Rows:
    """Each row (N, D) divided by its length, as the graph does it."""
    return np.asarray(rows / np.maximum(np.sqrt(np.square(rows).sum(axis=1, keepdims=True)), min_length))
