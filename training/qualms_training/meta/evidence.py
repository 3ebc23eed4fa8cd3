"""Evidence from density: α = 1 + n(x) · p(x), where n(x) decreases with the distance from the training data.

The optimum of the paper's objective is α = 1 + η(x)/λ, which gives OOD images as much evidence as training images unless
the network happens to extrapolate otherwise. Here p(x) is the class distribution of the classifier and
n(x) = N · P(distance ≥ d(x)) is the evidence: N for images as near as the nearest fit image, and none far away. So α, the
mutual information and the precision depend on the distance from the data, and the predicted class does not change.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from qualms_training.meta.surprisal import Surprisal

COUNTS = np.geomspace(1.0, 1e6, 61)
"""candidates for N"""


class DensityEvidence(nn.Module):
    """Class probabilities (N, K) and distances (N,) to z = log α (N, K), in double precision."""

    count: Tensor
    """N, the evidence for an image amid the training data"""

    def __init__(self, images: int) -> None:
        super().__init__()
        self.surprisal = Surprisal(1, images)
        self.register_buffer("count", torch.ones((), dtype=torch.float64))

    def fit(
        self, probabilities: NDArray[np.float64], distances: NDArray[np.float64], labels: NDArray[np.int64]
    ) -> None:
        """Learn the distribution of distances on the fit split, and the N that maximises the likelihood of its labels."""
        self.surprisal.fit(distances[:, None])
        with torch.inference_mode():
            shares = torch.exp(-self.surprisal(torch.from_numpy(distances[:, None]).float())).double().numpy()
        chosen = probabilities[np.arange(len(labels)), labels]
        evidence = COUNTS[:, None] * shares[:, 0]
        likelihood = np.log((1 + evidence * chosen) / (probabilities.shape[1] + evidence)).mean(axis=1)
        self.count.fill_(float(COUNTS[likelihood.argmax()]))

    def forward(self, probabilities: Tensor, distances: Tensor) -> Tensor:
        """z = log(1 + n p)."""
        evidence = self.count * torch.exp(-self.surprisal(distances.unsqueeze(-1)).double())
        return torch.log(1.0 + evidence * probabilities.double())
