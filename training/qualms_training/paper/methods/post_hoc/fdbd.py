"""Distance to decision boundaries (Liu & Qin, "Fast Decision Boundary based Out-of-Distribution Detector", ICML 2024)."""

from dataclasses import dataclass

import numpy as np

from qualms_training.paper.material import Frozen, View
from qualms_training.paper.method import PostHoc, Verdict


@dataclass
class FDBD(PostHoc):
    """Mean distance to the boundaries of the predicted class, over the distance to the mean training feature."""

    def fit(self, frozen: Frozen) -> int:
        """The mean training feature, and the length of each boundary's normal."""
        self.mean = frozen.train.view.penultimate.mean(axis=0, dtype=np.float64)
        weight = frozen.head.weight
        self.normals = np.linalg.norm(weight[:, None] - weight[None], axis=2)
        np.fill_diagonal(self.normals, 1.0)  # a class has no boundary with itself, and its gap below is 0
        return int(self.mean.size + self.normals.size)

    def score(self, view: View) -> Verdict:
        """The base's classes, and how near the boundaries are."""
        chosen = view.predictions
        gaps = view.logits.max(axis=1, keepdims=True) - view.logits
        boundary = (gaps / self.normals[chosen]).sum(axis=1) / (gaps.shape[1] - 1)
        spread = np.linalg.norm(view.penultimate - self.mean, axis=1)
        return Verdict(chosen, {"boundary": -boundary / np.maximum(spread, np.finfo(np.float32).tiny)})
