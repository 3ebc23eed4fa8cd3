"""What a bundle doubts by beside its Dirichlet: the distance from the training data, and one score fused from all."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from training.density import Density
from training.fusion import Fusion


class Doubter(nn.Module):
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
