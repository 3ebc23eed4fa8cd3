"""Energy (Liu et al., "Energy-based Out-of-distribution Detection", NeurIPS 2020)."""

from dataclasses import dataclass

from scipy.special import logsumexp

from qualms_training.paper.inputs import BaseOutputs, PostHocInputs
from qualms_training.paper.method import MethodOutput, PostHocMethod


@dataclass
class Energy(PostHocMethod):
    """The free energy −log Σ exp(logit)."""

    def fit(self, inputs: PostHocInputs) -> int:
        """Nothing to learn."""
        return 0

    def score(self, outputs: BaseOutputs) -> MethodOutput:
        """The base's classes and the energy."""
        return MethodOutput(outputs.predictions, {"energy": -logsumexp(outputs.logits, axis=1)})
