"""The served α: α(x) = 1 + n(x) · p(x), with the classifier's own class probabilities and evidence from the flag score.

The optimum of the paper's objective is α = 1 + η(x)/λ. Its mean is shrunk towards the uniform distribution, and OOD images
get as much evidence as training images unless the network happens to extrapolate otherwise. Here p(x) is the softmax of the
network that predicts, with one temperature that maximises the likelihood of the fit split, and the evidence is

    n(x) = N · share(x) + MIN_EVIDENCE,

where share(x) is the share of in-distribution images whose flag score is at least as large, with an exponential tail
(`surprisal.py`). So α / α_0 is calibrated, the largest α belongs to the predicted class, and the epistemic scores follow the
flag score. N is a scale: labels determine only the mean of α. It is large enough that the shrinkage by the 1 in α costs at
most (K/N) · log(1 + N/K), which is 0.001 nats.
"""

import math

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax
from torch import Tensor, nn

from qualms_training.meta.surprisal import Surprisal

EVIDENCE_PER_CLASS = 1e4
"""N / K"""
MIN_EVIDENCE = 0.05
"""lower limit of n: with it, the largest α is also the largest in float32"""
MIN_WIDTH = 1e-4
"""difference of two flag scores that rounding can cause; quantiles that are as close as this count as equal"""
TEMPERATURES = (0.05, 20.0)
"""range in which the temperature is searched"""


class JoinedAlpha(nn.Module):
    """Logits (N, K) of the network that predicts and flag scores (N, 1) to α (N, K) and its sum (N, 1), in float64."""

    inverse_temperature: Tensor
    """()"""

    def __init__(self, classes: int, fit_images: int) -> None:
        super().__init__()
        self.log_scale = math.log(EVIDENCE_PER_CLASS * classes)
        self.surprisal = Surprisal(1, fit_images)
        self.register_buffer("inverse_temperature", torch.ones((), dtype=torch.float64))

    def fit(self, logits: NDArray[np.float32], labels: NDArray[np.int64], flag_scores: NDArray[np.float64]) -> None:
        """Learn temperature and distribution of the flag score from N images of the fit split."""
        self.inverse_temperature.fill_(1 / temperature(logits, labels))
        self.surprisal.fit(flag_scores[:, None], MIN_WIDTH)

    def forward(self, logits: Tensor, flag_scores: Tensor) -> tuple[Tensor, Tensor]:
        """α = 1 + n p, and α_0 = K + n."""
        p = (logits * self.inverse_temperature).softmax(dim=-1)
        evidence = torch.exp(self.surprisal.minus(flag_scores, self.log_scale)) + MIN_EVIDENCE
        return 1.0 + evidence * p, logits.shape[-1] + evidence


def temperature(logits: NDArray[np.float32], labels: NDArray[np.int64]) -> float:
    """The T that minimises the negative log-likelihood of softmax(logits / T), logits (N, K), labels (N,)."""

    def loss(log_temperature: float) -> float:
        scaled = log_softmax(logits.astype(np.float64) / math.exp(log_temperature), axis=1)
        return -float(scaled[np.arange(len(labels)), labels].mean())

    lowest, highest = (math.log(value) for value in TEMPERATURES)
    return math.exp(minimize_scalar(loss, bounds=(lowest, highest), method="bounded").x)
