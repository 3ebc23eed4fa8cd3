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
from qualms_training.fitting.meta_trainer import head_outputs as model_outputs
from qualms_training.meta.meta_model import Scale
from qualms_training.models import count_parameters
from qualms_training.paper.inputs import BaseOutputs, PostHocInputs
from qualms_training.paper.method import MethodOutput, NotApplicableError, PostHocMethod
from qualms_training.paper.methods.trained_heads.heads import seeded_linear
from qualms_training.recipe import Count, Positive


class Probes(nn.Module):
    """One linear softmax classifier per tap."""

    def __init__(self, widths: list[int], classes: int, seed: int) -> None:
        super().__init__()
        self.scales = nn.ModuleList(Scale() for _ in widths)
        self.layers = nn.ModuleList(seeded_linear(width, classes, seed) for width in widths)

    def fit_scales(self, taps: list[NDArray[np.float32]]) -> None:
        """Set the scale of each tap from training features."""
        for scale, tap in zip(self.scales, taps, strict=True):
            assert isinstance(scale, Scale)
            scale.fit(torch.from_numpy(np.array(tap)))

    def forward(self, features: list[Tensor]) -> Tensor:
        """Taps (N, D_j) to the log probabilities of all probes, concatenated, (N, taps · K)."""
        parts = zip(self.layers, self.scales, features, strict=True)
        return torch.cat([layer(scale(x)).log_softmax(dim=1) for layer, scale, x in parts], dim=1)


@dataclass
class Whitebox(PostHocMethod):
    """Probes on the taps, and boosted trees that predict from their probabilities whether the base is right.

    The authors also try logistic regression, but a linear function of the probabilities cannot depend on the largest
    of them.
    """

    epochs: Count = 5
    """epochs of the probes"""
    batch: Count = 256
    lr: Positive = 1e-3
    """learning rate of Adam"""
    trees: Count = 100

    def fit(self, inputs: PostHocInputs) -> int:
        """Train the probes on the training images, and the trees on images that the base was not trained on."""
        features, labels = inputs.train.outputs.features, inputs.train.labels
        classes = inputs.classes
        self.probes = Probes([tap.shape[1] for tap in features.taps], classes, inputs.seed)
        self.probes.fit_scales(features.taps)
        self.probes.to(inputs.device)
        targets = torch.from_numpy(labels).to(inputs.device)

        def loss(indices: NDArray[np.int64], _: torch.Generator) -> Tensor:
            logs = self.probes(features.batch(indices, inputs.device))
            truth = targets[torch.from_numpy(indices)]
            parts = [F.nll_loss(part, truth) for part in logs.split(classes, dim=1)]
            return torch.stack(parts).sum()

        schedule = Schedule(len(labels), self.batch, self.epochs, lambda _: self.lr, inputs.seed)
        adam = torch.optim.Adam(self.probes.parameters(), lr=self.lr)
        digest = fingerprint(str(features.folder), self.epochs, self.batch, self.lr, inputs.seed)
        run(self.probes, adam, loss, schedule, inputs.folder / "probes.checkpoint.pt", digest)

        held_out = [inputs.validation, inputs.fit]
        right = np.concatenate([part.outputs.predictions == part.labels for part in held_out])
        if right.all() or not right.any():
            raise NotApplicableError("the base makes no errors on held-out images to learn from")
        probabilities = np.concatenate([self.probabilities(part.outputs) for part in held_out])
        self.trees_model = GradientBoostingClassifier(n_estimators=self.trees, random_state=inputs.seed)
        self.trees_model.fit(probabilities, right)
        nodes = sum(tree.tree_.node_count for tree in self.trees_model.estimators_.ravel())
        return int(count_parameters(self.probes) + nodes)

    def score(self, outputs: BaseOutputs) -> MethodOutput:
        """The base's classes and the probability that they are wrong."""
        wrong = self.trees_model.predict_proba(self.probabilities(outputs))[:, 0]
        return MethodOutput(outputs.predictions, {"wrong_probability": wrong})

    def probabilities(self, outputs: BaseOutputs) -> NDArray[np.float64]:
        """Probabilities of the probes, followed by those of the base, (N, taps · K + K)."""
        device = next(self.probes.parameters()).device
        probes = model_outputs(self.probes, outputs.features, device).double().exp().numpy()
        return np.concatenate([probes, softmax(outputs.logits, axis=1)], axis=1)
