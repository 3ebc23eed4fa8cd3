"""Be-Bayesian (Joo, Chung & Seo, "Being Bayesian about Categorical Probability", ICML 2020)."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from qualms_training.meta.dirichlet import negative_elbo
from qualms_training.meta.meta_model import SoftClamp
from qualms_training.paper.inputs import ImageInputs, Images
from qualms_training.paper.method import ImageMethod, MethodOutput
from qualms_training.paper.methods.score_functions import dirichlet_output
from qualms_training.paper.methods.whole_network.training import new_network, outputs, section_for, train_network
from qualms_training.recipe import Count, Positive


@dataclass
class BeBayesian(ImageMethod):
    """The base's architecture with its outputs used as log α, trained from scratch with the meta-model's ELBO."""

    kl_weight: Positive = 1e-2
    """λ: 1e-2 for CIFAR-10, 3e-3 for CIFAR-100"""
    clip_norm: Positive = 1.0
    """largest norm of the gradient, which grows like 1/α where α is small"""
    epochs: Count | None = None
    """epochs of training; None uses as many as the base"""

    def fit(self, inputs: ImageInputs) -> int:
        """Train with the base's optimiser."""
        self.model = nn.Sequential(new_network(inputs), SoftClamp())
        self.device = inputs.device
        return train_network(
            inputs,
            self.model,
            section_for(inputs, self.epochs),
            criterion=self.loss,
            depends_on=self.kl_weight,
            clip_norm=self.clip_norm,
        )

    def score(self, images: Images) -> MethodOutput:
        """The class with the largest α, and the five scores of Dir(α)."""
        return dirichlet_output(outputs(self.model, images, self.device))

    def loss(self, log_alpha: Tensor, labels: Tensor) -> Tensor:
        """The negative ELBO of log α (N, K), with a uniform prior."""
        prior = torch.ones(log_alpha.shape[1], dtype=torch.float64, device=log_alpha.device)
        return negative_elbo(log_alpha, labels, self.kl_weight, prior)
