"""The paper's ablation that keeps only the early stopping: a new last layer of the base."""

from dataclasses import dataclass

from qualms_training.paper.inputs import BaseOutputs, PostHocInputs
from qualms_training.paper.method import NoiseChains, PostHocMethod, Verdict
from qualms_training.paper.methods.trained_heads.heads import (
    FirstOnly,
    TrainedHead,
    cross_entropy,
    penultimate_feature,
    seeded_linear,
    stopping_noise,
    train_head,
)
from qualms_training.paper.methods.verdicts import softmax_verdict
from qualms_training.recipe import Recipe


@dataclass
class LastLayer(PostHocMethod):
    """A new linear layer on the penultimate feature, trained with cross-entropy and early stopping."""

    def fit(self, inputs: PostHocInputs) -> int:
        """Train the layer."""
        layer = seeded_linear(inputs.head.weight.shape[1], inputs.classes, inputs.seed)
        self.head = TrainedHead(FirstOnly(layer), penultimate_feature)
        return train_head(inputs, self.head, inputs.recipe.meta, cross_entropy())

    def seen_noise(self, recipe: Recipe, score: str) -> NoiseChains:
        """The noisy copies used for early stopping."""
        return stopping_noise(recipe.meta)

    def score(self, outputs: BaseOutputs) -> Verdict:
        """Class, entropy and 1 − max probability of the softmax."""
        return softmax_verdict(self.head(outputs))
