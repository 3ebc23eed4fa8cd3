"""Energy (Liu et al., "Energy-based Out-of-distribution Detection", NeurIPS 2020)."""

from dataclasses import dataclass

from scipy.special import logsumexp

from qualms_training.paper.inputs import BaseOutputs, PostHocInputs
from qualms_training.paper.method import PostHocMethod, Verdict


@dataclass
class Energy(PostHocMethod):
    """The free energy −log Σ exp(logit)."""

    def fit(self, inputs: PostHocInputs) -> int:
        """Nothing to learn."""
        return 0

    def score(self, outputs: BaseOutputs) -> Verdict:
        """The base's classes and the energy."""
        return Verdict(outputs.predictions, {"energy": -logsumexp(outputs.logits, axis=1)})
