"""ALOE (Chen, Li, Wu, Liang & Jha, "Robust Out-of-distribution Detection for Neural Networks", 2020)."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from qualms_training.fitting.base_trainer import crop_and_flip
from qualms_training.fitting.loop import Schedule, run
from qualms_training.fitting.optimizers import make_optimizer
from qualms_training.meta.normalise import Normalise
from qualms_training.models import identity
from qualms_training.paper.material import Pictures, Shown
from qualms_training.paper.method import Chains, OnImages, Verdict
from qualms_training.paper.methods.post_hoc.probability_scores import softmax_scores
from qualms_training.paper.methods.whole_network.networks import (
    copy_of_base,
    images_mark,
    new_network,
    outputs,
    scale_mark,
    section_for,
    training_mark,
)
from qualms_training.recipe import Count, NotNegative, Positive, Recipe
from qualms_training.reporting.provenance import parameters

WHITE = 255.0
"""the largest value of a pixel"""


@dataclass
class ALOE(OnImages):
    """Outlier exposure where both the images and the outliers are perturbed against the loss.

    Outliers are noisy copies of training images; augmentation and weight decay are the base's.
    """

    epsilon: Annotated[float, Field(ge=0, le=1)] = 1 / 255
    """the most that a pixel is changed, as a share of its range"""
    steps: Annotated[int, Field(ge=0)] = 2
    """of projected gradient ascent, each as long as `epsilon`, from a random start"""
    outlier_weight: NotNegative = 0.5
    """of the outliers' loss beside the cross-entropy"""
    lr: Positive = 0.1
    """of SGD with Nesterov momentum, where its cosine begins"""
    batch: Count = 64
    """images a step"""
    outlier_batch: Count = 128
    """outliers a step"""
    epochs: Count = 100
    """of training"""
    start: Literal["scratch", "base"] = "scratch"
    """what is trained: a new network, as its authors do, or, where epochs are few, a copy of the base"""

    def fit(self, pictures: Pictures) -> int:
        """Train; what protocols show otherwise are the outliers, so each has a network of its own."""
        self.device = pictures.device
        begin = new_network if self.start == "scratch" else copy_of_base
        self.model = begin(pictures).to(self.device)
        section = section_for(
            pictures,
            self.epochs,
            batch=self.batch,
            optimizer="sgd",
            lr=self.lr,
            momentum=0.9,
            nesterov=True,
            schedule="cosine",
            milestones=[],
            factors=[],
        )
        outliers = joined(pictures.outliers())
        count = len(pictures.train.labels)
        settings = [self.epsilon, self.steps, self.outlier_weight, self.outlier_batch, identity(self.model)]
        run(
            self.model,
            make_optimizer(self.model, section),
            self._loss(pictures, outliers, augment=section.augment == "crop-flip"),
            Schedule(count, section.batch, section.epochs, section.rate(count), pictures.seed),
            pictures.folder / f"network-{scale_mark(outliers.normalise)}.checkpoint.pt",
            training_mark(pictures, self.model, section, settings, images_mark(outliers)),
        )
        return parameters(self.model)

    def seen_noise(self, recipe: Recipe, score: str) -> Chains:
        """Its outliers: the recipe's noisy copies, of training images."""
        return recipe.meta.stop_noise

    def score(self, shown: Shown) -> Verdict:
        """The class of the largest logit, and 1 − its probability."""
        logits = outputs(self.model, shown, self.device)
        doubts = softmax_scores(logits.double().numpy())
        return Verdict(logits.argmax(dim=1).numpy(), {"max_probability": doubts["max_probability"]})

    def _loss(
        self, pictures: Pictures, outliers: Shown, *, augment: bool
    ) -> Callable[[NDArray[np.int64], torch.Generator], Tensor]:
        train = pictures.train
        images, strange = torch.from_numpy(train.shown.images), torch.from_numpy(outliers.images)
        labels = torch.from_numpy(train.labels)
        show, show_strange = train.shown.normalise.to(self.device), outliers.normalise.to(self.device)

        def loss(indices: NDArray[np.int64], generator: torch.Generator) -> Tensor:
            chosen = torch.from_numpy(indices)
            known, targets = images[chosen], labels[chosen].to(self.device)
            others = strange[torch.randint(len(strange), (self.outlier_batch,), generator=generator)]
            if augment:
                known, others = crop_and_flip(known, generator), crop_and_flip(others, generator)
            known = self.perturb(known, show, lambda logits: F.cross_entropy(logits, targets), generator)
            others = self.perturb(others, show_strange, outlier_loss, generator)
            # One pass over both, so that batch normalisation sees what it will have to tell apart.
            logits = self.model(torch.cat([show(known), show_strange(others)]))
            inside, outside = logits[: len(known)], logits[len(known) :]
            return F.cross_entropy(inside, targets) + self.outlier_weight * outlier_loss(outside)

        return loss

    def perturb(
        self, images: Tensor, normalise: Normalise, loss: Callable[[Tensor], Tensor], generator: torch.Generator
    ) -> Tensor:
        """Images (N, H, W, C) changed within `epsilon` to raise the loss of the logits, as floats from 0 to 255."""
        size, start = WHITE * self.epsilon, images.float()
        change = size * (2 * torch.rand(start.shape, generator=generator) - 1)
        start, change = start.to(self.device), change.to(self.device)
        with _evaluating(self.model):
            for _ in range(self.steps):
                point = (start + change).clamp(0, WHITE).requires_grad_(True)
                (slope,) = torch.autograd.grad(loss(self.model(normalise(point))), point)
                change = (point.detach() + size * slope.sign() - start).clamp(-size, size)
        return (start + change).clamp(0, WHITE)


def outlier_loss(logits: Tensor) -> Tensor:
    """Cross-entropy from the uniform distribution, logsumexp − mean of the logits (N, K), averaged."""
    return (logits.logsumexp(dim=1) - logits.mean(dim=1)).mean()


def joined(sets: list[Shown]) -> Shown:
    """All outliers as one set; a protocol shows them all alike."""
    return Shown(np.concatenate([shown.images for shown in sets]), sets[0].normalise)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode for a while: an attack must not count as data that batch normalisation has seen."""
    before = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(before)
