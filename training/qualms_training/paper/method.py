"""The one interface of all methods: `fit` learns, `score` says class and doubt.

A method is a dataclass whose fields are its hyper-parameters; a benchmark's file may set them by name.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qualms_training.errors import QualmsError
from qualms_training.paper.material import Frozen, Pictures, Shown, View
from qualms_training.recipe import Recipe

Chains = Sequence[Sequence[str]]
"""kinds of noisy copies, each by the noises that make it, one after the other"""


class NotApplicableError(QualmsError):
    """A method cannot work on this base or these data; the table gives the message as the reason."""


@dataclass(frozen=True)
class Verdict:
    """What a method says about N images."""

    predictions: NDArray[np.int64]
    """(N,)"""
    scores: dict[str, NDArray[Any]]
    """(N,) each; larger is more doubtful, whatever the score's usual direction"""


class Learner:
    """What all methods have in common."""

    def seen_noise(self, recipe: Recipe, score: str) -> Chains:
        """The noisy copies that a score is learned from or stopped by: none, unless a method says otherwise."""
        return []


@dataclass
class PostHoc(Learner, ABC):
    """A method that sees one pass of a frozen base, and no image."""

    @abstractmethod
    def fit(self, frozen: Frozen) -> int:
        """Learn; return how many numbers are kept beside the base's own."""

    @abstractmethod
    def score(self, view: View) -> Verdict:
        """Class and doubts of N images."""


@dataclass
class OnImages(Learner, ABC):
    """A method that sees images: one that trains a whole network, or a control."""

    @abstractmethod
    def fit(self, pictures: Pictures) -> int:
        """Train, resuming from `pictures.folder`; return how many weights that makes."""

    @abstractmethod
    def score(self, shown: Shown) -> Verdict:
        """Class and doubts of N images."""


Method = PostHoc | OnImages
