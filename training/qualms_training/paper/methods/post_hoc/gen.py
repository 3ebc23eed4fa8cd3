"""Generalised entropy (Liu et al., "GEN: Pushing the Limits of Softmax-Based Out-of-Distribution Detection", CVPR 2023)."""

from dataclasses import dataclass

import numpy as np
from scipy.special import softmax

from qualms_training.paper.material import Frozen, View
from qualms_training.paper.method import PostHoc, Verdict
from qualms_training.recipe import Count, Positive


@dataclass
class GEN(PostHoc):
    """Σ p^γ (1 − p)^γ over the largest probabilities; nothing is learned."""

    gamma: Positive = 0.1
    largest: Count = 100

    def fit(self, frozen: Frozen) -> int:
        """Nothing to learn."""
        return 0

    def score(self, view: View) -> Verdict:
        """The base's classes, and their generalised entropy."""
        probabilities = np.sort(softmax(view.logits, axis=1), axis=1)
        top = probabilities[:, -self.largest :]
        rest = 1 - top
        rest[:, -1] = probabilities[:, :-1].sum(axis=1)  # where 1 − p would round to 0
        return Verdict(view.predictions, {"generalised_entropy": (top**self.gamma * rest**self.gamma).sum(axis=1)})
