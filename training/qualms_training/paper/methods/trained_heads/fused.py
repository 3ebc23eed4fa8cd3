"""Past the paper: the density of the tapped features, fused with the other doubts, or setting the evidence itself."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import softmax
from torch import Tensor

from qualms_training.data.noise import NOISES
from qualms_training.meta.dirichlet import scores
from qualms_training.meta.evidence import DensityEvidence
from qualms_training.meta.fusion import Shown
from qualms_training.meta.ood_scores import OodScores
from qualms_training.paper.material import Frozen, View
from qualms_training.paper.method import Chains, PostHoc, Verdict
from qualms_training.paper.methods.trained_heads.dirichlet_meta import Ours
from qualms_training.paper.methods.trained_heads.heads import TrainedHead, dirichlet_verdict
from qualms_training.recipe import Recipe


@dataclass
class Fused(PostHoc):
    """The fused score of a bundle; with `evidence` by density, of a Dirichlet whose α that sets, and its own scores."""

    evidence: Literal["meta", "density"] = "meta"
    """what α comes from: the meta-model, or density and the base's softmax"""

    def fit(self, frozen: Frozen) -> int:
        """Density by the training images, weights and evidence by the fit split."""
        train, known = frozen.train.view, frozen.fit
        count = len(known.labels)
        classes = frozen.head.weight.shape[0]
        self.doubter = OodScores([tap.shape[1] for tap in train.features.taps], classes, count)
        self.doubter.density.fit(
            [np.asarray(tap, dtype=np.float32) for tap in train.features.taps], frozen.train.labels
        )
        kept = sum(tensor.numel() for tensor in self.doubter.buffers())
        self.head: TrainedHead | None = None
        self.by_density: DensityEvidence | None = None
        if self.evidence == "meta":
            meta = Ours()
            kept += meta.fit(frozen)
            self.head = meta.head
        else:
            self.by_density = DensityEvidence(count)
            distance = self._doubts(known.view, torch.zeros(count))[:, 2]
            self.by_density.fit(softmax(known.view.logits, axis=1), distance, known.labels)
        wrong = known.view.predictions != known.labels
        noisy = {kind: self._all_doubts(view) for kind, view in frozen.fit_noise().items()}
        self.doubter.fusion.fit(Shown(self._all_doubts(known.view), wrong, noisy))
        return kept

    def seen_noise(self, recipe: Recipe, score: str) -> Chains:
        """Every noise by itself, which the weights are found by, and what the meta-model is stopped by.

        Evidence by density is set by clean images alone, and so are the scores of its Dirichlet.
        """
        meta = Ours().seen_noise(recipe, score) if self.evidence == "meta" else []
        return [*meta, *([kind] for kind in NOISES)] if score == "fused" else meta

    def score(self, view: View) -> Verdict:
        """The base's classes, and the fused score; with evidence by density also all scores of its Dirichlet."""
        doubts = torch.from_numpy(self._all_doubts(view)).float()
        with torch.inference_mode():
            found = {"fused": self.doubter.fusion(doubts).double().numpy()}
        if self.by_density is not None:
            found |= dirichlet_verdict(self._log_alpha(view)).scores
        return Verdict(view.predictions, found)

    def _all_doubts(self, view: View) -> NDArray[np.float64]:
        """What is fused, (N, J)."""
        return self._doubts(view, scores(self._log_alpha(view)).mutual_information)

    def _log_alpha(self, view: View) -> Tensor:
        if self.head is not None:
            return self.head.outputs(view)
        assert self.by_density is not None
        distance = self._doubts(view, torch.zeros(len(view)))[:, 2]
        with torch.inference_mode():
            opinion = torch.from_numpy(softmax(view.logits, axis=1))
            made: Tensor = self.by_density(opinion, torch.from_numpy(distance).float())
            return made

    def _doubts(self, view: View, information: Tensor) -> NDArray[np.float64]:
        return self.doubter.all_doubts(view.features, information)
