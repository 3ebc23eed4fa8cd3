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
from qualms_training.meta.taps.tapped import open_head
from qualms_training.paper.inputs import ImageInputs, Images, LabelledImages
from qualms_training.paper.method import ImageMethod, MethodOutput
from qualms_training.paper.methods.score_functions import probability_scores
from qualms_training.paper.methods.whole_network.radial_flow import RadialFlows
from qualms_training.paper.methods.whole_network.training import (
    example_for,
    labelled_fingerprint,
    new_network,
    outputs,
    section_for,
    train_network,
)
from qualms_training.recipe import Count, NotNegative, Positive

MAX_LOG_EVIDENCE = 40.0
"""upper limit of the log evidence that is scored"""
MAX_LOG_ALPHA = 24.0
"""upper limit of log α in the loss, whose gamma functions multiply 24 numbers of this size and overflow above 1e12"""


@dataclass
class PostNet(ImageMethod):
    """The evidence for a class is its number of training images times its density in a small latent space."""

    latent: Count = 6
    """dimensions of the latent space"""
    flows: Count = 6
    """number of radial flows in the density of each class"""
    entropy_weight: NotNegative = 1e-5
    """weight of the Dirichlet's entropy, which the loss subtracts"""
    lr: Positive = 5e-4
    """learning rate of Adam; the authors use 5e-4 for CIFAR, 5e-5 for MNIST"""
    batch: Annotated[int, Field(gt=1)] = 64
    """images per step; batch normalisation has no variance with one"""
    epochs: Count = 200
    """largest number of epochs"""
    patience: Count = 10
    """training ends after this many epochs without a lower validation loss"""

    def fit(self, inputs: ImageInputs) -> int:
        """Train the network and the densities together; keep the epoch with the lowest validation loss."""
        self.device = inputs.device
        # Batch normalisation would have no variance in a last batch of one image.
        inputs = _without_last(inputs) if len(inputs.train.labels) % self.batch == 1 else inputs
        self.model = self._new_model(inputs)
        section = section_for(
            inputs,
            self.epochs,
            batch=self.batch,
            optimizer="adam",
            lr=self.lr,
            weight_decay=0.0,
            schedule="constant",
            milestones=[],
            factors=[],
        )
        labels = torch.from_numpy(inputs.validation.labels)

        def select(model: nn.Module) -> float:
            return -float(self.loss(outputs(model, inputs.validation.images, self.device), labels))

        return train_network(
            inputs,
            self.model,
            section,
            criterion=self.loss,
            depends_on=[self.entropy_weight, self.patience, labelled_fingerprint(inputs.validation)],
            hooks=Hooks(select=select, patience=self.patience),
        )

    def score(self, images: Images) -> MethodOutput:
        """The class with the most evidence; scores from α_0 and from the largest probability.

        α_0 is K plus the total evidence. The logarithm of the evidence orders images like α_0, also where the sum rounds
        to K.
        """
        log_evidence = outputs(self.model, images, self.device)
        alpha = 1 + log_evidence.clamp(max=MAX_LOG_EVIDENCE).exp()
        p = (alpha / alpha.sum(dim=1, keepdim=True)).numpy()
        scores = {
            "precision": -log_evidence.logsumexp(dim=1).numpy(),
            "max_probability": probability_scores(p)["max_probability"],
        }
        return MethodOutput(log_evidence.argmax(dim=1).numpy(), dict(scores))

    def loss(self, log_evidence: Tensor, labels: Tensor) -> Tensor:
        """E[cross-entropy] − weight · H(Dir(α)), up to a constant, for α = 1 + evidence (N, K).

        H(Dir(α)) is −KL(Dir(α) ‖ Dir(1)) − log Γ(K), so this is the negative ELBO of the meta-model with another weight.
        """
        prior = torch.ones(log_evidence.shape[1], dtype=torch.float64, device=log_evidence.device)
        log_alpha = F.softplus(log_evidence).clamp(max=MAX_LOG_ALPHA)
        return negative_elbo(log_alpha, labels, self.entropy_weight, prior)

    def _new_model(self, inputs: ImageInputs) -> nn.Module:
        """The base's architecture with a latent layer instead of its last layer, followed by the densities."""
        train = inputs.train
        encoder, tap, layer = open_head(new_network(inputs), example_for(inputs))
        counts = np.bincount(train.labels, minlength=layer.out_features)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(inputs.seed)
            latent = nn.Sequential(nn.Linear(layer.in_features, self.latent), nn.BatchNorm1d(self.latent))
            densities = RadialFlows(len(counts), self.latent, self.flows)
        encoder.set_submodule(tap.removesuffix(".0"), latent)
        return Evidence(encoder, densities.double(), torch.from_numpy(counts))


class Evidence(nn.Module):
    """Images to log(N_c · p(z | c)), with densities in float64 and the network in float32.

    The authors also use float64 for the network, where a convolution takes several times as long.
    """

    log_counts: Tensor

    def __init__(self, encoder: nn.Module, densities: RadialFlows, counts: Tensor) -> None:
        super().__init__()
        self.encoder = encoder
        self.densities = densities
        # A class without images has no evidence; a finite logarithm keeps weights and gradients finite.
        self.register_buffer("log_counts", counts.double().clamp(min=1e-300).log())

    def forward(self, x: Tensor) -> Tensor:
        """Normalised images (N, C, H, W) to (N, K)."""
        log_evidence: Tensor = self.log_counts + self.densities(self.encoder(x).double())
        return log_evidence


def _without_last(inputs: ImageInputs) -> ImageInputs:
    train = inputs.train
    images = Images(train.images.pixels[:-1], train.images.normalise)
    return replace(inputs, train=LabelledImages(images, train.labels[:-1]))
