"""The paper's ablation of the loss: the full meta-model, trained with cross-entropy."""

from dataclasses import dataclass

from qualms_training.meta.meta_model import build_meta
from qualms_training.paper.inputs import BaseOutputs, PostHocInputs
from qualms_training.paper.method import NoiseChains, PostHocMethod, Verdict
from qualms_training.paper.methods.trained_heads.heads import (
    TrainedHead,
    cross_entropy,
    stopping_noise,
    tap_features,
    train_head,
)
from qualms_training.paper.methods.verdicts import softmax_verdict
from qualms_training.recipe import Recipe


@dataclass
class CrossEnt(PostHocMethod):
    """The meta-model with its outputs used as logits."""

    def fit(self, inputs: PostHocInputs) -> int:
        """Train with cross-entropy, and stop early by the recipe's rule."""
        widths = [(tap.shape[1],) for tap in inputs.train.outputs.features.taps]
        model = build_meta(inputs.recipe.meta, widths, inputs.classes, inputs.seed)
        self.head = TrainedHead(model, tap_features)
        return train_head(inputs, self.head, inputs.recipe.meta, cross_entropy())

    def seen_noise(self, recipe: Recipe, score: str) -> NoiseChains:
        """The noisy copies used for early stopping."""
        return stopping_noise(recipe.meta)

    def score(self, outputs: BaseOutputs) -> Verdict:
        """Class, entropy and 1 − max probability of the softmax."""
        return softmax_verdict(self.head(outputs))
