"""Virtual-logit matching (Wang et al., "ViM: Out-of-Distribution with Virtual-Logit Matching", CVPR 2022)."""

from dataclasses import dataclass

import numpy as np
from scipy.special import logsumexp

from qualms_training.paper.material import Frozen, View
from qualms_training.paper.method import NotApplicableError, PostHoc, Verdict
from qualms_training.paper.methods.post_hoc.geometry import Array


def principal_dimensions(width: int) -> int:
    """The paper's choice for penultimate features of `width` units: 1000 of 2048, 512 of 768, half of fewer."""
    return 1000 if width >= 2048 else 512 if width >= 768 else width // 2


@dataclass
class ViM(PostHoc):
    """Length of the feature outside the principal space of training, scaled to logits, less the log-sum of these."""

    def fit(self, frozen: Frozen) -> int:
        """Principal space around the point whose logits are all zero, and the scale of the residual."""
        width = frozen.head.weight.shape[1]
        kept = principal_dimensions(width)
        if kept < 1:
            raise NotApplicableError(f"the penultimate feature has {width} unit(s), and no residual space")
        self.origin = -np.linalg.pinv(frozen.head.weight) @ frozen.head.bias
        centred = frozen.train.view.penultimate - self.origin
        _, vectors = np.linalg.eigh(centred.T @ centred / len(centred))  # eigenvalues ascend
        self.residual_space = vectors[:, : width - kept]
        lengths = self._lengths(frozen.train.view)
        self.scale = float(frozen.train.view.logits.max(axis=1).mean() / lengths.mean())
        return self.origin.size + self.residual_space.size + 1

    def score(self, view: View) -> Verdict:
        """The base's classes, and the virtual logit less the energy of the others."""
        virtual = self.scale * self._lengths(view)
        return Verdict(view.predictions, {"virtual_logit": virtual - logsumexp(view.logits, axis=1)})

    def _lengths(self, view: View) -> Array:
        return np.asarray(np.linalg.norm((view.penultimate - self.origin) @ self.residual_space, axis=1))
