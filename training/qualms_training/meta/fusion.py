"""One flag score from several uncertainty scores: a weighted sum of their surprisals.

The surprisal of a score is relative to in-distribution images (`surprisal.py`), which makes scores comparable. The
weights are learned on the fit split, so that noisy copies of its images, and the images that are misclassified, get a
higher sum than the others; no OOD set is used. The method is ensemble selection with replacement (Caruana et al., ICML
2004): it adds the score that improves the sum most, several times, and so leaves out scores that only repeat others.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import rankdata
from torch import Tensor, nn

from qualms_training.meta.surprisal import Surprisal

ROUNDS = 12
ERRORS = "errors"
MIN_ERRORS = 10
"""smallest number of wrong predictions, and of correct ones, with which the separation of errors is measured"""

Array = NDArray[np.float64]


@dataclass(frozen=True)
class FusionData:
    """Uncertainty scores of the fit split, from which weights are learned."""

    clean: Array
    """(N, J) scores of the images"""
    wrong: NDArray[np.bool_]
    """(N,) whether the image is misclassified"""
    noisy: Mapping[str, Array]
    """(M, J) scores of noisy copies, by kind of noise"""

    def pairs(self) -> dict[str, tuple[Array, Array]]:
        """By kind of noise, and for errors: the negatives and the positives to separate, (n, J) each."""
        pairs = {kind: (self.clean, noisy) for kind, noisy in self.noisy.items()}
        if MIN_ERRORS <= self.wrong.sum() <= len(self.wrong) - MIN_ERRORS:
            pairs[ERRORS] = (self.clean[~self.wrong], self.clean[self.wrong])
        return pairs


class Fusion(nn.Module):
    """J uncertainty scores (N, J) to one (N,)."""

    weights: Tensor
    """(J,), not negative, with sum 1"""

    def __init__(self, scores: int, images: int) -> None:
        super().__init__()
        self.surprisal = Surprisal(scores, images)
        self.register_buffer("weights", torch.full((scores,), 1 / scores))

    def fit(self, data: FusionData) -> dict[str, float]:
        """Learn from the fit split; returns the AUROC by kind, in percent, that the weights reach there."""
        self.surprisal.fit(data.clean)
        noisy = {kind: self._surprisals(scores) for kind, scores in data.noisy.items()}
        surprisals = FusionData(self._surprisals(data.clean), data.wrong, noisy)
        weights = select(surprisals)
        self.weights.copy_(torch.from_numpy(weights))
        return aurocs(surprisals, weights)

    @torch.inference_mode()
    def _surprisals(self, scores: Array) -> Array:
        return np.asarray(self.surprisal(torch.from_numpy(scores).float()).double().numpy())

    def forward(self, scores: Tensor) -> Tensor:
        """The weighted sum of surprisals."""
        surprisals: Tensor = self.surprisal(scores)
        return (surprisals * self.weights).sum(dim=-1)


def select(data: FusionData, rounds: int = ROUNDS) -> Array:
    """Weights (J,) with the best merit among the sums of `rounds` additions; of equal ones, the shortest sum."""
    counts = np.zeros(data.clean.shape[1])
    best, best_merit = counts, -np.inf
    for _ in range(rounds):
        trials = [counts + step for step in np.eye(len(counts))]
        merits = [merit(aurocs(data, trial).values()) for trial in trials]
        counts = trials[int(np.argmax(merits))]
        if max(merits) > best_merit:
            best, best_merit = counts, max(merits)
    return np.asarray(best / best.sum())


def merit(by_kind: Iterable[float]) -> float:
    """Quality of a score from its AUROC by kind: the average of their mean and their minimum."""
    values = list(by_kind)
    return float(np.mean(values) + np.min(values)) / 2


def aurocs(data: FusionData, weights: Array) -> dict[str, float]:
    """AUROC of the weighted sum by kind, in percent."""
    return {
        kind: auroc(negatives @ weights, positives @ weights) for kind, (negatives, positives) in data.pairs().items()
    }


def auroc(negatives: Array, positives: Array) -> float:
    """AUROC in percent, from ranks, which takes a tenth of the time of a whole ROC curve."""
    ranks = rankdata(np.concatenate([negatives, positives]))
    n, m = len(negatives), len(positives)
    return 100 * float((ranks[n:].sum() - m * (m + 1) / 2) / (n * m))
