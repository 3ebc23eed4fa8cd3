"""Mahalanobis++ (Mueller & Hein, "Mahalanobis++: Improving OOD Detection via Feature Normalization", ICML 2025)."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from qualms_training.paper.material import Frozen, View
from qualms_training.paper.method import PostHoc, Verdict
from qualms_training.paper.methods.post_hoc.geometry import Array, Gaussian, unit


@dataclass
class MahalanobisPlusPlus(PostHoc):
    """Distance to the nearest class mean under one shared covariance, of features of unit length."""

    where: Literal["penultimate", "taps"] = "penultimate"
    """`taps`: the recipe's taps, each of unit length, side by side"""

    def fit(self, frozen: Frozen) -> int:
        """Class means and covariance of the training features."""
        self.gaussian = Gaussian.fit(
            self._features(frozen.train.view), frozen.train.labels, frozen.head.weight.shape[0]
        )
        return self.gaussian.size

    def score(self, view: View) -> Verdict:
        """The base's classes, and the distance to the nearest class mean."""
        return Verdict(view.predictions, {"distance": self.gaussian.distances(self._features(view)).min(axis=1)})

    def _features(self, view: View) -> Array:
        if self.where == "penultimate":
            return unit(view.penultimate)
        return np.concatenate([unit(np.asarray(tap, dtype=np.float32)) for tap in view.features.taps], axis=1)
