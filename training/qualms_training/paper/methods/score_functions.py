"""Classes and uncertainty scores from logits, class probabilities or Dirichlet parameters."""

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_softmax
from torch import Tensor

from qualms.bundle.scores import SCORES, as_uncertainty
from qualms_training.meta.dirichlet import dirichlet_scores
from qualms_training.paper.method import MethodOutput

PAPER_SCORES = ("entropy", "mutual_information", "differential_entropy", "precision")
"""the fifth, max_probability, is computed without cancellation in `dirichlet_output`"""


def dirichlet_output(log_alpha: Tensor) -> MethodOutput:
    """The class with the largest α and the paper's five scores, from log α (N, K)."""
    values = dirichlet_scores(log_alpha)
    uncertainty = {name: as_uncertainty(getattr(values, name).numpy(), SCORES[name].direction) for name in PAPER_SCORES}
    uncertainty["max_probability"] = values.error_probability.double().numpy()
    return MethodOutput(log_alpha.argmax(dim=1).numpy(), dict(uncertainty))


def softmax_output(logits: Tensor) -> MethodOutput:
    """The class with the largest logit and the two scores of the softmax, from logits (N, K)."""
    return MethodOutput(logits.argmax(dim=1).numpy(), dict(softmax_scores(logits.double().numpy())))


def softmax_scores(logits: NDArray[np.float64]) -> dict[str, NDArray[np.float64]]:
    """Entropy and 1 − max probability of softmax(logits), (N, K) to (N,) each, without cancellation."""
    logs = log_softmax(logits, axis=1)
    return probability_scores(np.exp(logs), logs)


def probability_scores(
    probabilities: NDArray[np.float64], logs: NDArray[np.float64] | None = None
) -> dict[str, NDArray[np.float64]]:
    """Entropy and 1 − max probability of probabilities (N, K), (N,) each; `logs` are their logarithms, if known."""
    if logs is None:
        logs = np.log(np.maximum(probabilities, np.finfo(np.float64).tiny))
    others = probabilities.copy()
    others[np.arange(len(others)), others.argmax(axis=1)] = 0.0
    return {"entropy": -(probabilities * logs).sum(axis=1), "max_probability": others.sum(axis=1)}
