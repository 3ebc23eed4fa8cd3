"""Inputs of the methods: images and labels, or the frozen base's outputs for them.

A post-hoc method gets `PostHocInputs`, and a method that trains a whole network gets `ImageInputs`. `InputBuilder` makes
both from one base and its data, and runs each forward pass of the base once.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from qualms_training.data.lazy_images import Pixels
from qualms_training.data.noise import NOISES, apply_noise
from qualms_training.data.prepare import CORRUPTED
from qualms_training.fitting.feature_cache import Features, cached_features
from qualms_training.meta.extractor import Extractor, Normalise
from qualms_training.meta.taps.tapped import Tapped, open_head
from qualms_training.paper.evaluation_protocol import Protocol, Role, normaliser
from qualms_training.recipe import Recipe
from qualms_training.stages import base
from qualms_training.stages.context import RunContext
from qualms_training.stages.features import example, extractor

MAX_OUTLIERS = 10_000
"""number of training images from which outliers are made for methods that train a whole network"""


@dataclass(frozen=True)
class BaseOutputs:
    """Outputs of the frozen base for N images, from one forward pass. The images themselves are not included."""

    features: Features
    """the recipe's taps, reduced as the recipe specifies, (N, D_j) each, and logits (N, K)"""
    cached_penultimate: NDArray[Any]
    """input of the base's last linear layer as the feature cache stores it, (N, D)"""

    def __len__(self) -> int:
        return len(self.cached_penultimate)

    @cached_property
    def penultimate(self) -> NDArray[np.float32]:
        """Input of the base's last linear layer, in memory, (N, D)."""
        return np.asarray(self.cached_penultimate, dtype=np.float32)

    @cached_property
    def logits(self) -> NDArray[np.float64]:
        """Logits of the base, (N, K)."""
        return np.asarray(self.features.logits, dtype=np.float64)

    @property
    def predictions(self) -> NDArray[np.int64]:
        """Classes that the base predicts, (N,)."""
        return np.asarray(self.logits.argmax(axis=1), dtype=np.int64)

    def subset(self, indices: NDArray[np.int64]) -> "BaseOutputs":
        """Outputs for the images at `indices`, copied into memory."""
        taps = [np.asarray(tap[indices]) for tap in self.features.taps]
        logits = np.asarray(self.features.logits[indices])
        return BaseOutputs(Features(taps, logits, self.features.folder), np.asarray(self.cached_penultimate[indices]))


@dataclass(frozen=True)
class LabelledOutputs:
    """The base's outputs for in-distribution images, with their labels (N,)."""

    outputs: BaseOutputs
    labels: NDArray[np.int64]


@dataclass(frozen=True)
class Head:
    """The base's last linear layer: logits = weight · penultimate + bias."""

    weight: NDArray[np.float64]
    """(K, D)"""
    bias: NDArray[np.float64]
    """(K,)"""


@dataclass(frozen=True)
class PostHocInputs:
    """Everything that a post-hoc method may learn from. Calibration and test images are deliberately not included."""

    train: LabelledOutputs
    """images that the base was trained on"""
    validation: LabelledOutputs
    """images that the base was not trained on, for early stopping"""
    fit: LabelledOutputs
    """images that the base was not trained on, for combining scores"""
    noisy_validation: list[BaseOutputs]
    """noisy copies of the validation images, one entry per noise chain of the recipe and draw"""
    noisy_fit: Callable[[], dict[str, BaseOutputs]]
    """makes noisy copies of the fit images, by noise"""
    head: Head
    classes: int
    """number of classes of the data; in a transfer benchmark the base has another number"""
    recipe: Recipe
    seed: int
    folder: Path
    """folder for checkpoints; deleted after the method's result is written"""
    device: torch.device


@dataclass(frozen=True)
class Images:
    """uint8 pixels (N, H, W, C) and the normalisation that the protocol applies to them."""

    pixels: NDArray[np.uint8]
    normalise: Normalise


@dataclass(frozen=True)
class LabelledImages:
    """In-distribution images with their labels (N,)."""

    images: Images
    labels: NDArray[np.int64]


@dataclass(frozen=True)
class ImageInputs:
    """Everything that a method on images may learn from. Calibration and test images are deliberately not included."""

    train: LabelledImages
    validation: LabelledImages
    outliers: Callable[[], list[Images]]
    """makes noisy copies of training images, one set per noise chain of the recipe and draw"""
    new_network: Callable[[], nn.Module]
    """makes an untrained network of the base's architecture, initialised by the seed"""
    copy_of_base: Callable[[], nn.Module]
    """makes a trainable copy of the trained base"""
    recipe: Recipe
    seed: int
    folder: Path
    """folder for checkpoints and weights; both protocols share it, so files that depend on the outliers need own names"""
    device: torch.device


@dataclass(frozen=True)
class InputBuilder:
    """Makes the inputs of methods from one frozen base and its data under one protocol."""

    context: RunContext
    protocol: Protocol
    seed: int
    """seed of the methods; the base may have another"""
    ood_images: dict[str, Pixels]
    """OOD sets by column of the tables, (N, H, W, C) each"""

    @property
    def test_labels(self) -> NDArray[np.int64]:
        """(N,)"""
        return self.context.data.parts["test"].labels

    def scored_images(self) -> dict[str, Images]:
        """The image sets that every method scores: the test set, named `test`, and every column."""
        sets = {"test": self._normalised(self.context.data.parts["test"].images, Role.in_distribution)}
        for name, pixels in self.ood_images.items():
            sets[name] = self._normalised(pixels, Role.noise if name == CORRUPTED else Role.ood)
        return sets

    def scored_outputs(self) -> dict[str, BaseOutputs]:
        """The base's outputs for the sets of `scored_images`."""
        sets = self.scored_images()
        return self.context.get_or_make(
            f"outputs, {self.protocol}", lambda: {name: self._run_base(images) for name, images in sets.items()}
        )

    def post_hoc_inputs(self, folder: Path) -> PostHocInputs:
        """Inputs of a post-hoc method that writes its checkpoints to `folder`."""
        return PostHocInputs(
            train=self.labelled_outputs("train"),
            validation=self.labelled_outputs("validation"),
            fit=self.labelled_outputs("fit"),
            noisy_validation=self.context.get_or_make(
                f"noisy validation, {self.protocol}, {self.seed}",
                lambda: [self._run_base(images) for images in self._noisy_images("validation")],
            ),
            noisy_fit=lambda: self.outputs_by_noise("fit"),
            head=self.head,
            classes=len(self.context.data.classes),
            recipe=self.context.recipe,
            seed=self.seed,
            folder=folder,
            device=self.context.device,
        )

    def image_inputs(self, folder: Path) -> ImageInputs:
        """Inputs of a method on images that writes its checkpoints and weights to `folder`."""
        parts = self.context.data.parts
        train, validation = (
            LabelledImages(self._normalised(parts[name].images, Role.in_distribution), parts[name].labels)
            for name in ("train", "validation")
        )
        return ImageInputs(
            train=train,
            validation=validation,
            outliers=lambda: self._noisy_images("train", MAX_OUTLIERS),
            new_network=self._new_network,
            copy_of_base=lambda: copy.deepcopy(base.frozen_base(self.context)).requires_grad_(True),
            recipe=self.context.recipe,
            seed=self.seed,
            folder=folder,
            device=self.context.device,
        )

    def labelled_outputs(self, split: str) -> LabelledOutputs:
        """The base's outputs for a split of the in-distribution data, with the labels."""
        part = self.context.data.parts[split]
        outputs = self.context.get_or_make(
            f"outputs of {split}", lambda: self._run_base(self._normalised(part.images, Role.in_distribution))
        )
        return LabelledOutputs(outputs, part.labels)

    def outputs_by_noise(self, split: str) -> dict[str, BaseOutputs]:
        """The base's outputs for noisy copies of a split, one entry per noise."""

        def make() -> dict[str, BaseOutputs]:
            images = self.context.data.parts[split].images
            noisy = {
                kind: apply_noise(images, [kind], np.random.default_rng([self.context.seed, 20, index]))
                for index, kind in enumerate(NOISES)
            }
            return {kind: self._run_base(self._normalised(pixels, Role.noise)) for kind, pixels in noisy.items()}

        return self.context.get_or_make(f"outputs of {split} by noise, {self.protocol}", make)

    @property
    def head(self) -> Head:
        """The base's last linear layer."""
        _, _, layer = self._opened
        weight = layer.weight.detach().cpu().double().numpy()
        bias = np.zeros(len(weight)) if layer.bias is None else layer.bias.detach().cpu().double().numpy()
        return Head(weight, bias)

    def _run_base(self, images: Images) -> BaseOutputs:
        """Run the frozen base, or read its outputs from the feature cache."""
        context, (opened, penultimate, _) = self.context, self._opened
        names = extractor(context).tapped.names
        whole = Extractor(images.normalise, Tapped(opened, [*names, penultimate]), extractor(context).reduce).eval()
        with context.display.bar("forward pass of the base", len(images.pixels)) as advance:
            features = cached_features(
                whole, images.pixels, context.cache / "features", context.device, progress=advance
            )
        return BaseOutputs(Features(features.taps[:-1], features.logits, features.folder), features.taps[-1])

    @property
    def _opened(self) -> tuple[nn.Module, str, nn.Linear]:
        context = self.context
        return context.get_or_make("open head", lambda: open_head(base.frozen_base(context).cpu(), example(context)))

    def _new_network(self) -> nn.Module:
        own = replace(self.context, seed=self.seed)
        own.data = self.context.data
        return base.new_base(own)

    def _noisy_images(self, split: str, limit: int | None = None) -> list[Images]:
        meta, pixels = self.context.recipe.meta, self.context.data.parts[split].images[:limit]
        return [
            self._normalised(apply_noise(pixels, chain, np.random.default_rng([self.seed, draw])), Role.noise)
            for chain in meta.stop_noise
            for draw in range(meta.noise_draws)
        ]

    def _normalised(self, pixels: Pixels, role: Role) -> Images:
        return Images(np.asarray(pixels), normaliser(self.protocol, role, self.context.recipe.input))
