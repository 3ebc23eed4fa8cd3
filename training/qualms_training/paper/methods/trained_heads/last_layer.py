"""The paper's ablation of everything but the stopping: the base's last layer, trained anew."""

from dataclasses import dataclass

from qualms_training.paper.material import Frozen, View
from qualms_training.paper.method import Chains, PostHoc, Verdict
from qualms_training.paper.methods.trained_heads.heads import (
    FirstOnly,
    TrainedHead,
    cross_entropy,
    last,
    seeded_linear,
    softmax_verdict,
    stopping_noise,
    train_head,
)
from qualms_training.recipe import Recipe


@dataclass
class LastLayer(PostHoc):
    """A fresh linear layer on the penultimate feature, by cross-entropy, stopped by the noisy copies."""

    def fit(self, frozen: Frozen) -> int:
        """Train the layer."""
        width = frozen.head.weight.shape[1]
        self.head = TrainedHead(FirstOnly(seeded_linear(width, frozen.classes, frozen.seed)), last)
        return train_head(frozen, self.head, frozen.recipe.meta, cross_entropy())

    def seen_noise(self, recipe: Recipe, score: str) -> Chains:
        """What it is stopped by."""
        return stopping_noise(recipe.meta)

    def score(self, view: View) -> Verdict:
        """Class, entropy and 1 − max probability of its softmax."""
        return softmax_verdict(self.head.outputs(view))
