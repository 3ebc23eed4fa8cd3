"""Scores of class probabilities that several methods share."""

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_softmax


def softmax_scores(logits: NDArray[np.float64]) -> dict[str, NDArray[np.float64]]:
    """Entropy and 1 − max probability of softmax(logits), (N, K) to (N,) each, without cancellation."""
    logs = log_softmax(logits, axis=1)
    return probability_scores(np.exp(logs), logs)


def probability_scores(
    probabilities: NDArray[np.float64], logs: NDArray[np.float64] | None = None
) -> dict[str, NDArray[np.float64]]:
    """The same of probabilities (N, K)."""
    if logs is None:
        logs = np.log(np.maximum(probabilities, np.finfo(np.float64).tiny))
    others = probabilities.copy()
    others[np.arange(len(others)), others.argmax(axis=1)] = 0.0
    return {"entropy": -(probabilities * logs).sum(axis=1), "max_probability": others.sum(axis=1)}
