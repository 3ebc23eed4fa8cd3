"""Distance of an image's tapped features from the training data, which the Dirichlet's evidence does not contain.

The features of each tap are scaled to unit length. Their Mahalanobis distance to the mean of each class uses one
covariance per tap (Mueller & Hein, "Mahalanobis++", ICML 2025). Early taps detect images of another kind, the last one
detects objects of another class. In the graph, this is one matrix product per tap.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

TINY = 1e-12
"""smallest squared length by which a feature is divided"""
MIN_VARIANCE = 1e-7
"""variance of unit features below which a direction contains only rounding errors of the feature cache"""
MAX_FACTOR_SIZE = 200_000
"""elements in a tap's covariance factor; wider taps use only the directions of largest variance"""


class TapDensity(nn.Module):
    """Whitening and class means of one tap."""

    factor: Tensor
    """(R, D); the squared length of factor · u is a squared Mahalanobis distance"""
    means: Tensor
    """(K, R), class means after multiplication by the factor"""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        rank = min(width, max(1, MAX_FACTOR_SIZE // width))
        self.register_buffer("factor", torch.zeros(rank, width))
        self.register_buffer("means", torch.zeros(classes, rank))

    def fit(self, features: NDArray[np.float32], labels: NDArray[np.int64]) -> None:
        """Fit to training features (N, D) and labels (N,); a class without images gets the mean of all."""
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
        factor = (vectors / np.sqrt(np.maximum(values, MIN_VARIANCE))).T
        factor[values < MIN_VARIANCE] = 0.0
        largest = factor[::-1][:rank]  # eigh sorts eigenvalues in ascending order
        self.factor.copy_(torch.from_numpy(largest.copy()))
        self.means.copy_(torch.from_numpy(means @ largest.T))

    def forward(self, feature: Tensor) -> Tensor:
        """Features (N, D) to the squared distances to each class, (N, K)."""
        length = feature.square().sum(dim=1, keepdim=True).clamp(min=TINY).sqrt()
        whitened = (feature / length) @ self.factor.T
        return (whitened.unsqueeze(1) - self.means).square().sum(dim=2)


class Density(nn.Module):
    """Densities of all taps."""

    def __init__(self, widths: Sequence[int], classes: int) -> None:
        super().__init__()
        self.taps = nn.ModuleList(TapDensity(width, classes) for width in widths)

    def fit(self, features: Sequence[NDArray[np.float32]], labels: NDArray[np.int64]) -> None:
        """Fit to training features, one (N, D) per tap, and labels (N,)."""
        for module, tap in zip(self.taps, features, strict=True):
            assert isinstance(module, TapDensity)
            module.fit(tap, labels)

    def forward(self, features: Sequence[Tensor]) -> Tensor:
        """Reduced features, one (N, D) per tap, to squared distances (N, T, K) for T taps and K classes."""
        return torch.stack([module(tap) for module, tap in zip(self.taps, features, strict=True)], dim=1)


def unit_rows(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """Each row (N, D) divided by its length, as `TapDensity.forward` does it."""
    return np.asarray(rows / np.sqrt(np.maximum((rows**2).sum(axis=1, keepdims=True), TINY)))
