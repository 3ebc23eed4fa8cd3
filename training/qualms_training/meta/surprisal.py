"""Surprisal: uncertainty scores as −log p, where p is the share of in-distribution images with a score at least as large.

The distribution is that of the fit images. The map is linear between their quantiles and continues beyond both ends: above
the last quantile as for an exponential tail, so that an OOD image far outside has a larger surprisal than one at the edge,
and a little below the smallest score, so that test images there do not share one value. Written as a sum of ramps, it is
two matrix products and one ReLU for all scores together.
"""

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from qualms_training.errors import DataError

MIN_TAIL = 16
"""fit images beyond the last quantile; with fewer, its position would be mostly chance"""
REACH = 1.0
"""how far the first segment continues below the smallest score, relative to its width: a term can take at most 0.7 nats off
a sum, so that no score that is extremely low hides another that is high"""


class Surprisal(nn.Module):
    """J scores, (N, J), to J surprisals in nats, (N, J), in float64."""

    knots: Tensor
    """(J·Q,) starts of the ramps: for each score one below its smallest value, then its quantiles"""
    slopes: Tensor
    """(J, J·Q) by how much each ramp changes the slope of each score's map"""
    offsets: Tensor
    """(J,) subtracted, so that the map is 0 at the smallest score of the fit images"""
    copies: Tensor
    """(J·Q, J) of zeros and ones: copies each score to its ramps"""

    def __init__(self, scores: int, images: int) -> None:
        super().__init__()
        if images < 2 * MIN_TAIL:
            raise DataError(f"The fit split has {images} images; to combine scores it needs {2 * MIN_TAIL} or more.")
        count = 1 + int(math.log2(images / MIN_TAIL))
        self.register_buffer("knots", torch.zeros(scores * count, dtype=torch.float64))
        self.register_buffer("slopes", torch.zeros(scores, scores * count, dtype=torch.float64))
        self.register_buffer("offsets", torch.zeros(scores, dtype=torch.float64))
        copies = torch.eye(scores, dtype=torch.float64).repeat_interleave(count, dim=0)
        self.register_buffer("copies", copies, persistent=False)

    def fit(self, scores: NDArray[np.float64], min_width: float = 0.0) -> None:
        """Set the ramps from the scores of in-distribution images, (N, J).

        Quantiles that differ by at most `min_width` count as equal, because a steep map amplifies rounding errors.
        """
        count = len(self.knots) // scores.shape[1]
        # Half of the images beyond a quantile are beyond the next one.
        knots = np.quantile(scores, 1 - 0.5 ** np.arange(count), axis=0).T
        widths = np.diff(knots, axis=1)
        inner = np.divide(math.log(2), widths, out=np.zeros_like(widths), where=widths > min_width)
        # The rate of an exponential tail is one over its mean excess. It is measured from the last knot but one, which
        # has twice as many images beyond it as the last.
        excess = [values[values >= start].mean() - start for values, start in zip(scores.T, knots[:, -2], strict=True)]
        outer = np.array([1 / value if value > min_width else 1.0 for value in excess])
        segments = np.column_stack([inner, outer])
        reach = REACH * widths[:, 0]
        starts = np.column_stack([knots[:, 0] - reach, knots[:, 1:]])
        changes = np.diff(segments, axis=1, prepend=0.0)
        self.knots.copy_(torch.from_numpy(starts.ravel()))
        self.slopes.copy_(self.copies.T * torch.from_numpy(changes.ravel()))
        self.offsets.copy_(torch.from_numpy(segments[:, 0] * reach))

    def forward(self, scores: Tensor) -> Tensor:
        """(N, J) to (N, J); negative below the smallest score of the fit images."""
        return F.linear(self.ramps(scores), self.slopes, -self.offsets)

    def minus(self, scores: Tensor, constant: float) -> Tensor:
        """`constant` minus the surprisals, (N, J), without another node in the graph."""
        return F.linear(self.ramps(scores), -self.slopes, self.offsets + constant)

    def ramps(self, scores: Tensor) -> Tensor:
        """(N, J) to (N, J·Q): how far each score is beyond each knot."""
        return F.relu(F.linear(scores, self.copies, -self.knots))
