"""How far an image's tapped features lie from the training data: what the Dirichlet's own evidence does not know.

Features are scaled to unit length, a tap at a time, and compared with the mean of each class under one covariance a
tap (Mueller & Hein, "Mahalanobis++", ICML 2025). Low taps notice images of another kind, the last one notices
figures of another class. In the graph that is a matrix product a tap.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

TINY = 1e-12
"""squared length below which a feature has no direction"""
NOISE = 1e-7
"""variance of unit features below which a direction holds the rounding of the feature cache and nothing else"""
LARGEST_FACTOR = 200_000
"""numbers in a tap's covariance factor; a wider tap keeps the directions in which it varies most"""


class TapDensity(nn.Module):
    """One tap: whitening and the class means behind it."""

    factor: Tensor
    """(R, D); the squared length of factor · u is a squared Mahalanobis distance"""
    means: Tensor
    """(K, R), class means behind the factor"""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        rank = min(width, max(1, LARGEST_FACTOR // width))
        self.register_buffer("factor", torch.zeros(rank, width))
        self.register_buffer("means", torch.zeros(classes, rank))

    def fit(self, features: NDArray[np.float32], labels: NDArray[np.int64]) -> None:
        """From training features (N, D) and labels (N,); a class without images lies at the mean of all."""
        rows = unit_rows(np.asarray(features, dtype=np.float64))
        classes, rank = len(self.means), len(self.factor)
        means = np.stack(
            [
                rows[labels == label].mean(axis=0) if (labels == label).any() else rows.mean(axis=0)
                for label in range(classes)
            ]
        )
        centred = rows - means[labels]
        values, vectors = np.linalg.eigh(centred.T @ centred / len(rows))
        factor = (vectors / np.sqrt(np.maximum(values, NOISE))).T
        factor[values < NOISE] = 0.0
        kept = factor[::-1][:rank]  # eigenvalues ascend
        self.factor.copy_(torch.from_numpy(kept.copy()))
        self.means.copy_(torch.from_numpy(means @ kept.T))

    def forward(self, feature: Tensor) -> Tensor:
        """(N, D) to squared distances to each class, (N, K)."""
        length = feature.square().sum(dim=1, keepdim=True).clamp(min=TINY).sqrt()
        whitened = (feature / length) @ self.factor.T
        return (whitened.unsqueeze(1) - self.means).square().sum(dim=2)


class Density(nn.Module):
    """All taps of a base."""

    def __init__(self, widths: Sequence[int], classes: int) -> None:
        super().__init__()
        self.taps = nn.ModuleList(TapDensity(width, classes) for width in widths)

    def fit(self, features: Sequence[NDArray[np.float32]], labels: NDArray[np.int64]) -> None:
        """From training features, one (N, D) a tap, and labels (N,)."""
        for module, tap in zip(self.taps, features, strict=True):
            assert isinstance(module, TapDensity)
            module.fit(tap, labels)

    def forward(self, features: Sequence[Tensor]) -> Tensor:
        """Reduced features, one (N, D) a tap, to squared distances (N, T, K) of every tap to every class."""
        return torch.stack([module(tap) for module, tap in zip(self.taps, features, strict=True)], dim=1)


def unit_rows(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """Each row (N, D) divided by its length, as in the graph."""
    return np.asarray(rows / np.sqrt(np.maximum((rows**2).sum(axis=1, keepdims=True), TINY)))
