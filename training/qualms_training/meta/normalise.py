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
        """The result stays channels-last in memory, which convolutions on a CPU like best.

        Pixels are permuted first: ONNX Runtime multiplies rows of pixels by one number far quicker than each pixel by
        three.
        """
        planes = images.permute(0, 3, 1, 2).float()
        return planes * self.scale[:, None, None] - self.shift[:, None, None]
