"""Surprisal: uncertainty scores as −log p, where p is the share of in-distribution images with a score at least as large.

The distribution is that of the fit images. The map is linear between their quantiles and continues beyond the last one
as for an exponential tail. It never saturates, so an OOD image far outside has a larger surprisal than one at the edge.
In the graph, it takes a few vectorised nodes for all scores together.
"""

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from qualms_training.errors import DataError

MIN_TAIL = 16
"""fit images beyond the last quantile; with fewer, its position would be mostly chance"""


class Surprisal(nn.Module):
    """J scores, (N, J), to J surprisals in nats, (N, J)."""

    knots: Tensor
    """(J, Q) quantiles of the fit images, ascending; half of the images beyond a knot are beyond the next"""
    slopes: Tensor
    """(J, Q) slope of the segment that begins at each knot; the last segment is unbounded"""

    def __init__(self, scores: int, images: int) -> None:
        super().__init__()
        if images < 2 * MIN_TAIL:
            raise DataError(f"The fit split has {images} images; to combine scores it needs {2 * MIN_TAIL} or more.")
        count = 1 + int(math.log2(images / MIN_TAIL))
        self.register_buffer("knots", torch.zeros(scores, count))
        self.register_buffer("slopes", torch.zeros(scores, count))

    def fit(self, scores: NDArray[np.float64]) -> None:
        """Set the quantiles from the scores of in-distribution images, (N, J)."""
        count = self.knots.shape[1]
        knots = np.quantile(scores, 1 - 0.5 ** np.arange(count), axis=0).T
        widths = np.diff(knots, axis=1)
        inner = np.divide(math.log(2), widths, out=np.zeros_like(widths), where=widths > 0)
        # The rate of an exponential tail is one over its mean excess. It is measured from the last knot but one, which
        # has twice as many images beyond it as the last.
        excess = [values[values >= start].mean() - start for values, start in zip(scores.T, knots[:, -2], strict=True)]
        outer = np.array([1 / value if value > 0 else 1.0 for value in excess])
        self.knots.copy_(torch.from_numpy(knots))
        self.slopes.copy_(torch.from_numpy(np.column_stack([inner, outer])))

    def forward(self, scores: Tensor) -> Tensor:
        """(N, J) to (N, J); 0 for scores at or below the smallest of the fit images."""
        ends = torch.cat([self.knots[:, 1:], torch.full_like(self.knots[:, :1], torch.inf)], dim=1)
        reached = (scores.unsqueeze(-1) - self.knots).clamp(min=0).minimum(ends - self.knots)
        return (reached * self.slopes).sum(dim=-1)
