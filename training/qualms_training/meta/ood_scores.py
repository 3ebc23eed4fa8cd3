"""The scores that come from the base's features: the distance from the training data, and one score fused from all."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from qualms_training.meta.density import Density
from qualms_training.meta.fusion import Fusion

ROWS = 4096
"""rows per batch when arrays are scored"""


class OodScores(nn.Module):
    """Logits, mutual information and reduced taps of N images to distance and fused score, (N,) each."""

    def __init__(self, widths: Sequence[int], classes: int, fit_images: int) -> None:
        super().__init__()
        self.density = Density(widths, classes)
        self.fusion = Fusion(len(self.names(len(widths))), fit_images)

    @staticmethod
    def names(taps: int) -> list[str]:
        """Names of the scores that are fused, in the order of the fusion's weights."""
        return ["base_entropy", "mutual_information", "distance", *(f"distance of tap {tap}" for tap in range(taps))]

    def components(self, logits: Tensor, mutual_information: Tensor, taps: Sequence[Tensor]) -> Tensor:
        """The scores that are fused, (N, J), larger for more uncertain images."""
        distances = self.density(taps)
        log_probabilities = logits.double().log_softmax(dim=-1)  # float32 would round the entropy of certain images
        entropy = -(log_probabilities.exp() * log_probabilities).sum(dim=-1).float()
        nearest = distances.sum(dim=1).amin(dim=-1)  # all taps summed, then the nearest class
        return torch.cat([torch.stack([entropy, mutual_information, nearest], dim=1), distances.amin(dim=-1)], dim=1)

    def forward(self, logits: Tensor, mutual_information: Tensor, taps: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Distance and fused score."""
        components = self.components(logits, mutual_information, taps)
        return components[:, 2], self.fusion(components)

    @torch.inference_mode()
    def all_components(
        self, logits: NDArray[np.float32], mutual_information: Tensor, taps: Sequence[NDArray[Any]]
    ) -> NDArray[np.float64]:
        """`components` of arrays that may be memory-mapped, computed in batches."""
        parts = []
        for start in range(0, len(logits), ROWS):
            rows = slice(start, start + ROWS)
            tensors = [torch.from_numpy(np.array(values[rows], dtype=np.float32)) for values in (logits, *taps)]
            parts.append(self.components(tensors[0], mutual_information[rows].float(), tensors[1:]))
        return torch.cat(parts).double().numpy()
