"""Nearest neighbours (Sun et al., "Out-of-Distribution Detection with Deep Nearest Neighbors", ICML 2022)."""

from dataclasses import dataclass

import torch

from qualms_training.paper.inputs import BaseOutputs, PostHocInputs
from qualms_training.paper.method import MethodOutput, NotApplicableError, PostHocMethod
from qualms_training.paper.methods.post_hoc.geometry import unit
from qualms_training.recipe import Count

ROWS = 512
"""images whose distances to all training features are computed at once"""


@dataclass
class KNN(PostHocMethod):
    """Distance to the k-th nearest training feature; all features have unit length."""

    k: Count = 50

    def fit(self, inputs: PostHocInputs) -> int:
        """Store the training features."""
        count = len(inputs.train.labels)
        if count < self.k:
            raise NotApplicableError(f"k is {self.k}, and there are {count} training images")
        self.bank = torch.from_numpy(unit(inputs.train.outputs.penultimate)).float().T.contiguous()
        return self.bank.numel()

    def score(self, outputs: BaseOutputs) -> MethodOutput:
        """The base's classes and the squared distance to the k-th neighbour."""
        rows = torch.from_numpy(unit(outputs.penultimate)).float()
        nearest = [(part @ self.bank).topk(self.k, dim=1).values[:, -1] for part in torch.split(rows, ROWS)]
        return MethodOutput(outputs.predictions, {"distance": 2 - 2 * torch.cat(nearest).double().numpy()})
