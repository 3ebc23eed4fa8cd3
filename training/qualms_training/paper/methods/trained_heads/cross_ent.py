"""The paper's ablation of the loss: the whole meta-model, trained by cross-entropy."""

from dataclasses import dataclass

from qualms_training.meta.meta_model import build_meta
from qualms_training.paper.material import Frozen, View
from qualms_training.paper.method import Chains, PostHoc, Verdict
from qualms_training.paper.methods.trained_heads.heads import (
    TrainedHead,
    cross_entropy,
    softmax_verdict,
    stopping_noise,
    taps,
    train_head,
)
from qualms_training.recipe import Recipe


@dataclass
class CrossEnt(PostHoc):
    """The meta-model's outputs as logits."""

    def fit(self, frozen: Frozen) -> int:
        """Train by cross-entropy, and stop by the noisy copies all the same."""
        widths = [(tap.shape[1],) for tap in frozen.train.view.features.taps]
        model = build_meta(frozen.recipe.meta, widths, frozen.classes, frozen.seed)
        self.head = TrainedHead(model, taps)
        return train_head(frozen, self.head, frozen.recipe.meta, cross_entropy())

    def seen_noise(self, recipe: Recipe, score: str) -> Chains:
        """What it is stopped by."""
        return stopping_noise(recipe.meta)

    def score(self, view: View) -> Verdict:
        """Class, entropy and 1 − max probability of its softmax."""
        return softmax_verdict(self.head.outputs(view))
