"""Pixels to network input, as the first nodes of the graph, so that no caller can get it wrong."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class Normalise(nn.Module):
    """uint8 images (N, H, W, C) to float32 (N, C, H, W): (x / 255 − mean) / std."""

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        scale = 1.0 / (255.0 * torch.tensor(std, dtype=torch.float64))
        shift = torch.tensor(mean, dtype=torch.float64) / torch.tensor(std, dtype=torch.float64)
        self.scale: Tensor
        self.shift: Tensor
        self.register_buffer("scale", scale.float())
        self.register_buffer("shift", shift.float())

    def forward(self, images: Tensor) -> Tensor:
        """The permuted result is channels-last in memory, which convolutions on a CPU like best."""
        return (images.float() * self.scale - self.shift).permute(0, 3, 1, 2)
