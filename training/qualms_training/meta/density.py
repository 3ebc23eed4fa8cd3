"""Distance of an image's tapped features from the training data, which the Dirichlet's evidence does not contain.

The features of each tap are scaled to unit length. Their Mahalanobis distance to the mean of each class uses one
covariance per tap (Mueller & Hein, "Mahalanobis++", ICML 2025). Early taps detect images of another kind, the last one
detects objects of another class. In the graph, this is one matrix product per tap and one or two for the means of all taps.
"""

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from qualms_training.meta.within_class import WithinClass

MIN_LENGTH = 1e-6
"""smallest length by which a feature is divided"""
MIN_VARIANCE = 1e-7
"""variance of unit features below which a direction contains only rounding errors of the feature cache"""
MAX_FACTOR_SIZE = 200_000
"""elements in a tap's covariance factor; wider taps use only the directions of largest variance"""
MANY_CLASSES = 256
"""number of classes above which the means need more weights than the factors, so that both are made smaller"""
MAX_DIRECTIONS = 128
"""directions of a tap if there are many classes"""
MANY_FACTOR_SIZE = 165_000
"""elements in a tap's factor if there are many classes: all directions of a tap of 1,280 features"""
MEANS_RANK = 64
"""rank of the matrix of the means of all taps if there are many classes"""


class TapDensity(nn.Module):
    """Whitening and class means of one tap."""

    factor: Tensor
    """(R, D); the squared length of factor · u is a squared Mahalanobis distance"""
    means: Tensor
    """(K, R), class means after multiplication by the factor"""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        rank = min(width, max(1, MAX_FACTOR_SIZE // width))
        if classes > MANY_CLASSES:
            rank = min(rank, MAX_DIRECTIONS, max(1, MANY_FACTOR_SIZE // width))
        self.register_buffer("factor", torch.zeros(rank, width))
        self.register_buffer("means", torch.zeros(classes, rank))

    def fit(self, features: NDArray[Any], labels: NDArray[np.int64]) -> None:
        """Fit to training features (N, D), which may be memory-mapped, and labels (N,).

        A class without images, or with one, gets the mean of all.
        """
        rows = WithinClass(features, labels, len(self.means), MIN_LENGTH)
        values, vectors = rows.largest_variances(len(self.factor))
        factor = (vectors / np.sqrt(np.maximum(values, MIN_VARIANCE))).T
        factor[values < MIN_VARIANCE] = 0.0
        whole = np.zeros(self.factor.shape)
        whole[: len(factor)] = factor
        self.factor.copy_(torch.from_numpy(whole))
        self.means.copy_(torch.from_numpy(rows.means @ whole.T))

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

    def fit(self, features: Sequence[NDArray[Any]], labels: NDArray[np.int64]) -> None:
        """Fit to training features, one (N, D) per tap, which may be memory-mapped, and labels (N,)."""
        for module, tap in zip(self._taps, features, strict=True):
            module.fit(tap, labels)
        if self._has_many_classes:
            self._reduce_rank()

    def _reduce_rank(self) -> None:
        """Replace the class means by the nearest ones that fit in MEANS_RANK dimensions of all taps together."""
        ranks = [len(module.factor) for module in self._taps]
        common = torch.cat([module.means.mean(dim=0) for module in self._taps])
        coefficients, directions = self._low_rank_means()
        means = torch.as_tensor(coefficients @ directions + common, dtype=torch.float32)
        for module, part in zip(self._taps, torch.split(means, ranks, dim=1), strict=True):
            module.means.copy_(part)

    def _low_rank_means(self) -> tuple[Tensor, Tensor]:
        """The centred means of all taps (K, ΣR) as a product of (K, r) and (r, ΣR), in float64."""
        left, values, right = torch.linalg.svd(self._centred_means.double(), full_matrices=False)
        rank = min(MEANS_RANK, len(values))
        return left[:, :rank] * values[:rank], right[:rank]

    def folded(self) -> "FoldedDensity":
        """A module that computes the same as `forward` with fewer weights and nodes."""
        means = self._centred_means.double()
        lengths = means.square().sum(dim=1)
        products = [-2 * means]
        if self._has_many_classes:
            coefficients, directions = self._low_rank_means()
            products = [directions, -2 * coefficients]
        return FoldedDensity(
            [(module.factor, -module.means.mean(dim=0)) for module in self._taps],
            [product.float() for product in products],
            lengths.float(),
        )

    def forward(self, features: Sequence[Tensor]) -> Tensor:
        """Reduced features, one (N, D) per tap, to the squared distance to the nearest class, all taps summed, (N, 1)."""
        whitened = torch.cat([module.whiten(tap) for module, tap in zip(self._taps, features, strict=True)], dim=1)
        means = self._centred_means
        # ‖x − m‖² = ‖x‖² + (‖m‖² − 2 x·m): one matrix product instead of a difference per class.
        nearest = F.linear(whitened, -2 * means, means.square().sum(dim=1)).amin(dim=1, keepdim=True)
        return whitened.square().sum(dim=1, keepdim=True) + nearest

    def by_tap(self, features: Sequence[Tensor]) -> Tensor:
        """Squared distances (N, T, K) for T taps and K classes."""
        return torch.stack([module(tap) for module, tap in zip(self._taps, features, strict=True)], dim=1)

    @property
    def _taps(self) -> list[TapDensity]:
        return [cast(TapDensity, module) for module in self.taps]

    @property
    def _centred_means(self) -> Tensor:
        """(K, ΣR)"""
        return torch.cat([module.centred_means for module in self._taps], dim=1)

    @property
    def _has_many_classes(self) -> bool:
        return len(self._taps[0].means) > MANY_CLASSES


class FoldedDensity(nn.Module):
    """The distance as it is computed in the graph."""

    def __init__(self, whitening: Sequence[tuple[Tensor, Tensor]], products: Sequence[Tensor], lengths: Tensor) -> None:
        """`whitening`: factor (R, D) and bias (R,) of each tap; `products`: matrices that map whitened features (N, ΣR) to
        −2 times their products with each class mean; `lengths`: squared lengths of these means, (K,).
        """
        super().__init__()
        for index, (factor, bias) in enumerate(whitening):
            self.register_buffer(f"factor{index}", factor.clone())
            self.register_buffer(f"bias{index}", bias.clone())
        for index, product in enumerate(products):
            self.register_buffer(f"product{index}", product)
        self.register_buffer("lengths", lengths)
        self._taps, self._products = len(whitening), len(products)

    def forward(self, features: Sequence[Tensor]) -> Tensor:
        """Reduced features, one (N, D) per tap, to the squared distance to the nearest class, all taps summed, (N, 1)."""
        whitened = torch.cat([self._whiten(index, feature) for index, feature in enumerate(features)], dim=1)
        classes = whitened
        for index in range(self._products):
            last = index == self._products - 1
            product: Tensor = getattr(self, f"product{index}")
            classes = F.linear(classes, product, cast(Tensor, self.lengths) if last else None)
        return whitened.square().sum(dim=1, keepdim=True) + classes.amin(dim=1, keepdim=True)

    def _whiten(self, index: int, feature: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(feature, dim=1, keepdim=True).clamp(min=MIN_LENGTH)
        return F.linear(feature / length, getattr(self, f"factor{index}"), getattr(self, f"bias{index}"))
