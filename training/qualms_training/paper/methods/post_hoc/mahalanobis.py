"""Mahalanobis++ (Mueller & Hein, "Mahalanobis++: Improving OOD Detection via Feature Normalization", ICML 2025)."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from qualms_training.paper.inputs import BaseOutputs, PostHocInputs
from qualms_training.paper.method import MethodOutput, PostHocMethod
from qualms_training.paper.methods.post_hoc.geometry import Array, Gaussian, unit


@dataclass
class MahalanobisPlusPlus(PostHocMethod):
    """Distance of the unit-length feature to the nearest class mean, with one covariance for all classes."""

    where: Literal["penultimate", "taps"] = "penultimate"
    """feature to use; `taps` are the recipe's taps, each scaled to unit length, concatenated"""

    def fit(self, inputs: PostHocInputs) -> int:
        """Compute the class means and the covariance of the training features."""
        features = self._features(inputs.train.outputs)
        self.gaussian = Gaussian.fit(features, inputs.train.labels, inputs.head.weight.shape[0])
        return self.gaussian.size

    def score(self, outputs: BaseOutputs) -> MethodOutput:
        """The base's classes and the distance to the nearest class mean."""
        distances = self.gaussian.distances(self._features(outputs))
        return MethodOutput(outputs.predictions, {"distance": distances.min(axis=1)})

    def _features(self, outputs: BaseOutputs) -> Array:
        if self.where == "penultimate":
            return unit(outputs.penultimate)
        return np.concatenate([unit(np.asarray(tap, dtype=np.float32)) for tap in outputs.features.taps], axis=1)
