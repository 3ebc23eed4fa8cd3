"""The paper's ablation of the structure: one linear layer on the penultimate feature instead of the full meta-model."""

from dataclasses import dataclass

from qualms_training.meta.meta_model import SoftClamp
from qualms_training.paper.inputs import BaseOutputs, PostHocInputs
from qualms_training.paper.method import NoiseChains, PostHocMethod, Verdict
from qualms_training.paper.methods.trained_heads.heads import (
    FirstOnly,
    TrainedHead,
    penultimate_feature,
    seeded_linear,
    stopping_noise,
    train_head,
)
from qualms_training.paper.methods.verdicts import dirichlet_verdict
from qualms_training.recipe import Recipe


@dataclass
class LinearMeta(PostHocMethod):
    """z = log α is linear in the penultimate feature; training and early stopping are those of the meta-model."""

    def fit(self, inputs: PostHocInputs) -> int:
        """Train with the ELBO."""
        layer = seeded_linear(inputs.head.weight.shape[1], inputs.classes, inputs.seed)
        self.head = TrainedHead(FirstOnly(layer, SoftClamp()), penultimate_feature)
        return train_head(inputs, self.head, inputs.recipe.meta)

    def seen_noise(self, recipe: Recipe, score: str) -> NoiseChains:
        """The noisy copies used for early stopping."""
        return stopping_noise(recipe.meta)

    def score(self, outputs: BaseOutputs) -> Verdict:
        """All scores of the Dirichlet distribution."""
        return dirichlet_verdict(self.head(outputs))
