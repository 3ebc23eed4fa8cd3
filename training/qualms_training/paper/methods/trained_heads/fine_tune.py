"""The paper's baselines of transfer: a new last layer or meta-model on a frozen base, trained with cross-entropy."""

from dataclasses import dataclass
from typing import Any, Literal

from qualms_training.paper.inputs import BaseOutputs, PostHocInputs
from qualms_training.paper.method import MethodOutput, PostHocMethod
from qualms_training.paper.methods.score_functions import softmax_output
from qualms_training.paper.methods.trained_heads.heads import cross_entropy, linear_head, meta_head, train_head
from qualms_training.recipe import Count, NotNegative, Positive


@dataclass
class FineTune(PostHocMethod):
    """A new last layer, or the structure of the meta-model, trained for all epochs without early stopping.

    The hyper-parameters are those of the paper's transfer experiment, which does not mention early stopping here.
    """

    structure: Literal["last-layer", "meta"] = "last-layer"
    epochs: Count = 50
    batch: Count = 128
    lr: Positive = 0.01
    """constant learning rate of SGD with momentum 0.9"""
    weight_decay: NotNegative = 1e-4

    def fit(self, inputs: PostHocInputs) -> int:
        """Train the new layers."""
        meta = inputs.recipe.meta
        self.head = meta_head(inputs, meta) if self.structure == "meta" else linear_head(inputs)
        section = meta.model_copy(update=self._optimisation())
        return train_head(inputs, self.head, section, cross_entropy(), stop=False)

    def score(self, outputs: BaseOutputs) -> MethodOutput:
        """Class, entropy and 1 − max probability of the softmax."""
        return softmax_output(self.head(outputs))

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
