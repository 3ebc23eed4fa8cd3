"""The paper's baselines of transfer: a frozen source network with a new end, trained by cross-entropy."""

from dataclasses import dataclass
from typing import Any, Literal

from qualms_training.meta.meta_model import build_meta
from qualms_training.paper.material import Frozen, View
from qualms_training.paper.method import PostHoc, Verdict
from qualms_training.paper.methods.trained_heads.heads import (
    FirstOnly,
    TrainedHead,
    cross_entropy,
    last,
    seeded_linear,
    softmax_verdict,
    taps,
    train_head,
)
from qualms_training.recipe import Count, NotNegative, Positive


@dataclass
class FineTune(PostHoc):
    """A new last layer, or the whole structure of the meta-model, trained to the end as one who wants accuracy would.

    The figures are the paper's for transfer; it says nothing of stopping these early.
    """

    structure: Literal["last-layer", "meta"] = "last-layer"
    epochs: Count = 50
    batch: Count = 128
    lr: Positive = 0.01
    """of SGD with momentum 0.9, the same for all steps"""
    weight_decay: NotNegative = 1e-4

    def fit(self, frozen: Frozen) -> int:
        """Train the new end."""
        if self.structure == "meta":
            widths = [(tap.shape[1],) for tap in frozen.train.view.features.taps]
            self.head = TrainedHead(build_meta(frozen.recipe.meta, widths, frozen.classes, frozen.seed), taps)
        else:
            width = frozen.head.weight.shape[1]
            self.head = TrainedHead(FirstOnly(seeded_linear(width, frozen.classes, frozen.seed)), last)
        section = frozen.recipe.meta.model_copy(update=self._optimisation())
        return train_head(frozen, self.head, section, cross_entropy(), stop=False)

    def score(self, view: View) -> Verdict:
        """Class, entropy and 1 − max probability of its softmax."""
        return softmax_verdict(self.head.outputs(view))

    def _optimisation(self) -> dict[str, Any]:
        return {
            "epochs": self.epochs,
            "batch": self.batch,
            "optimizer": "sgd",
            "lr": self.lr,
            "momentum": 0.9,
            "nesterov": False,
            "weight_decay": self.weight_decay,
            "schedule": "constant",
            "milestones": [],
            "factors": [],
        }
