"""The interface of all methods: `fit` learns from training data, `score` returns classes and uncertainty scores.

To add a score of an existing method to the tables, return it from the method's `score`. To add a method:

1. Write a dataclass that derives from `PostHocMethod` (it uses the outputs of the frozen base) or `ImageMethod` (it uses
   images), in `methods/post_hoc/`, `methods/trained_heads/` or `methods/whole_network/`. Its fields are its
   hyper-parameters. Each field needs a type that pydantic can check and a default; the file of a benchmark can set other
   values in `[methods.<key>]`.
2. Implement `fit` and `score`. `score` returns one array per score; every score becomes a row of the tables. If a score is
   learned from noisy images, or early stopping uses them, override `seen_noise`: the tables mark such rows.
3. Add an entry to `METHODS` in `registry.py`.

`methods/post_hoc/energy.py` is the shortest example.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qualms_training.errors import QualmsError
from qualms_training.paper.inputs import BaseOutputs, ImageInputs, Images, PostHocInputs
from qualms_training.recipe import Recipe

NoiseChains = Sequence[Sequence[str]]
"""kinds of noisy copies; each is the list of noises that are applied one after the other"""


class NotApplicableError(QualmsError):
    """The method cannot be applied to this base or these data; the tables give the message as the reason."""


@dataclass(frozen=True)
class MethodOutput:
    """A method's output for N images."""

    predictions: NDArray[np.int64]
    """predicted classes, (N,)"""
    scores: dict[str, NDArray[Any]]
    """uncertainty scores by name, (N,) each; larger means more uncertain, so confidence scores are negated"""


class _Method:
    def seen_noise(self, recipe: Recipe, score: str) -> NoiseChains:
        """The noisy copies that a score is learned from, or that early stopping uses; none by default."""
        return []


@dataclass
class PostHocMethod(_Method, ABC):
    """A method that uses the outputs of a frozen base and no images."""

    @abstractmethod
    def fit(self, inputs: PostHocInputs) -> int:
        """Learn from the inputs; return how many numbers the method stores in addition to the base.

        Raises NotApplicableError if the method cannot be applied.
        """

    @abstractmethod
    def score(self, outputs: BaseOutputs) -> MethodOutput:
        """Classes and uncertainty scores of N images."""


@dataclass
class ImageMethod(_Method, ABC):
    """A method that uses images: one that trains a whole network, or a control."""

    @abstractmethod
    def fit(self, inputs: ImageInputs) -> int:
        """Train, resuming from checkpoints in `inputs.folder`; return the number of weights.

        Raises NotApplicableError if the method cannot be applied.
        """

    @abstractmethod
    def score(self, images: Images) -> MethodOutput:
        """Classes and uncertainty scores of N images."""


Method = PostHocMethod | ImageMethod
