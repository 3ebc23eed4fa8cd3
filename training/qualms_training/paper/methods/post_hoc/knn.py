"""Nearest neighbours (Sun et al., "Out-of-Distribution Detection with Deep Nearest Neighbors", ICML 2022)."""

from dataclasses import dataclass

import torch

from qualms_training.paper.material import Frozen, View
from qualms_training.paper.method import NotApplicableError, PostHoc, Verdict
from qualms_training.paper.methods.post_hoc.geometry import unit
from qualms_training.recipe import Count

ROWS = 512  # of distances to the whole bank at once


@dataclass
class KNN(PostHoc):
    """Distance to the k-th nearest training feature, all of unit length."""

    k: Count = 50

    def fit(self, frozen: Frozen) -> int:
        """Keep the training features."""
        count = len(frozen.train.labels)
        if count < self.k:
            raise NotApplicableError(f"k is {self.k}, and there are {count} training images")
        self.bank = torch.from_numpy(unit(frozen.train.view.penultimate)).float().T.contiguous()
        return self.bank.numel()

    def score(self, view: View) -> Verdict:
        """The base's classes, and the squared distance to the k-th neighbour."""
        rows = torch.from_numpy(unit(view.penultimate)).float()
        nearest = [(part @ self.bank).topk(self.k, dim=1).values[:, -1] for part in torch.split(rows, ROWS)]
        return Verdict(view.predictions, {"distance": 2 - 2 * torch.cat(nearest).double().numpy()})
