"""LULA (Kristiadi et al., "Learnable Uncertainty under Laplace Approximations", UAI 2021), at the last layer.

Extra units beside the penultimate feature have no weights to the logits, so no prediction changes; but a Laplace
posterior gives those weights a variance, and the units are trained to make it large off the data and small on it.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from qualms_training.paper.material import Frozen, View
from qualms_training.paper.method import Chains, PostHoc, Verdict
from qualms_training.paper.methods.post_hoc.probability_scores import probability_scores
from qualms_training.recipe import Count, Positive, Recipe

BATCH = 128
ROWS = 2048  # scored at once


@dataclass
class LULA(PostHoc):
    """A Kronecker-factored last-layer Laplace approximation on features with learned extra units."""

    units: Count = 256
    epochs: Count = 10
    lr: Positive = 0.1
    """of Adam"""
    images: Count = 2000
    """validation images, and as many outliers, that the units are trained on"""
    training_samples: Count = 10
    """of the diagonal posterior"""
    samples: Count = 20
    """of the Kronecker posterior"""

    def fit(self, frozen: Frozen) -> int:
        """Train the units, then approximate the posterior of the last layer."""
        classes, width = frozen.head.weight.shape
        self.generator = torch.Generator().manual_seed(frozen.seed)
        self.incoming = _normal((width + 1, self.units), self.generator) / width**0.5
        bias = torch.from_numpy(frozen.head.bias)[:, None]
        weight = torch.from_numpy(frozen.head.weight)
        self.mean = torch.cat([weight, torch.zeros(classes, self.units, dtype=torch.float64), bias], dim=1)
        count = len(frozen.train.labels)
        prior = max(frozen.recipe.base.weight_decay * count, 1.0)
        self._train_units(frozen, count, prior)
        inputs = self.features(_penultimate(frozen.train.view))
        posterior = KroneckerPosterior.fit(inputs, (inputs @ self.mean.T).softmax(dim=1), prior)
        self.weights = self.mean + posterior.samples(self.samples, self.generator)
        return int(self.incoming.numel() + self.weights.numel())

    def seen_noise(self, recipe: Recipe, score: str) -> Chains:
        """Its outliers: the recipe's noisy copies of validation images."""
        return recipe.meta.stop_noise

    def score(self, view: View) -> Verdict:
        """Class and doubts of the mean probabilities over weight samples."""
        parts = [
            (self.features(rows) @ self.weights.mT).softmax(dim=-1).mean(dim=0)
            for rows in torch.split(_penultimate(view), ROWS)
        ]
        probabilities = torch.cat(parts).numpy()
        return Verdict(probabilities.argmax(axis=1), dict(probability_scores(probabilities)))

    def features(self, penultimate: Tensor) -> Tensor:
        """(N, D) to (N, D + units + 1): the feature, the extra units and the bias's 1."""
        one = torch.ones(len(penultimate), 1, dtype=penultimate.dtype)
        extra = (torch.cat([penultimate, one], dim=1) @ self.incoming).relu()
        return torch.cat([penultimate, extra, one], dim=1)

    def _train_units(self, frozen: Frozen, count: int, prior: float) -> None:
        known = _some(_penultimate(frozen.validation.view), self.images, self.generator)
        strange = _some(torch.cat([_penultimate(view) for view in frozen.noisy]), self.images, self.generator)
        steps = min(len(known), len(strange)) // BATCH or 1
        self.incoming.requires_grad_(True)
        adam = torch.optim.Adam([self.incoming], lr=self.lr)
        for _ in range(self.epochs):
            pairs = [torch.randperm(len(rows), generator=self.generator) for rows in (known, strange)]
            for step in range(steps):
                part = slice(step * BATCH, (step + 1) * BATCH)
                value = self._contrast(known[pairs[0][part]], strange[pairs[1][part]], count, prior)
                adam.zero_grad()
                value.backward()  # type: ignore[no-untyped-call]
                adam.step()
        self.incoming = self.incoming.detach()

    def _contrast(self, known: Tensor, strange: Tensor, count: int, prior: float) -> Tensor:
        """Mean entropy on the data less that off the data, under samples of the diagonal posterior."""
        inside, outside = self.features(known), self.features(strange)
        p = (inside @ self.mean.T).softmax(dim=1)
        curvature = count * (p * (1 - p)).T @ inside.square() / len(inside) + prior
        noise = _normal((self.training_samples, *self.mean.shape), self.generator)
        weights = self.mean + noise / curvature.sqrt()
        return _entropy(inside, weights) - _entropy(outside, weights)


@dataclass(frozen=True)
class KroneckerPosterior:
    """A zero-mean Gaussian over weights (K, F) whose precision is n · G ⊗ A + prior · I, by eigenvectors."""

    output_vectors: Tensor
    """of G, (K, K)"""
    input_vectors: Tensor
    """of A, (F, F)"""
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
        """(count, K, F)"""
        noise = _normal((count, *self.precision.shape), generator) / self.precision.sqrt()
        return torch.matmul(torch.matmul(self.output_vectors, noise), self.input_vectors.T)


def _entropy(features: Tensor, weights: Tensor) -> Tensor:
    p = (features @ weights.mT).softmax(dim=-1).mean(dim=0)
    entropy: Tensor = -torch.special.xlogy(p, p).sum(dim=1).mean()
    return entropy


def _penultimate(view: View) -> Tensor:
    return torch.from_numpy(view.penultimate.astype(np.float64))


def _some(rows: Tensor, count: int, generator: torch.Generator) -> Tensor:
    return rows[torch.randperm(len(rows), generator=generator)[:count]]


def _normal(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)
