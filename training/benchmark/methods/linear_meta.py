"""The paper's ablation of structure: one linear layer on the last feature instead of the whole meta-model."""

from dataclasses import dataclass

from training.benchmark.material import Frozen, View
from training.benchmark.method import PostHoc, Verdict
from training.benchmark.methods.heads import FirstOnly, TrainedHead, dirichlet_verdict, last, seeded_linear, train_head
from training.meta import SoftClamp


@dataclass
class LinearMeta(PostHoc):
    """z = log α linear in the penultimate feature, trained and stopped like the meta-model."""

    def fit(self, frozen: Frozen) -> int:
        """Train by the ELBO."""
        layer = seeded_linear(frozen.head.weight.shape[1], frozen.classes, frozen.seed)
        self.head = TrainedHead(FirstOnly(layer, SoftClamp()), last)
        return train_head(frozen, self.head, frozen.recipe.meta)

    def score(self, view: View) -> Verdict:
        """All scores of the Dirichlet distribution."""
        return dirichlet_verdict(self.head.outputs(view))
