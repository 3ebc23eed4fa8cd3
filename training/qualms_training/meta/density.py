"""Distance of an image's tapped features from the training data, which the Dirichlet's evidence does not contain.

The features of each tap are scaled to unit length. Their Mahalanobis distance to the mean of each class uses one
covariance per tap (Mueller & Hein, "Mahalanobis++", ICML 2025). Early taps detect images of another kind, the last one
detects objects of another class. In the graph, this is one matrix product per tap and one for the means of all taps.
"""

from collections.abc import Sequence
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

MIN_LENGTH = 1e-6
"""smallest length by which a feature is divided"""
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

    def whiten(self, feature: Tensor) -> Tensor:
        """Features (N, D) to (N, R), in which squared lengths are squared Mahalanobis distances, with the mean of classes 0.

        Without the common mean, squared lengths are about as large as distances, so their differences keep their digits.
        """
        length = torch.linalg.vector_norm(feature, dim=1, keepdim=True).clamp(min=MIN_LENGTH)
        return F.linear(feature / length, self.factor, -self.means.mean(dim=0))

    def forward(self, feature: Tensor) -> Tensor:
        """Features (N, D) to the squared distances to each class, (N, K)."""
        return (self.whiten(feature).unsqueeze(1) - self.centred_means).square().sum(dim=2)

    @property
    def centred_means(self) -> Tensor:
        """(K, R), the means relative to their own mean."""
        return self.means - self.means.mean(dim=0)


class Density(nn.Module):
    """Densities of all taps."""

    def __init__(self, widths: Sequence[int], classes: int) -> None:
        super().__init__()
        self.taps = nn.ModuleList(TapDensity(width, classes) for width in widths)

    def fit(self, features: Sequence[NDArray[np.float32]], labels: NDArray[np.int64]) -> None:
        """Fit to training features, one (N, D) per tap, and labels (N,)."""
        for module, tap in zip(self._taps, features, strict=True):
            module.fit(tap, labels)

    def forward(self, features: Sequence[Tensor]) -> Tensor:
        """Reduced features, one (N, D) per tap, to the squared distance to the nearest class, all taps summed, (N, 1)."""
        whitened = torch.cat([module.whiten(tap) for module, tap in zip(self._taps, features, strict=True)], dim=1)
        means = torch.cat([module.centred_means for module in self._taps], dim=1)
        # ‖x − m‖² = ‖x‖² + (‖m‖² − 2 x·m): one matrix product instead of a difference per class.
        nearest = F.linear(whitened, -2 * means, means.square().sum(dim=1)).amin(dim=1, keepdim=True)
        return whitened.square().sum(dim=1, keepdim=True) + nearest

    def by_tap(self, features: Sequence[Tensor]) -> Tensor:
        """Squared distances (N, T, K) for T taps and K classes."""
        return torch.stack([module(tap) for module, tap in zip(self._taps, features, strict=True)], dim=1)

    @property
    def _taps(self) -> list[TapDensity]:
        return [cast(TapDensity, module) for module in self.taps]


def unit_rows(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """Each row (N, D) divided by its length, as `TapDensity.whiten` does it."""
    return np.asarray(rows / np.maximum(np.sqrt((rows**2).sum(axis=1, keepdims=True)), MIN_LENGTH))
