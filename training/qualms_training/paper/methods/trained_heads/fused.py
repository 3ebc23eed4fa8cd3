"""Our extensions of the paper: the fused score of a bundle, and a Dirichlet distribution with evidence from density."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import softmax
from torch import Tensor

from qualms_training.data.noise import NOISES
from qualms_training.meta.dirichlet import dirichlet_scores
from qualms_training.meta.evidence import DensityEvidence
from qualms_training.meta.fusion import FusionData
from qualms_training.meta.ood_scores import OodScores
from qualms_training.paper.inputs import BaseOutputs, PostHocInputs
from qualms_training.paper.method import MethodOutput, NoiseChains, PostHocMethod
from qualms_training.paper.methods.score_functions import dirichlet_output
from qualms_training.paper.methods.trained_heads.dirichlet_meta import DirichletMeta
from qualms_training.paper.methods.trained_heads.heads import FeatureHead
from qualms_training.recipe import Recipe


@dataclass
class Fused(PostHocMethod):
    """The fused score of a bundle. With evidence from density, also the scores of that Dirichlet distribution."""

    evidence: Literal["meta", "density"] = "meta"
    """source of α: the meta-model, or density and the base's softmax"""

    def fit(self, inputs: PostHocInputs) -> int:
        """Fit the density on the training images, and the weights and the evidence on the fit split."""
        taps, fit = inputs.train.outputs.features.taps, inputs.fit
        count = len(fit.labels)
        self.ood_scores = OodScores([tap.shape[1] for tap in taps], inputs.head.weight.shape[0], count)
        self.ood_scores.density.fit([np.asarray(tap, dtype=np.float32) for tap in taps], inputs.train.labels)
        size = sum(tensor.numel() for tensor in self.ood_scores.buffers())
        self.head: FeatureHead | None = None
        self.density_evidence: DensityEvidence | None = None
        if self.evidence == "meta":
            meta = DirichletMeta()
            size += meta.fit(inputs)
            self.head = meta.head
        else:
            self.density_evidence = DensityEvidence(count)
            self.density_evidence.fit(softmax(fit.outputs.logits, axis=1), self._distance(fit.outputs), fit.labels)
        wrong = fit.outputs.predictions != fit.labels
        noisy = {kind: self._components(outputs) for kind, outputs in inputs.noisy_fit().items()}
        self.ood_scores.fusion.fit(FusionData(self._components(fit.outputs), wrong, noisy))
        return size

    def seen_noise(self, recipe: Recipe, score: str) -> NoiseChains:
        """For the fused score every noise, because its weights are fitted on them, and the meta-model's stopping noise.

        Evidence from density is fitted on clean images only, so the scores of its Dirichlet have seen no noise.
        """
        meta = DirichletMeta().seen_noise(recipe, score) if self.evidence == "meta" else []
        return [*meta, *([kind] for kind in NOISES)] if score == "fused" else meta

    def score(self, outputs: BaseOutputs) -> MethodOutput:
        """The base's classes and the fused score; with evidence from density also all scores of its Dirichlet."""
        components = torch.from_numpy(self._components(outputs)).float()
        with torch.inference_mode():
            values = {"fused": self.ood_scores.fusion(components).double().numpy()}
        if self.density_evidence is not None:
            values |= dirichlet_output(self._log_alpha(outputs)).scores
        return MethodOutput(outputs.predictions, values)

    def _components(self, outputs: BaseOutputs) -> NDArray[np.float64]:
        """The scores that are fused, (N, J)."""
        information = dirichlet_scores(self._log_alpha(outputs)).mutual_information
        return self.ood_scores.all_components(outputs.features.logits, information, outputs.features.taps)

    def _distance(self, outputs: BaseOutputs) -> NDArray[np.float64]:
        """Distance from the training data, (N,)."""
        no_information = torch.zeros(len(outputs))
        return self.ood_scores.all_components(outputs.features.logits, no_information, outputs.features.taps)[:, 2]

    def _log_alpha(self, outputs: BaseOutputs) -> Tensor:
        if self.head is not None:
            return self.head(outputs)
        assert self.density_evidence is not None
        distance = torch.from_numpy(self._distance(outputs)).float()
        with torch.inference_mode():
            log_alpha: Tensor = self.density_evidence(torch.from_numpy(softmax(outputs.logits, axis=1)), distance)
            return log_alpha
