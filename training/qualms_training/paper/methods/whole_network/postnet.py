"""PostNet (Charpentier, Zügner & Günnemann, "Posterior Network: Uncertainty Estimation without OOD Samples via
Density-Based Pseudo-Counts", NeurIPS 2020)."""

from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from qualms_training.fitting.loop import Hooks
from qualms_training.meta.dirichlet import negative_elbo
from qualms_training.meta.taps import open_head
from qualms_training.paper.material import Labelled, Pictures, Shown
from qualms_training.paper.method import OnImages, Verdict
from qualms_training.paper.methods.post_hoc.probability_scores import probability_scores
from qualms_training.paper.methods.whole_network.networks import (
    data_mark,
    example_for,
    new_network,
    outputs,
    section_for,
    train_network,
)
from qualms_training.paper.methods.whole_network.radial_flow import RadialFlows
from qualms_training.recipe import Count, NotNegative, Positive

HIGHEST = 40.0
"""of log α: beyond, the gamma functions of the loss leave the range of float64"""


@dataclass
class PostNet(OnImages):
    """Evidence for a class is its share of the training images times its density in a small latent space."""

    latent: Count = 6
    """dimensions of the latent space"""
    flows: Count = 6
    """radial flows in the density of each class"""
    entropy_weight: NotNegative = 1e-5
    """of the Dirichlet's entropy, which the loss rewards"""
    lr: Positive = 5e-4
    """of Adam: 5e-4 for CIFAR, 5e-5 for MNIST"""
    batch: Annotated[int, Field(gt=1)] = 64
    """images a step; one would leave batch normalisation without a variance"""
    epochs: Count = 200
    """at most"""
    patience: Count = 10
    """epochs without a lower validation loss after which training ends"""

    def fit(self, pictures: Pictures) -> int:
        """Train network and densities together; keep the epoch of the lowest validation loss."""
        self.device = pictures.device
        # A last batch of one image would leave batch normalisation without a variance.
        pictures = _without_last(pictures) if len(pictures.train.labels) % self.batch == 1 else pictures
        self.model = self._new_model(pictures)
        section = section_for(
            pictures,
            self.epochs,
            batch=self.batch,
            optimizer="adam",
            lr=self.lr,
            weight_decay=0.0,
            schedule="constant",
            milestones=[],
            factors=[],
        )
        labels = torch.from_numpy(pictures.validation.labels)

        def select(model: nn.Module) -> float:
            return -float(self.loss(outputs(model, pictures.validation.shown, self.device), labels))

        return train_network(
            pictures,
            self.model,
            section,
            criterion=self.loss,
            decided_by=[self.entropy_weight, self.patience, data_mark(pictures.validation)],
            hooks=Hooks(select=select, patience=self.patience),
        )

    def score(self, shown: Shown) -> Verdict:
        """The class of most evidence; doubt by α_0 and by the largest probability.

        α_0 is K plus the evidence, so the logarithm of the evidence orders images as α_0 does, and goes on doing so
        where the sum rounds to K.
        """
        log_evidence = outputs(self.model, shown, self.device)
        alpha = 1 + log_evidence.clamp(max=HIGHEST).exp()
        p = (alpha / alpha.sum(dim=1, keepdim=True)).numpy()
        scores = {
            "precision": -log_evidence.logsumexp(dim=1).numpy(),
            "max_probability": probability_scores(p)["max_probability"],
        }
        return Verdict(log_evidence.argmax(dim=1).numpy(), dict(scores))

    def loss(self, log_evidence: Tensor, labels: Tensor) -> Tensor:
        """E[cross-entropy] − weight · H(Dir(α)) but for a constant, for α = 1 + evidence (N, K).

        H(Dir(α)) is −KL(Dir(α) ‖ Dir(1)) − log Γ(K), so that this is the ELBO of the meta-model with another weight.
        """
        prior = torch.ones(log_evidence.shape[1], dtype=torch.float64, device=log_evidence.device)
        log_alpha = F.softplus(log_evidence).clamp(max=HIGHEST)
        return negative_elbo(log_alpha, labels, self.entropy_weight, prior)

    def _new_model(self, pictures: Pictures) -> nn.Module:
        """The base's architecture with a latent layer for its last one, and the densities on it."""
        train = pictures.train
        encoder, tap, layer = open_head(new_network(pictures), example_for(pictures))
        counts = np.bincount(train.labels, minlength=layer.out_features)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(pictures.seed)
            latent = nn.Sequential(nn.Linear(layer.in_features, self.latent), nn.BatchNorm1d(self.latent))
            densities = RadialFlows(len(counts), self.latent, self.flows)
        encoder.set_submodule(tap.removesuffix(".0"), latent)
        return Evidence(encoder, densities.double(), torch.from_numpy(counts))


class Evidence(nn.Module):
    """Images to the logarithm of N_c · p(z | c): densities in float64, as its authors', the network in float32.

    Its authors' network is in float64, too, in which a convolution takes several times as long.
    """

    log_counts: Tensor

    def __init__(self, encoder: nn.Module, densities: RadialFlows, counts: Tensor) -> None:
        super().__init__()
        self.encoder = encoder
        self.densities = densities
        # A class that is not there has no evidence; a finite logarithm keeps weights and gradients finite.
        self.register_buffer("log_counts", counts.double().clamp(min=1e-300).log())

    def forward(self, x: Tensor) -> Tensor:
        """Normalised images (N, C, H, W) to (N, K)."""
        log_evidence: Tensor = self.log_counts + self.densities(self.encoder(x).double())
        return log_evidence


def _without_last(pictures: Pictures) -> Pictures:
    train = pictures.train
    shown = Shown(train.shown.images[:-1], train.shown.normalise)
    return replace(pictures, train=Labelled(shown, train.labels[:-1]))
