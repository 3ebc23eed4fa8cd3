"""The softmax of the frozen base (Hendrycks & Gimpel, "A Baseline for Detecting Misclassified and
Out-of-Distribution Examples in Neural Networks", ICLR 2017)."""

from dataclasses import dataclass

from qualms_training.paper.inputs import BaseOutputs, PostHocInputs
from qualms_training.paper.method import MethodOutput, PostHocMethod
from qualms_training.paper.methods.score_functions import softmax_scores


@dataclass
class BaseSoftmax(PostHocMethod):
    """Entropy and 1 − max probability of the base's softmax."""

    def fit(self, inputs: PostHocInputs) -> int:
        """Nothing to learn."""
        return 0

    def score(self, outputs: BaseOutputs) -> MethodOutput:
        """The base's classes and both scores."""
        return MethodOutput(outputs.predictions, dict(softmax_scores(outputs.logits)))
