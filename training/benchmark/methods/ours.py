"""The Dirichlet meta-model (Shen et al., "Post-hoc Uncertainty Learning using a Dirichlet Meta-Model", AAAI 2023)."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from training.benchmark.material import Frozen, View
from training.benchmark.method import PostHoc, Verdict
from training.benchmark.methods.heads import TrainedHead, dirichlet_verdict, taps, train_head
from training.meta import build_meta


@dataclass
class Ours(PostHoc):
    """The recipe's meta-model; its class is that of most evidence, as in the paper, not the base's."""

    stop: Literal["ood", "misclassification"] = "ood"
    """what training is stopped by: noisy copies, or errors of the base"""
    share: float = 1.0
    """of the training images"""

    def fit(self, frozen: Frozen) -> int:
        """Train on the taps, and stop where validation says."""
        view, section = frozen.train.view, frozen.recipe.meta
        if self.stop == "misclassification":
            section = section.model_copy(update={"stop_task": self.stop, "stop_score": "error_probability"})
        widths = [(tap.shape[1],) for tap in view.features.taps]
        self.head = TrainedHead(build_meta(section, widths, frozen.classes, frozen.seed), taps)
        some = None
        if self.share < 1:
            count = round(self.share * len(view))
            some = np.sort(np.random.default_rng([frozen.seed, 10]).permutation(len(view))[:count])
        return train_head(frozen, self.head, section, chosen=some)

    def score(self, view: View) -> Verdict:
        """All scores of the Dirichlet distribution."""
        return dirichlet_verdict(self.head.outputs(view))
