"""Be-Bayesian (Joo, Chung & Seo, "Being Bayesian about Categorical Probability", ICML 2020)."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from qualms_training.meta.dirichlet import negative_elbo
from qualms_training.meta.meta_model import SoftClamp
from qualms_training.paper.material import Pictures, Shown
from qualms_training.paper.method import OnImages, Verdict
from qualms_training.paper.methods.trained_heads.heads import dirichlet_verdict
from qualms_training.paper.methods.whole_network.networks import new_network, outputs, section_for, train_network
from qualms_training.recipe import Count, Positive


@dataclass
class BeBayesian(OnImages):
    """The base's architecture, its outputs read as log α and trained from scratch for the meta-model's ELBO."""

    kl_weight: Positive = 1e-2
    """λ: 1e-2 for CIFAR-10, 3e-3 for CIFAR-100"""
    clip_norm: Positive = 1.0
    """of the gradient, which grows like 1/α where α is small"""
    epochs: Count | None = None
    """of training; None takes as many as the base"""

    def fit(self, pictures: Pictures) -> int:
        """Train with the base's optimiser."""
        self.model = nn.Sequential(new_network(pictures), SoftClamp())
        self.device = pictures.device
        return train_network(
            pictures,
            self.model,
            section_for(pictures, self.epochs),
            criterion=self.loss,
            decided_by=self.kl_weight,
            clip_norm=self.clip_norm,
        )

    def score(self, shown: Shown) -> Verdict:
        """The class of most evidence, and the five scores of Dir(α)."""
        return dirichlet_verdict(outputs(self.model, shown, self.device))

    def loss(self, log_alpha: Tensor, labels: Tensor) -> Tensor:
        """The ELBO with a uniform prior, with its sign changed, of log α (N, K)."""
        prior = torch.ones(log_alpha.shape[1], dtype=torch.float64, device=log_alpha.device)
        return negative_elbo(log_alpha, labels, self.kl_weight, prior)
