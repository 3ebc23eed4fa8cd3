"""Distance to decision boundaries (Liu & Qin, "Fast Decision Boundary based Out-of-Distribution Detector", ICML 2024)."""

from dataclasses import dataclass

import numpy as np

from qualms_training.paper.inputs import BaseOutputs, PostHocInputs
from qualms_training.paper.method import MethodOutput, PostHocMethod


@dataclass
class FDBD(PostHocMethod):
    """Mean distance to the boundaries of the predicted class, divided by the distance to the mean training feature."""

    def fit(self, inputs: PostHocInputs) -> int:
        """Compute the mean training feature and the length of each boundary's normal vector."""
        self.mean = inputs.train.outputs.penultimate.mean(axis=0, dtype=np.float64)
        weight = inputs.head.weight
        self.normal_lengths = np.linalg.norm(weight[:, None] - weight[None], axis=2)
        # Avoid 0/0 for the predicted class itself, whose gap in `score` is 0.
        np.fill_diagonal(self.normal_lengths, 1.0)
        return int(self.mean.size + self.normal_lengths.size)

    def score(self, outputs: BaseOutputs) -> MethodOutput:
        """The base's classes and the negative relative distance to the boundaries."""
        chosen = outputs.predictions
        gaps = outputs.logits.max(axis=1, keepdims=True) - outputs.logits
        boundary = (gaps / self.normal_lengths[chosen]).sum(axis=1) / (gaps.shape[1] - 1)
        spread = np.linalg.norm(outputs.penultimate - self.mean, axis=1)
        return MethodOutput(chosen, {"boundary": -boundary / np.maximum(spread, np.finfo(np.float32).tiny)})
