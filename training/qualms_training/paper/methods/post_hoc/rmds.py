"""Relative Mahalanobis distance (Ren et al., "A Simple Fix to Mahalanobis Distance for Improving Near-OOD Detection", 2021)."""

from dataclasses import dataclass

import numpy as np

from qualms_training.paper.inputs import BaseOutputs, PostHocInputs
from qualms_training.paper.method import MethodOutput, PostHocMethod
from qualms_training.paper.methods.post_hoc.geometry import Gaussian


@dataclass
class RMDS(PostHocMethod):
    """Distance to the nearest class mean minus the distance to the overall mean, each with its own covariance."""

    def fit(self, inputs: PostHocInputs) -> int:
        """Fit one Gaussian with a mean per class, and one with a single mean."""
        features = inputs.train.outputs.penultimate.astype(np.float64)
        self.classes = Gaussian.fit(features, inputs.train.labels, inputs.classes)
        self.background = Gaussian.fit(features, np.zeros(len(features), dtype=np.int64), 1)
        return self.classes.size + self.background.size

    def score(self, outputs: BaseOutputs) -> MethodOutput:
        """The base's classes and the relative distance."""
        features = outputs.penultimate.astype(np.float64)
        relative = self.classes.distances(features) - self.background.distances(features)
        return MethodOutput(outputs.predictions, {"relative_distance": relative.min(axis=1)})
