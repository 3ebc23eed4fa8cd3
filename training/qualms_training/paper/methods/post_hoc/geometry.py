"""Unit-length features, and Gaussians around class means."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import pinvh

Array = NDArray[np.float64]


def unit(features: NDArray[np.float32]) -> Array:
    """Each row (N, D) divided by its length; rows of zeros stay zero."""
    rows = np.asarray(features, dtype=np.float64)
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.asarray(rows / np.maximum(lengths, np.finfo(np.float32).tiny))


@dataclass(frozen=True)
class Gaussian:
    """Class means (C, D) with one shared covariance, stored as its pseudo-inverse (D, D)."""

    means: Array
    precision: Array

    @classmethod
    def fit(cls, features: Array, labels: NDArray[np.int64], classes: int) -> "Gaussian":
        """Maximum-likelihood estimate from features (N, D) and labels (N,)."""
        means = np.stack([features[labels == label].mean(axis=0) for label in range(classes)])
        centred = features - means[labels]
        return cls(means, pinvh(centred.T @ centred / len(features)))

    def distances(self, features: Array) -> Array:
        """Squared Mahalanobis distances (N, C) of features (N, D)."""
        columns = []
        for mean in self.means:
            centred = features - mean
            columns.append(np.einsum("nd,nd->n", centred @ self.precision, centred))
        return np.stack(columns, axis=1)

    @property
    def size(self) -> int:
        """How many numbers are stored."""
        return self.means.size + self.precision.size
