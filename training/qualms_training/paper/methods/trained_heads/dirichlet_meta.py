"""The Dirichlet meta-model (Shen et al., "Post-hoc Uncertainty Learning using a Dirichlet Meta-Model", AAAI 2023)."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from qualms_training.paper.inputs import BaseOutputs, PostHocInputs
from qualms_training.paper.method import MethodOutput, NoiseChains, PostHocMethod
from qualms_training.paper.methods.score_functions import dirichlet_output
from qualms_training.paper.methods.trained_heads.heads import meta_head, stopping_noise, train_head
from qualms_training.recipe import MetaSection, Recipe


@dataclass
class DirichletMeta(PostHocMethod):
    """The recipe's meta-model. Its class is the one with the largest α, as in the paper, and not the base's class."""

    stop: Literal["ood", "misclassification"] = "ood"
    """task that early stopping uses: detection of noisy copies, or of the base's errors"""
    share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """share of the training images to use"""

    def fit(self, inputs: PostHocInputs) -> int:
        """Train on the taps, and keep the epoch that is best on validation data."""
        train, section = inputs.train.outputs, self._section(inputs.recipe)
        self.head = meta_head(inputs, section)
        chosen = None
        if self.share < 1:
            count = round(self.share * len(train))
            chosen = np.sort(np.random.default_rng([inputs.seed, 10]).permutation(len(train))[:count])
        return train_head(inputs, self.head, section, chosen=chosen)

    def seen_noise(self, recipe: Recipe, score: str) -> NoiseChains:
        """The noisy copies used for early stopping."""
        return stopping_noise(self._section(recipe))

    def score(self, outputs: BaseOutputs) -> MethodOutput:
        """All scores of the Dirichlet distribution."""
        return dirichlet_output(self.head(outputs))

    def _section(self, recipe: Recipe) -> MetaSection:
        if self.stop == "ood":
            return recipe.meta
        return recipe.meta.model_copy(update={"stop_task": self.stop, "stop_score": "error_probability"})


@dataclass
class OnMetaModel(PostHocMethod):
    """A method that needs a trained meta-model, which several methods may share."""

    def fit(self, inputs: PostHocInputs) -> int:
        """Train the meta-model, then fit the rest."""
        meta = DirichletMeta()
        size = meta.fit(inputs)
        return size + self.fit_with(meta, inputs)

    @abstractmethod
    def fit_with(self, meta: DirichletMeta, inputs: PostHocInputs) -> int:
        """Fit everything but the meta-model, which is trained already; return how many numbers that stores."""
