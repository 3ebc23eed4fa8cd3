"""A bundle's flag score and its joined α, with the modules of the bundle itself."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qualms_training.meta.flag_score import FlagScore
from qualms_training.meta.joined_alpha import JoinedAlpha
from qualms_training.paper.inputs import BaseOutputs, PostHocInputs
from qualms_training.paper.method import MethodOutput, NoiseChains
from qualms_training.paper.methods.score_functions import dirichlet_output
from qualms_training.paper.methods.trained_heads.dirichlet_meta import DirichletMeta, OnMetaModel
from qualms_training.recipe import Recipe


class JoinedOutputs(NamedTuple):
    """Everything that flag score and joined α of N images are made of."""

    logits: NDArray[np.float32]
    """of the network that predicts, (N, K)"""
    log_alpha: NDArray[np.float32]
    """of the meta-model, (N, K)"""
    flag_scores: NDArray[np.float64]
    """(N,)"""
    alpha: Tensor
    """the joined α, (N, K) float64"""


@dataclass
class Fused(OnMetaModel):
    """The flag score and the scores of the joined α."""

    def fit_with(self, meta: DirichletMeta, inputs: PostHocInputs) -> int:
        """Fit the density on the training images, and the rest on the fit split."""
        self.head, self.predicts_by = meta.head, inputs.recipe.prediction
        taps, fit = inputs.train.outputs.features.taps, inputs.fit
        count = len(fit.labels)
        self.flag_score = FlagScore([tap.shape[1] for tap in taps], inputs.classes, count)
        self.flag_score.fit_density(taps, inputs.train.labels)
        logits, log_alpha = self._networks(fit.outputs)
        self.flag_score.fit(logits, log_alpha, fit.outputs.features.taps)
        flag_scores = self.flag_score.of_arrays(logits, log_alpha, fit.outputs.features.taps)
        self.joined_alpha = JoinedAlpha(inputs.classes, count)
        self.joined_alpha.fit(logits, fit.labels, flag_scores)
        return sum(tensor.numel() for tensor in (*self.flag_score.buffers(), *self.joined_alpha.buffers()))

    def seen_noise(self, recipe: Recipe, score: str) -> NoiseChains:
        """The noisy copies that stop the training of the meta-model."""
        return DirichletMeta().seen_noise(recipe, score)

    def score(self, outputs: BaseOutputs) -> MethodOutput:
        """The served classes, the flag score and all scores of the joined α."""
        joined = self.joined(outputs)
        scores = {"fused": joined.flag_scores, **dirichlet_output(joined.alpha.log()).scores}
        return MethodOutput(np.asarray(joined.logits.argmax(axis=1), dtype=np.int64), scores)

    def joined(self, outputs: BaseOutputs) -> JoinedOutputs:
        """Flag score and joined α, with the outputs of both networks."""
        logits, log_alpha = self._networks(outputs)
        flag_scores = self.flag_score.of_arrays(logits, log_alpha, outputs.features.taps)
        with torch.inference_mode():
            alpha, _ = self.joined_alpha(torch.from_numpy(logits).double(), torch.from_numpy(flag_scores).unsqueeze(1))
        return JoinedOutputs(logits, log_alpha, flag_scores, alpha)

    def _networks(self, outputs: BaseOutputs) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Logits of the network that predicts, and log α of the meta-model, (N, K) each."""
        log_alpha = self.head(outputs).float().numpy()
        base_logits = np.array(
            outputs.features.logits, dtype=np.float32
        )  # a copy: PyTorch warns about read-only arrays
        return (base_logits if self.predicts_by == "base" else log_alpha), log_alpha
