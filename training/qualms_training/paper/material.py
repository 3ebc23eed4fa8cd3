"""What a method is given: for a post-hoc one, what the frozen base says; for one that trains a whole network, images."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from qualms_training.fitting.feature_cache import Features
from qualms_training.meta.normalise import Normalise
from qualms_training.recipe import Recipe


@dataclass(frozen=True)
class View:
    """What the frozen base says about N images: one forward pass, nothing of the images themselves."""

    features: Features
    """the recipe's taps, reduced as the recipe says, (N, D_j) each, and logits (N, K)"""
    last: NDArray[Any]
    """what the base's last linear layer sees, (N, D)"""

    def __len__(self) -> int:
        return len(self.last)

    @cached_property
    def penultimate(self) -> NDArray[np.float32]:
        """What the base's last linear layer sees, in memory, (N, D)."""
        return np.asarray(self.last, dtype=np.float32)

    @cached_property
    def logits(self) -> NDArray[np.float64]:
        """The base's own, (N, K)."""
        return np.asarray(self.features.logits, dtype=np.float64)

    @property
    def predictions(self) -> NDArray[np.int64]:
        """The base's own, (N,)."""
        return np.asarray(self.logits.argmax(axis=1), dtype=np.int64)

    def subset(self, indices: NDArray[np.int64]) -> "View":
        """Some of the images, copied into memory."""
        taps = [np.asarray(tap[indices]) for tap in self.features.taps]
        logits = np.asarray(self.features.logits[indices])
        return View(Features(taps, logits, self.features.folder), np.asarray(self.last[indices]))


@dataclass(frozen=True)
class Known:
    """In-distribution images as the base sees them, with their labels (N,)."""

    view: View
    labels: NDArray[np.int64]


@dataclass(frozen=True)
class Head:
    """The base's last linear layer: logits = weight · penultimate + bias."""

    weight: NDArray[np.float64]
    """(K, D)"""
    bias: NDArray[np.float64]
    """(K,)"""


@dataclass(frozen=True)
class Frozen:
    """All that a post-hoc method may learn from. Calibration and test images are not here, on purpose."""

    train: Known
    """what the base was trained on"""
    validation: Known
    """unseen by the base; for early stopping"""
    fit: Known
    """unseen by the base; for how scores are combined"""
    noisy: list[View]
    """noisy copies of the validation images, one view a kind and draw"""
    fit_noise: Callable[[], dict[str, View]]
    """noisy copies of the fit images, by kind"""
    head: Head
    classes: int
    """of the data; a base for transfer has others"""
    recipe: Recipe
    seed: int
    folder: Path
    """for checkpoints; kept until the method's result is written"""
    device: torch.device


@dataclass(frozen=True)
class Shown:
    """Images (N, H, W, C) with the normalisation under which the protocol shows them to a network."""

    images: NDArray[np.uint8]
    normalise: Normalise


@dataclass(frozen=True)
class Labelled:
    """In-distribution images with their labels (N,)."""

    shown: Shown
    labels: NDArray[np.int64]


@dataclass(frozen=True)
class Pictures:
    """All that a method on images may learn from."""

    train: Labelled
    validation: Labelled
    outliers: Callable[[], list[Shown]]
    """makes noisy copies of training images, one set a kind; never of a test set"""
    new_network: Callable[[], nn.Module]
    """the base's architecture with the weights that its training starts from"""
    copy_of_base: Callable[[], nn.Module]
    """the base as trained, not frozen"""
    recipe: Recipe
    seed: int
    folder: Path
    """for checkpoints and trained weights; both protocols share it, so what outliers decide is named by their scale"""
    device: torch.device
