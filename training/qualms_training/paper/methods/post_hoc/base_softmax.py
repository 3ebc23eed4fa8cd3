"""The frozen base's own softmax (Hendrycks & Gimpel, "A Baseline for Detecting Misclassified and
Out-of-Distribution Examples in Neural Networks", ICLR 2017)."""

from dataclasses import dataclass

from qualms_training.paper.material import Frozen, View
from qualms_training.paper.method import PostHoc, Verdict
from qualms_training.paper.methods.post_hoc.probability_scores import softmax_scores


@dataclass
class Base(PostHoc):
    """Entropy and 1 − max probability; nothing is learned."""

    def fit(self, frozen: Frozen) -> int:
        """Nothing to learn."""
        return 0

    def score(self, view: View) -> Verdict:
        """The base's classes, and its softmax's doubt."""
        return Verdict(view.predictions, dict(softmax_scores(view.logits)))
