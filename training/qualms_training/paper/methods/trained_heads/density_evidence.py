"""Evidence from density: α = 1 + n(x) · p(x), where n(x) decreases with the distance from the training data alone."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import softmax

from qualms_training.meta.density import Density
from qualms_training.meta.surprisal import Surprisal
from qualms_training.paper.inputs import BaseOutputs, PostHocInputs
from qualms_training.paper.method import MethodOutput, PostHocMethod
from qualms_training.paper.methods.score_functions import dirichlet_output

COUNTS = np.geomspace(1.0, 1e6, 61)
"""candidates for N"""


@dataclass
class DensityEvidence(PostHocMethod):
    """p is the base's softmax, n = N · P(distance ≥ d(x)), and N maximises the likelihood of the fit labels."""

    def fit(self, inputs: PostHocInputs) -> int:
        """Fit the density on the training images, and N on the fit split."""
        taps, fit = inputs.train.outputs.features.taps, inputs.fit
        self.density = Density([tap.shape[1] for tap in taps], inputs.classes)
        self.density.fit([np.asarray(tap, dtype=np.float32) for tap in taps], inputs.train.labels)
        distances = self._distances(fit.outputs)
        self.surprisal = Surprisal(1, len(distances))
        self.surprisal.fit(distances[:, None])
        probabilities = softmax(fit.outputs.logits, axis=1)
        self.count = best_count(probabilities, self._shares(distances), fit.labels)
        return 1 + sum(tensor.numel() for tensor in (*self.density.buffers(), *self.surprisal.buffers()))

    def score(self, outputs: BaseOutputs) -> MethodOutput:
        """The base's classes and all scores of the Dirichlet distribution."""
        evidence = self.count * self._shares(self._distances(outputs))
        log_alpha = np.log1p(evidence[:, None] * softmax(outputs.logits, axis=1))
        return MethodOutput(outputs.predictions, dirichlet_output(torch.from_numpy(log_alpha)).scores)

    def _distances(self, outputs: BaseOutputs) -> NDArray[np.float64]:
        """Distance from the training data, (N,)."""
        taps = [torch.from_numpy(np.asarray(tap, dtype=np.float32)) for tap in outputs.features.taps]
        with torch.inference_mode():
            return np.asarray(self.density(taps).squeeze(1).double().numpy())

    def _shares(self, distances: NDArray[np.float64]) -> NDArray[np.float64]:
        """Share of fit images that are at least as far from the training data, (N,)."""
        return np.asarray(torch.exp(-self.surprisal(torch.from_numpy(distances[:, None]))).squeeze(1).numpy())


def best_count(probabilities: NDArray[np.float64], shares: NDArray[np.float64], labels: NDArray[np.int64]) -> float:
    """The N that maximises the likelihood of labels (N,) under the mean of Dir(1 + N · share · p)."""
    chosen = probabilities[np.arange(len(labels)), labels]
    evidence = COUNTS[:, None] * shares
    likelihood = np.log((1 + evidence * chosen) / (probabilities.shape[1] + evidence)).mean(axis=1)
    return float(COUNTS[likelihood.argmax()])
