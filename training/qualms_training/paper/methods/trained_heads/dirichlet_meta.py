"""The Dirichlet meta-model (Shen et al., "Post-hoc Uncertainty Learning using a Dirichlet Meta-Model", AAAI 2023)."""

from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from qualms_training.meta.meta_model import build_meta
from qualms_training.paper.material import Frozen, View
from qualms_training.paper.method import Chains, PostHoc, Verdict
from qualms_training.paper.methods.trained_heads.heads import (
    TrainedHead,
    dirichlet_verdict,
    stopping_noise,
    taps,
    train_head,
)
from qualms_training.recipe import MetaSection, Recipe


@dataclass
class Ours(PostHoc):
    """The recipe's meta-model; its class is that of most evidence, as in the paper, not the base's."""

    stop: Literal["ood", "misclassification"] = "ood"
    """what training is stopped by: noisy copies, or errors of the base"""
    share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """of the training images"""

    def fit(self, frozen: Frozen) -> int:
        """Train on the taps, and stop where validation says."""
        view, section = frozen.train.view, self._section(frozen.recipe)
        widths = [(tap.shape[1],) for tap in view.features.taps]
        self.head = TrainedHead(build_meta(section, widths, frozen.classes, frozen.seed), taps)
        some = None
        if self.share < 1:
            count = round(self.share * len(view))
            some = np.sort(np.random.default_rng([frozen.seed, 10]).permutation(len(view))[:count])
        return train_head(frozen, self.head, section, chosen=some)

    def seen_noise(self, recipe: Recipe, score: str) -> Chains:
        """What it is stopped by."""
        return stopping_noise(self._section(recipe))

    def score(self, view: View) -> Verdict:
        """All scores of the Dirichlet distribution."""
        return dirichlet_verdict(self.head.outputs(view))

    def _section(self, recipe: Recipe) -> MetaSection:
        if self.stop == "ood":
            return recipe.meta
        return recipe.meta.model_copy(update={"stop_task": self.stop, "stop_score": "error_probability"})
