"""Energy (Liu et al., "Energy-based Out-of-distribution Detection", NeurIPS 2020)."""

from dataclasses import dataclass

from scipy.special import logsumexp

from qualms_training.paper.material import Frozen, View
from qualms_training.paper.method import PostHoc, Verdict


@dataclass
class Energy(PostHoc):
    """The free energy −log Σ exp(logit); nothing is learned."""

    def fit(self, frozen: Frozen) -> int:
        """Nothing to learn."""
        return 0

    def score(self, view: View) -> Verdict:
        """The base's classes, and their energy."""
        return Verdict(view.predictions, {"energy": -logsumexp(view.logits, axis=1)})
