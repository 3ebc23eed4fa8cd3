"""Doubts made comparable: each becomes the surprise −log p of a value so large among in-distribution images.

p is the share of fit images that are at least as doubtful. Between quantiles of these the map is linear, and beyond
the last of them it goes on as an exponential tail does, so that it never saturates: a stranger far outside is more
surprising than one at the edge. In the graph that is a few vectorised nodes for all doubts together.
"""

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from qualms_training.errors import DataError

LEAST = 16
"""images beyond the last quantile: fewer would place it by chance"""


class Surprisal(nn.Module):
    """J doubts, (N, J), to as many surprises in nats."""

    knots: Tensor
    """(J, Q) quantiles of the fit images, ascending; half of those beyond one lie beyond the next"""
    slopes: Tensor
    """(J, Q) of the segment that begins at a knot; the last has no end"""

    def __init__(self, doubts: int, images: int) -> None:
        super().__init__()
        if images < 2 * LEAST:
            raise DataError(f"The fit split has {images} images; to combine scores it needs {2 * LEAST} or more.")
        count = 1 + int(math.log2(images / LEAST))
        self.register_buffer("knots", torch.zeros(doubts, count))
        self.register_buffer("slopes", torch.zeros(doubts, count))

    def fit(self, doubts: NDArray[np.float64]) -> None:
        """Place the quantiles by the doubts of in-distribution images, (N, J)."""
        count = self.knots.shape[1]
        knots = np.quantile(doubts, 1 - 0.5 ** np.arange(count), axis=0).T
        widths = np.diff(knots, axis=1)
        inner = np.divide(math.log(2), widths, out=np.zeros_like(widths), where=widths > 0)
        # The mean excess of an exponential tail is the inverse of its rate; one quantile earlier there are twice as many.
        excess = [values[values >= start].mean() - start for values, start in zip(doubts.T, knots[:, -2], strict=True)]
        outer = np.array([1 / value if value > 0 else 1.0 for value in excess])
        self.knots.copy_(torch.from_numpy(knots))
        self.slopes.copy_(torch.from_numpy(np.column_stack([inner, outer])))

    def forward(self, doubts: Tensor) -> Tensor:
        """(N, J) to (N, J): 0 for what is as certain as the most certain of the fit images."""
        ends = torch.cat([self.knots[:, 1:], torch.full_like(self.knots[:, :1], torch.inf)], dim=1)
        reached = (doubts.unsqueeze(-1) - self.knots).clamp(min=0).minimum(ends - self.knots)
        return (reached * self.slopes).sum(dim=-1)
