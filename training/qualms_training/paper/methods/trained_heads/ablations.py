"""The paper's ablations of the meta-model: its structure, its loss, and both."""

from dataclasses import dataclass

from qualms_training.meta.meta_model import SoftClamp
from qualms_training.paper.inputs import BaseOutputs, PostHocInputs
from qualms_training.paper.method import MethodOutput, NoiseChains, PostHocMethod
from qualms_training.paper.methods.score_functions import dirichlet_output, softmax_output
from qualms_training.paper.methods.trained_heads.heads import (
    cross_entropy,
    linear_head,
    meta_head,
    stopping_noise,
    train_head,
)
from qualms_training.recipe import Recipe


@dataclass
class _Ablation(PostHocMethod):
    def seen_noise(self, recipe: Recipe, score: str) -> NoiseChains:
        """The noisy copies used for early stopping."""
        return stopping_noise(recipe.meta)


@dataclass
class LinearMeta(_Ablation):
    """One linear layer from the penultimate feature to z = log α, trained and stopped like the meta-model."""

    def fit(self, inputs: PostHocInputs) -> int:
        """Train with the ELBO."""
        self.head = linear_head(inputs, SoftClamp())
        return train_head(inputs, self.head, inputs.recipe.meta)

    def score(self, outputs: BaseOutputs) -> MethodOutput:
        """All scores of the Dirichlet distribution."""
        return dirichlet_output(self.head(outputs))


@dataclass
class CrossEnt(_Ablation):
    """The full meta-model with its outputs used as logits, trained with cross-entropy."""

    def fit(self, inputs: PostHocInputs) -> int:
        """Train with cross-entropy, and stop early like the meta-model."""
        self.head = meta_head(inputs, inputs.recipe.meta)
        return train_head(inputs, self.head, inputs.recipe.meta, cross_entropy())

    def score(self, outputs: BaseOutputs) -> MethodOutput:
        """Class, entropy and 1 − max probability of the softmax."""
        return softmax_output(self.head(outputs))


@dataclass
class LastLayer(CrossEnt):
    """A new last layer of the base, trained with cross-entropy: of the meta-model, only the early stopping remains."""

    def fit(self, inputs: PostHocInputs) -> int:
        """Train the layer."""
        self.head = linear_head(inputs)
        return train_head(inputs, self.head, inputs.recipe.meta, cross_entropy())
