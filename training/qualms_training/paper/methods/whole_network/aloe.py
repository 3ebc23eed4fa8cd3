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
from qualms_training.fitting.loop import Schedule, make_optimizer, run
from qualms_training.meta.extractor import Normalise
from qualms_training.models import count_parameters, identity
from qualms_training.paper.inputs import ImageInputs, Images
from qualms_training.paper.method import ImageMethod, MethodOutput, NoiseChains
from qualms_training.paper.methods.score_functions import softmax_scores
from qualms_training.paper.methods.whole_network.training import (
    copy_of_base,
    images_fingerprint,
    new_network,
    normalisation_fingerprint,
    outputs,
    section_for,
    training_fingerprint,
)
from qualms_training.recipe import Count, NotNegative, Positive, Recipe

MAX_PIXEL = 255.0


@dataclass
class ALOE(ImageMethod):
    """Outlier exposure with adversarial perturbations of both the images and the outliers.

    The outliers are noisy copies of training images. Augmentation and weight decay are the base's.
    """

    epsilon: Annotated[float, Field(ge=0, le=1)] = 1 / 255
    """largest change of a pixel, as a share of its range"""
    steps: Annotated[int, Field(ge=0)] = 2
    """steps of projected gradient ascent, each of size `epsilon`, from a random start"""
    outlier_weight: NotNegative = 0.5
    """weight of the outliers' loss, relative to the cross-entropy"""
    lr: Positive = 0.1
    """initial learning rate of SGD with Nesterov momentum and a cosine schedule"""
    batch: Count = 64
    """images per step"""
    outlier_batch: Count = 128
    """outliers per step"""
    epochs: Count = 100
    start: Literal["scratch", "base"] = "scratch"
    """initial weights: a new network, as its authors use, or a copy of the base, for a small number of epochs"""

    def fit(self, inputs: ImageInputs) -> int:
        """Train; each protocol needs its own network, because the protocols normalise the outliers differently."""
        self.device = inputs.device
        make_network = new_network if self.start == "scratch" else copy_of_base
        self.model = make_network(inputs).to(self.device)
        section = section_for(
            inputs,
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
        outliers = joined(inputs.outliers())
        count = len(inputs.train.labels)
        settings = [self.epsilon, self.steps, self.outlier_weight, self.outlier_batch, identity(self.model)]
        run(
            self.model,
            make_optimizer(self.model, section),
            self._loss(inputs, outliers, augment=section.augment == "crop-flip"),
            Schedule(count, section.batch, section.epochs, section.rate(count), inputs.seed),
            inputs.folder / f"network-{normalisation_fingerprint(outliers.normalise)}.checkpoint.pt",
            training_fingerprint(inputs, self.model, section, settings, images_fingerprint(outliers)),
        )
        return count_parameters(self.model)

    def seen_noise(self, recipe: Recipe, score: str) -> NoiseChains:
        """The outliers, which are made with the recipe's noises."""
        return recipe.meta.stop_noise

    def score(self, images: Images) -> MethodOutput:
        """The class with the largest logit, and 1 − its probability."""
        logits = outputs(self.model, images, self.device)
        scores = softmax_scores(logits.double().numpy())
        return MethodOutput(logits.argmax(dim=1).numpy(), {"max_probability": scores["max_probability"]})

    def _loss(
        self, inputs: ImageInputs, outliers: Images, *, augment: bool
    ) -> Callable[[NDArray[np.int64], torch.Generator], Tensor]:
        train = inputs.train
        pixels, outlier_pixels = torch.from_numpy(train.images.pixels), torch.from_numpy(outliers.pixels)
        labels = torch.from_numpy(train.labels)
        normalise, normalise_outliers = train.images.normalise.to(self.device), outliers.normalise.to(self.device)

        def loss(indices: NDArray[np.int64], generator: torch.Generator) -> Tensor:
            chosen = torch.from_numpy(indices)
            images, targets = pixels[chosen], labels[chosen].to(self.device)
            others = outlier_pixels[torch.randint(len(outlier_pixels), (self.outlier_batch,), generator=generator)]
            if augment:
                images, others = crop_and_flip(images, generator), crop_and_flip(others, generator)
            images = self.perturb(images, normalise, lambda logits: F.cross_entropy(logits, targets), generator)
            others = self.perturb(others, normalise_outliers, outlier_loss, generator)
            # One pass over both, so that the statistics of batch normalisation include images and outliers.
            logits = self.model(torch.cat([normalise(images), normalise_outliers(others)]))
            own, outlying = logits[: len(images)], logits[len(images) :]
            return F.cross_entropy(own, targets) + self.outlier_weight * outlier_loss(outlying)

        return loss

    def perturb(
        self, images: Tensor, normalise: Normalise, loss: Callable[[Tensor], Tensor], generator: torch.Generator
    ) -> Tensor:
        """Images (N, H, W, C) changed by at most `epsilon` to increase the loss, as floats from 0 to 255."""
        size, start = MAX_PIXEL * self.epsilon, images.float()
        change = size * (2 * torch.rand(start.shape, generator=generator) - 1)
        start, change = start.to(self.device), change.to(self.device)
        with _evaluating(self.model):
            for _ in range(self.steps):
                point = (start + change).clamp(0, MAX_PIXEL).requires_grad_(True)
                (gradient,) = torch.autograd.grad(loss(self.model(normalise(point))), point)
                change = (point.detach() + size * gradient.sign() - start).clamp(-size, size)
        return (start + change).clamp(0, MAX_PIXEL)


def outlier_loss(logits: Tensor) -> Tensor:
    """Mean cross-entropy between the uniform distribution and the softmax of logits (N, K): logsumexp − mean."""
    return (logits.logsumexp(dim=1) - logits.mean(dim=1)).mean()


def joined(sets: list[Images]) -> Images:
    """All outliers as one set; they have the same normalisation."""
    return Images(np.concatenate([images.pixels for images in sets]), sets[0].normalise)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Temporary evaluation mode, so that perturbing images does not change the statistics of batch normalisation."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
