"""What a bundle doubts by beside its Dirichlet: the distance from the training data, and one score fused from all."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from qualms_training.fitting.feature_cache import Features
from qualms_training.meta.density import Density
from qualms_training.meta.fusion import Fusion

ROWS = 4096
"""of features that are looked at at once"""


class OodScores(nn.Module):
    """Logits, mutual information and reduced taps of N images to distance and fused score, (N,) each."""

    def __init__(self, widths: Sequence[int], classes: int, fit_images: int) -> None:
        super().__init__()
        self.density = Density(widths, classes)
        self.fusion = Fusion(len(self.names(len(widths))), fit_images)

    @staticmethod
    def names(taps: int) -> list[str]:
        """The doubts that are fused, in the order of the fusion's weights."""
        return ["base_entropy", "mutual_information", "distance", *(f"distance of tap {tap}" for tap in range(taps))]

    def doubts(self, logits: Tensor, mutual_information: Tensor, features: Sequence[Tensor]) -> Tensor:
        """All that is fused, (N, J)."""
        distances = self.density(features)
        logarithms = logits.double().log_softmax(dim=-1)  # or the entropy of certain images would be rounding
        entropy = -(logarithms.exp() * logarithms).sum(dim=-1).float()
        nearest = distances.sum(dim=1).amin(dim=-1)  # to one class, the same for all taps
        return torch.cat([torch.stack([entropy, mutual_information, nearest], dim=1), distances.amin(dim=-1)], dim=1)

    def forward(self, logits: Tensor, mutual_information: Tensor, features: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Distance and fused score."""
        doubts = self.doubts(logits, mutual_information, features)
        return doubts[:, 2], self.fusion(doubts)

    @torch.inference_mode()
    def all_doubts(self, features: Features, mutual_information: Tensor) -> NDArray[np.float64]:
        """All that is fused, (N, J), of images whose features are cached."""
        parts, cpu = [], torch.device("cpu")
        for start in range(0, len(features.logits), ROWS):
            rows = np.arange(start, min(start + ROWS, len(features.logits)))
            logits = torch.from_numpy(np.asarray(features.logits[rows]))
            parts.append(self.doubts(logits, mutual_information[rows].float(), features.batch(rows, cpu)))
        return torch.cat(parts).double().numpy()
