"""Generalised entropy (Liu et al., "GEN: Pushing the Limits of Softmax-Based Out-of-Distribution Detection", CVPR 2023)."""

from dataclasses import dataclass

import numpy as np
from scipy.special import softmax

from qualms_training.paper.inputs import BaseOutputs, PostHocInputs
from qualms_training.paper.method import MethodOutput, PostHocMethod
from qualms_training.recipe import Count, Positive


@dataclass
class GEN(PostHocMethod):
    """Σ p^γ (1 − p)^γ over the largest probabilities."""

    gamma: Positive = 0.1
    largest: Count = 100
    """number of probabilities in the sum"""

    def fit(self, inputs: PostHocInputs) -> int:
        """Nothing to learn."""
        return 0

    def score(self, outputs: BaseOutputs) -> MethodOutput:
        """The base's classes and the generalised entropy."""
        probabilities = np.sort(softmax(outputs.logits, axis=1), axis=1)
        top = probabilities[:, -self.largest :]
        rest = 1 - top
        rest[:, -1] = probabilities[:, :-1].sum(axis=1)  # 1 − p of the largest probability would round to 0
        return MethodOutput(
            outputs.predictions, {"generalised_entropy": (top**self.gamma * rest**self.gamma).sum(axis=1)}
        )
