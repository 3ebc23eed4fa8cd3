"""The paper's ablation of structure: one linear layer on the last feature instead of the whole meta-model."""

from dataclasses import dataclass

from qualms_training.meta.meta_model import SoftClamp
from qualms_training.paper.material import Frozen, View
from qualms_training.paper.method import Chains, PostHoc, Verdict
from qualms_training.paper.methods.trained_heads.heads import (
    FirstOnly,
    TrainedHead,
    dirichlet_verdict,
    last,
    seeded_linear,
    stopping_noise,
    train_head,
)
from qualms_training.recipe import Recipe


@dataclass
class LinearMeta(PostHoc):
    """z = log α linear in the penultimate feature, trained and stopped like the meta-model."""

    def fit(self, frozen: Frozen) -> int:
        """Train by the ELBO."""
        layer = seeded_linear(frozen.head.weight.shape[1], frozen.classes, frozen.seed)
        self.head = TrainedHead(FirstOnly(layer, SoftClamp()), last)
        return train_head(frozen, self.head, frozen.recipe.meta)

    def seen_noise(self, recipe: Recipe, score: str) -> Chains:
        """What it is stopped by."""
        return stopping_noise(recipe.meta)

    def score(self, view: View) -> Verdict:
        """All scores of the Dirichlet distribution."""
        return dirichlet_verdict(self.head.outputs(view))
