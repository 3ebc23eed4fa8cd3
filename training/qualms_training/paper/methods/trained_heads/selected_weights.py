"""The flag score of earlier bundles: a weighted sum of surprisals whose weights were selected by noisy copies.

The weights are learned on the fit split, so that noisy copies of its images, and the images that are misclassified, get a
higher sum than the others; no OOD set is used. The method is ensemble selection with replacement (Caruana et al., ICML
2004). The equal sum of `qualms_training.meta.flag_score` has replaced it: it is as good and has nothing to select.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import rankdata

from qualms_training.data.noise import NOISES
from qualms_training.meta.density import Density
from qualms_training.meta.dirichlet import dirichlet_scores
from qualms_training.meta.surprisal import Surprisal
from qualms_training.paper.inputs import BaseOutputs, PostHocInputs
from qualms_training.paper.method import MethodOutput, NoiseChains
from qualms_training.paper.methods.score_functions import softmax_scores
from qualms_training.paper.methods.trained_heads.dirichlet_meta import DirichletMeta, OnMetaModel
from qualms_training.paper.noise_merit import ERRORS, merit
from qualms_training.recipe import Recipe

ROUNDS = 12
MIN_ERRORS = 10
"""smallest number of wrong predictions, and of correct ones, with which the separation of errors is measured"""

Array = NDArray[np.float64]


@dataclass
class SelectedWeights(OnMetaModel):
    """Base entropy, mutual information of the meta-model, and distances in all taps and in each tap, weighted."""

    def fit_with(self, meta: DirichletMeta, inputs: PostHocInputs) -> int:
        """Fit the density on the training images, and select the weights on the fit split."""
        self.head, self.predicts_by = meta.head, inputs.recipe.prediction
        taps, fit = inputs.train.outputs.features.taps, inputs.fit
        self.density = Density([tap.shape[1] for tap in taps], inputs.classes)
        self.density.fit([np.asarray(tap, dtype=np.float32) for tap in taps], inputs.train.labels)
        scores = self._scores(fit.outputs)
        self.surprisal = Surprisal(scores.shape[1], len(scores))
        self.surprisal.fit(scores)
        noisy = {kind: self._surprisals(outputs) for kind, outputs in inputs.noisy_fit().items()}
        wrong = self._predictions(fit.outputs) != fit.labels
        self.weights = select(SelectionData(self._surprisals(fit.outputs), wrong, noisy))
        return sum(tensor.numel() for tensor in (*self.density.buffers(), *self.surprisal.buffers()))

    def seen_noise(self, recipe: Recipe, score: str) -> NoiseChains:
        """Every noise, because the weights are selected by them, and the meta-model's stopping noise."""
        return [*DirichletMeta().seen_noise(recipe, score), *([kind] for kind in NOISES)]

    def score(self, outputs: BaseOutputs) -> MethodOutput:
        """The served classes and the weighted sum."""
        return MethodOutput(self._predictions(outputs), {"fused": self._surprisals(outputs) @ self.weights})

    def _predictions(self, outputs: BaseOutputs) -> NDArray[np.int64]:
        """Classes of the network that predicts, (N,)."""
        return outputs.predictions if self.predicts_by == "base" else self.head(outputs).argmax(dim=1).numpy()

    def _scores(self, outputs: BaseOutputs) -> Array:
        """The scores that are summed, (N, J)."""
        taps = [torch.from_numpy(np.asarray(tap, dtype=np.float32)) for tap in outputs.features.taps]
        with torch.inference_mode():
            information = dirichlet_scores(self.head(outputs)).mutual_information.double().numpy()
            distances = torch.cat(
                [
                    self.density.by_tap([tap[start : start + 4096] for tap in taps])
                    for start in range(0, len(outputs), 4096)
                ]
            )
        entropy = softmax_scores(outputs.logits)["entropy"]
        nearest = distances.sum(dim=1).amin(dim=-1)
        return np.column_stack([entropy, information, nearest.numpy(), distances.amin(dim=-1).numpy()])

    def _surprisals(self, outputs: BaseOutputs) -> Array:
        return np.asarray(self.surprisal(torch.from_numpy(self._scores(outputs))).numpy())


@dataclass(frozen=True)
class SelectionData:
    """Surprisals of the fit split, from which weights are selected."""

    clean: Array
    """(N, J) of the images"""
    wrong: NDArray[np.bool_]
    """(N,) whether the image is misclassified"""
    noisy: Mapping[str, Array]
    """(M, J) of noisy copies, by kind of noise"""

    def pairs(self) -> dict[str, tuple[Array, Array]]:
        """By kind of noise, and for errors: the negatives and the positives to separate, (n, J) each."""
        pairs = {kind: (self.clean, noisy) for kind, noisy in self.noisy.items()}
        if MIN_ERRORS <= self.wrong.sum() <= len(self.wrong) - MIN_ERRORS:
            pairs[ERRORS] = (self.clean[~self.wrong], self.clean[self.wrong])
        return pairs


def select(data: SelectionData, rounds: int = ROUNDS) -> Array:
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


def aurocs(data: SelectionData, weights: Array) -> dict[str, float]:
    """AUROC of the weighted sum by kind, in percent."""
    return {
        kind: auroc(negatives @ weights, positives @ weights) for kind, (negatives, positives) in data.pairs().items()
    }


def auroc(negatives: Array, positives: Array) -> float:
    """AUROC in percent, from ranks, which takes a tenth of the time of a whole ROC curve."""
    ranks = rankdata(np.concatenate([negatives, positives]))
    n, m = len(negatives), len(positives)
    return 100 * float((ranks[n:].sum() - m * (m + 1) / 2) / (n * m))
