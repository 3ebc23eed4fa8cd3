"""Virtual-logit matching (Wang et al., "ViM: Out-of-Distribution with Virtual-Logit Matching", CVPR 2022)."""

from dataclasses import dataclass

import numpy as np
from scipy.special import logsumexp

from qualms_training.paper.inputs import BaseOutputs, PostHocInputs
from qualms_training.paper.method import MethodOutput, NotApplicableError, PostHocMethod
from qualms_training.paper.methods.post_hoc.geometry import Array


def principal_dimensions(width: int) -> int:
    """Dimensions of the principal space, as in the paper: 1000 for 2048 units, 512 for 768, half for fewer."""
    return 1000 if width >= 2048 else 512 if width >= 768 else width // 2


@dataclass
class ViM(PostHocMethod):
    """Length of the feature's residual outside the principal space, scaled to a logit, minus the log-sum-exp of the logits."""

    def fit(self, inputs: PostHocInputs) -> int:
        """Compute the principal space around the point whose logits are all zero, and the scale of the residual."""
        width = inputs.head.weight.shape[1]
        principal = principal_dimensions(width)
        if principal < 1:
            raise NotApplicableError(f"the penultimate feature has {width} unit(s), and no residual space")
        self.origin = -np.linalg.pinv(inputs.head.weight) @ inputs.head.bias
        train = inputs.train.outputs
        centred = train.penultimate - self.origin
        _, vectors = np.linalg.eigh(centred.T @ centred / len(centred))  # eigenvalues in ascending order
        self.residual_space = vectors[:, : width - principal]
        self.scale = float(train.logits.max(axis=1).mean() / self._lengths(train).mean())
        return self.origin.size + self.residual_space.size + 1

    def score(self, outputs: BaseOutputs) -> MethodOutput:
        """The base's classes and the virtual logit minus the log-sum-exp of the logits."""
        virtual = self.scale * self._lengths(outputs)
        return MethodOutput(outputs.predictions, {"virtual_logit": virtual - logsumexp(outputs.logits, axis=1)})

    def _lengths(self, outputs: BaseOutputs) -> Array:
        return np.asarray(np.linalg.norm((outputs.penultimate - self.origin) @ self.residual_space, axis=1))
