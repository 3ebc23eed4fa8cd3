"""Evidence set by density: α = 1 + n(x) · p(x), where n(x) falls with the distance from the training data.

The paper's objective has its optimum at α = 1 + η(x)/λ: as much evidence for a stranger as for a training image, unless
the network happens to extrapolate otherwise. Here p(x) is the classifier's own opinion and n(x) = N · P(distance ≥ d(x))
the evidence behind it: N where the image is as near as the nearest, none far away. So α, mutual information
and precision themselves say how far from the data an image is, and the class stays what it was.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from qualms_training.meta.surprisal import Surprisal

COUNTS = np.geomspace(1.0, 1e6, 61)
"""what N is chosen from"""


class DensityEvidence(nn.Module):
    """Class probabilities (N, K) and distances (N,) to z = log α (N, K), all in double precision."""

    count: Tensor
    """N, the evidence behind an image that lies amid the training data"""

    def __init__(self, images: int) -> None:
        super().__init__()
        self.surprise = Surprisal(1, images)
        self.register_buffer("count", torch.ones((), dtype=torch.float64))

    def fit(
        self, probabilities: NDArray[np.float64], distances: NDArray[np.float64], labels: NDArray[np.int64]
    ) -> None:
        """From the fit split: how distances are distributed, and the N under which its labels are likeliest."""
        self.surprise.fit(distances[:, None])
        with torch.inference_mode():
            shares = torch.exp(-self.surprise(torch.from_numpy(distances[:, None]).float())).double().numpy()
        chosen = probabilities[np.arange(len(labels)), labels]
        evidence = COUNTS[:, None] * shares[:, 0]
        likelihood = np.log((1 + evidence * chosen) / (probabilities.shape[1] + evidence)).mean(axis=1)
        self.count.fill_(float(COUNTS[likelihood.argmax()]))

    def forward(self, probabilities: Tensor, distances: Tensor) -> Tensor:
        """z = log(1 + n p)."""
        evidence = self.count * torch.exp(-self.surprise(distances.unsqueeze(-1)).double())
        return torch.log(1.0 + evidence * probabilities.double())
