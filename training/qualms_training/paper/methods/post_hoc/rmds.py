"""Relative Mahalanobis distance (Ren et al., "A Simple Fix to Mahalanobis Distance for Improving Near-OOD Detection", 2021)."""

from dataclasses import dataclass

import numpy as np

from qualms_training.paper.material import Frozen, View
from qualms_training.paper.method import PostHoc, Verdict
from qualms_training.paper.methods.post_hoc.geometry import Gaussian


@dataclass
class RMDS(PostHoc):
    """Distance to the nearest class mean, less the distance to the mean of all under the covariance of all."""

    def fit(self, frozen: Frozen) -> int:
        """One Gaussian with a mean a class, one with a single mean."""
        features = frozen.train.view.penultimate.astype(np.float64)
        self.classes = Gaussian.fit(features, frozen.train.labels, frozen.classes)
        self.background = Gaussian.fit(features, np.zeros(len(features), dtype=np.int64), 1)
        return self.classes.size + self.background.size

    def score(self, view: View) -> Verdict:
        """The base's classes, and the relative distance."""
        features = view.penultimate.astype(np.float64)
        relative = self.classes.distances(features) - self.background.distances(features)
        return Verdict(view.predictions, {"relative_distance": relative.min(axis=1)})
