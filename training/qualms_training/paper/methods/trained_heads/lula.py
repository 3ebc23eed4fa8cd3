"""LULA (Kristiadi et al., "Learnable Uncertainty under Laplace Approximations", UAI 2021), at the last layer.

LULA adds extra units to the penultimate feature whose weights to the logits are zero, so predictions do not change. A
Laplace posterior gives these weights a variance, and the units are trained to make it large for outliers and small for
in-distribution images.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from qualms_training.paper.inputs import BaseOutputs, PostHocInputs
from qualms_training.paper.method import MethodOutput, NoiseChains, PostHocMethod
from qualms_training.paper.methods.score_functions import probability_scores
from qualms_training.recipe import Count, Positive, Recipe

BATCH = 128
ROWS = 2048
"""images scored at once"""


@dataclass
class LULA(PostHocMethod):
    """A Kronecker-factored last-layer Laplace approximation on features with learned extra units."""

    units: Count = 256
    """number of extra units"""
    epochs: Count = 10
    lr: Positive = 0.1
    """learning rate of Adam"""
    images: Count = 2000
    """number of validation images, and of outliers, that the units are trained on"""
    training_samples: Count = 10
    """samples of the diagonal posterior, in training"""
    samples: Count = 20
    """samples of the Kronecker posterior, in scoring"""

    def fit(self, inputs: PostHocInputs) -> int:
        """Train the units, then approximate the posterior of the last layer."""
        classes, width = inputs.head.weight.shape
        self.generator = torch.Generator().manual_seed(inputs.seed)
        self.incoming = _normal((width + 1, self.units), self.generator) / width**0.5
        bias = torch.from_numpy(inputs.head.bias)[:, None]
        weight = torch.from_numpy(inputs.head.weight)
        self.mean = torch.cat([weight, torch.zeros(classes, self.units, dtype=torch.float64), bias], dim=1)
        count = len(inputs.train.labels)
        prior = max(inputs.recipe.base.weight_decay * count, 1.0)
        self._train_units(inputs, count, prior)
        features = self.features(_penultimate(inputs.train.outputs))
        posterior = KroneckerPosterior.fit(features, (features @ self.mean.T).softmax(dim=1), prior)
        self.weights = self.mean + posterior.samples(self.samples, self.generator)
        return int(self.incoming.numel() + self.weights.numel())

    def seen_noise(self, recipe: Recipe, score: str) -> NoiseChains:
        """The outliers, which are the recipe's noisy copies of validation images."""
        return recipe.meta.stop_noise

    def score(self, outputs: BaseOutputs) -> MethodOutput:
        """Class and scores of the mean probabilities over the weight samples."""
        parts = [
            (self.features(rows) @ self.weights.mT).softmax(dim=-1).mean(dim=0)
            for rows in torch.split(_penultimate(outputs), ROWS)
        ]
        probabilities = torch.cat(parts).numpy()
        return MethodOutput(probabilities.argmax(axis=1), dict(probability_scores(probabilities)))

    def features(self, penultimate: Tensor) -> Tensor:
        """(N, D) to (N, D + units + 1): the penultimate feature, the extra units, and 1 for the bias."""
        one = torch.ones(len(penultimate), 1, dtype=penultimate.dtype)
        extra = (torch.cat([penultimate, one], dim=1) @ self.incoming).relu()
        return torch.cat([penultimate, extra, one], dim=1)

    def _train_units(self, inputs: PostHocInputs, count: int, prior: float) -> None:
        clean = _random_rows(_penultimate(inputs.validation.outputs), self.images, self.generator)
        copies = torch.cat([_penultimate(outputs) for outputs in inputs.noisy_validation])
        outliers = _random_rows(copies, self.images, self.generator)
        steps = min(len(clean), len(outliers)) // BATCH or 1
        self.incoming.requires_grad_(True)
        adam = torch.optim.Adam([self.incoming], lr=self.lr)
        for _ in range(self.epochs):
            orders = [torch.randperm(len(rows), generator=self.generator) for rows in (clean, outliers)]
            for step in range(steps):
                part = slice(step * BATCH, (step + 1) * BATCH)
                loss = self._loss(clean[orders[0][part]], outliers[orders[1][part]], count, prior)
                adam.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                adam.step()
        self.incoming = self.incoming.detach()

    def _loss(self, clean: Tensor, outliers: Tensor, count: int, prior: float) -> Tensor:
        """Mean entropy of clean images minus that of outliers, under samples of the diagonal posterior."""
        clean_features, outlier_features = self.features(clean), self.features(outliers)
        p = (clean_features @ self.mean.T).softmax(dim=1)
        curvature = count * (p * (1 - p)).T @ clean_features.square() / len(clean_features) + prior
        noise = _normal((self.training_samples, *self.mean.shape), self.generator)
        weights = self.mean + noise / curvature.sqrt()
        return _entropy(clean_features, weights) - _entropy(outlier_features, weights)


@dataclass(frozen=True)
class KroneckerPosterior:
    """A zero-mean Gaussian over weights (K, F) with precision n · G ⊗ A + prior · I, stored by eigenvectors."""

    output_vectors: Tensor
    """eigenvectors of G, (K, K)"""
    input_vectors: Tensor
    """eigenvectors of A, (F, F)"""
    precision: Tensor
    """in the eigenbasis, (K, F)"""

    @classmethod
    def fit(cls, inputs: Tensor, probabilities: Tensor, prior: float) -> "KroneckerPosterior":
        """A = mean of x xᵀ over inputs (N, F); G = mean of diag(p) − p pᵀ over probabilities (N, K)."""
        count = len(inputs)
        outer = probabilities.T @ probabilities / count
        g_values, g_vectors = torch.linalg.eigh(torch.diag(probabilities.mean(dim=0)) - outer)
        a_values, a_vectors = torch.linalg.eigh(inputs.T @ inputs / count)
        precision = count * torch.outer(g_values.clamp(min=0), a_values.clamp(min=0)) + prior
        return cls(g_vectors, a_vectors, precision)

    def samples(self, count: int, generator: torch.Generator) -> Tensor:
        """Samples of the weights, (count, K, F)."""
        noise = _normal((count, *self.precision.shape), generator) / self.precision.sqrt()
        return torch.matmul(torch.matmul(self.output_vectors, noise), self.input_vectors.T)


def _entropy(features: Tensor, weights: Tensor) -> Tensor:
    p = (features @ weights.mT).softmax(dim=-1).mean(dim=0)
    entropy: Tensor = -torch.special.xlogy(p, p).sum(dim=1).mean()
    return entropy


def _penultimate(outputs: BaseOutputs) -> Tensor:
    return torch.from_numpy(outputs.penultimate.astype(np.float64))


def _random_rows(rows: Tensor, count: int, generator: torch.Generator) -> Tensor:
    return rows[torch.randperm(len(rows), generator=generator)[:count]]


def _normal(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)
