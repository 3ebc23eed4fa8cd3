"""One flag score out of several doubts: a weighted sum of their surprises, the weights learned on the fit split.

The doubts are made comparable by in-distribution images (`surprise.py`). The weights are chosen so that noisy copies
of those images, and those of them that are misclassified, stand out: no stranger set is ever seen. They are found by ensemble
selection with replacement (Caruana et al., ICML 2004), which adds the doubt that helps most, again and again, and so
leaves out what only repeats the others.
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
LEAST_ERRORS = 10
"""fewer wrong predictions than this say nothing about how errors stand out"""

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Shown:
    """What weights are learned from: doubts (N, J) of known images, whether these are misclassified, and of noisy copies."""

    known: Array
    wrong: NDArray[np.bool_]
    noisy: Mapping[str, Array]
    """by kind of noise"""

    def kinds(self) -> dict[str, tuple[Array, Array]]:
        """Pairs that should be told apart, the unremarkable first, each (n, J)."""
        found = {kind: (self.known, strange) for kind, strange in self.noisy.items()}
        if LEAST_ERRORS <= self.wrong.sum() <= len(self.wrong) - LEAST_ERRORS:
            found[ERRORS] = (self.known[~self.wrong], self.known[self.wrong])
        return found


class Fusion(nn.Module):
    """J doubts (N, J) to one (N,)."""

    weights: Tensor
    """(J,), not negative, of sum 1"""

    def __init__(self, doubts: int, images: int) -> None:
        super().__init__()
        self.surprise = Surprisal(doubts, images)
        self.register_buffer("weights", torch.full((doubts,), 1 / doubts))

    def fit(self, shown: Shown) -> dict[str, float]:
        """Learn from the fit split; the AUROC by kind that the weights reach there, in percent."""
        self.surprise.fit(shown.known)
        mapped = Shown(
            self._surprises(shown.known),
            shown.wrong,
            {kind: self._surprises(found) for kind, found in shown.noisy.items()},
        )
        weights = select(mapped)
        self.weights.copy_(torch.from_numpy(weights))
        return aurocs(mapped, weights)

    @torch.inference_mode()
    def _surprises(self, doubts: Array) -> Array:
        return np.asarray(self.surprise(torch.from_numpy(doubts).float()).double().numpy())

    def forward(self, doubts: Tensor) -> Tensor:
        """The weighted sum of surprises."""
        surprises: Tensor = self.surprise(doubts)
        return (surprises * self.weights).sum(dim=-1)


def select(shown: Shown, rounds: int = ROUNDS) -> Array:
    """Weights (J,) of the sum with the best merit that `rounds` additions reach; the smallest such sum."""
    counts = np.zeros(shown.known.shape[1])
    best, best_merit = counts, -np.inf
    for _ in range(rounds):
        trials = [counts + step for step in np.eye(len(counts))]
        merits = [merit(aurocs(shown, trial).values()) for trial in trials]
        counts = trials[int(np.argmax(merits))]
        if max(merits) > best_merit:
            best, best_merit = counts, max(merits)
    return np.asarray(best / best.sum())


def merit(by_kind: Iterable[float]) -> float:
    """What is wanted of a score, from its AUROC by kind: that it tells all apart, the hardest included."""
    values = list(by_kind)
    return float(np.mean(values) + np.min(values)) / 2


def aurocs(shown: Shown, weights: Array) -> dict[str, float]:
    """How well the weighted sum tells each kind apart, in percent."""
    return {kind: auroc(usual @ weights, odd @ weights) for kind, (usual, odd) in shown.kinds().items()}


def auroc(negatives: Array, positives: Array) -> float:
    """In percent; by ranks, a tenth of the time that a whole curve takes."""
    ranks = rankdata(np.concatenate([negatives, positives]))
    n, m = len(negatives), len(positives)
    return 100 * float((ranks[n:].sum() - m * (m + 1) / 2) / (n * m))
