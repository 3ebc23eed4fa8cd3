"""Whitebox (Chen et al., "Confidence Scoring Using Whitebox Meta-models with Linear Classifier Probes", AISTATS 2019)."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import softmax
from sklearn.ensemble import GradientBoostingClassifier
from torch import Tensor, nn
from torch.nn import functional as F

from qualms_training.files import fingerprint
from qualms_training.fitting.loop import Schedule, run
from qualms_training.fitting.meta_trainer import outputs
from qualms_training.meta.meta_model import Scale
from qualms_training.paper.material import Frozen, View
from qualms_training.paper.method import NotApplicableError, PostHoc, Verdict
from qualms_training.paper.methods.trained_heads.heads import seeded_linear
from qualms_training.recipe import Count, Positive
from qualms_training.reporting.provenance import parameters


class Probes(nn.Module):
    """A linear softmax classifier a tap."""

    def __init__(self, widths: list[int], classes: int, seed: int) -> None:
        super().__init__()
        self.scales = nn.ModuleList(Scale() for _ in widths)
        self.layers = nn.ModuleList(seeded_linear(width, classes, seed) for width in widths)

    def fit_scales(self, taps: list[NDArray[np.float32]]) -> None:
        """Measure the taps' spreads on training features."""
        for scale, tap in zip(self.scales, taps, strict=True):
            assert isinstance(scale, Scale)
            scale.fit(torch.from_numpy(np.array(tap)))

    def forward(self, features: list[Tensor]) -> Tensor:
        """Taps (N, D_j) to the probes' probabilities side by side, (N, taps · K)."""
        parts = zip(self.layers, self.scales, features, strict=True)
        return torch.cat([layer(scale(x)).log_softmax(dim=1) for layer, scale, x in parts], dim=1)


@dataclass
class Whitebox(PostHoc):
    """Probes on the taps; then boosted trees from all their probabilities to whether the base is right.

    The authors also try logistic regression there, but no linear function of probabilities knows how large the
    largest of them is.
    """

    epochs: Count = 5
    batch: Count = 256
    lr: Positive = 1e-3
    """of Adam"""
    trees: Count = 100

    def fit(self, frozen: Frozen) -> int:
        """Probes on training images; the trees on images that the base has not seen."""
        features, labels = frozen.train.view.features, frozen.train.labels
        classes = frozen.classes
        self.probes = Probes([tap.shape[1] for tap in features.taps], classes, frozen.seed)
        self.probes.fit_scales(features.taps)
        self.probes.to(frozen.device)
        targets = torch.from_numpy(labels).to(frozen.device)

        def loss(indices: NDArray[np.int64], _: torch.Generator) -> Tensor:
            logs = self.probes(features.batch(indices, frozen.device))
            truth = targets[torch.from_numpy(indices)]
            parts = [F.nll_loss(part, truth) for part in logs.split(classes, dim=1)]
            return torch.stack(parts).sum()

        schedule = Schedule(len(labels), self.batch, self.epochs, lambda _: self.lr, frozen.seed)
        adam = torch.optim.Adam(self.probes.parameters(), lr=self.lr)
        mark = fingerprint(str(features.folder), self.epochs, self.batch, self.lr, frozen.seed)
        run(self.probes, adam, loss, schedule, frozen.folder / "probes.checkpoint.pt", mark)

        held = [frozen.validation, frozen.fit]
        right = np.concatenate([known.view.predictions == known.labels for known in held])
        if right.all() or not right.any():
            raise NotApplicableError("the base makes no errors on held-out images to learn from")
        seen = np.concatenate([self._probabilities(known.view) for known in held])
        self.decide = GradientBoostingClassifier(n_estimators=self.trees, random_state=frozen.seed).fit(seen, right)
        nodes = sum(tree.tree_.node_count for tree in self.decide.estimators_.ravel())
        return int(parameters(self.probes) + nodes)

    def score(self, view: View) -> Verdict:
        """The base's classes, and the probability that they are wrong."""
        wrong = self.decide.predict_proba(self._probabilities(view))[:, 0]
        return Verdict(view.predictions, {"wrong_probability": wrong})

    def _probabilities(self, view: View) -> NDArray[np.float64]:
        """Of the probes and, as the last of them, of the base itself."""
        device = next(self.probes.parameters()).device
        probes = outputs(self.probes, view.features, device).double().exp().numpy()
        return np.concatenate([probes, softmax(view.logits, axis=1)], axis=1)
