"""The flag score: the sum of three terms that detect different OOD images, in standard deviations of in-distribution images.

- `softmax`: the mean of log entropy and log generalised entropy (GEN, Liu et al., CVPR 2023) of the class probabilities, which
  is large for images between classes;
- `evidence`: the precision of the meta-model's α, negated, which is large if the inner features do not support any class;
- `distance` of the tapped features from the training data, which is large for images of another kind.

Evidence and distance count only if they are abnormal: a term is 0 up to 1 standard deviation above the mean, and grows
in steps of its slope until 5. An ordinary distance says nothing about images of similar classes, so adding it in full would
make the score worse than the softmax for them (SIRC, Xia & Bouganis, ACCV 2022, gates at 3 standard deviations for this
reason). Means and standard deviations on the fit split are all that is fitted: there are no weights to select, and no noisy
or OOD image is used.
"""

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from qualms_training.errors import DataError
from qualms_training.meta.density import Density, FoldedDensity

GAMMA = 0.1
"""exponent of the generalised entropy, as its authors chose it"""
MIN_LARGEST, SHARE_OF_CLASSES = 10, 0.1
"""the generalised entropy sums over this share of the classes, as its authors do for 1,000, but at least over ten"""
GATE = (1.0, 2.0, 3.0, 4.0, 5.0)
"""standard deviations above the mean at which the slope of evidence and distance grows, by a fifth each time"""
LOWEST = 100.0
"""standard deviations below the mean at which the softmax term ends; with it, that term is a ramp like the others"""
MIN_ENTROPY = 1e-30
"""limit of both entropies, so that their logarithms are finite"""
MIN_DEVIATION = 1e-5
"""smallest standard deviation of a score, relative to its mean above 1 and absolute below: a score that varies less contains only
rounding errors, which division by their own standard deviation would turn into a term as large as the others"""
MIN_IMAGES = 32
"""fit images below which mean and standard deviation would be mostly chance"""
ROWS = 4096
"""rows per batch when arrays are scored"""
_PRECISION = 2
"""column of the log precision among the scores, the only score that is smaller for more uncertain images"""


class Predicted(NamedTuple):
    """Class probabilities of the network that predicts, in float64."""

    probabilities: Tensor
    """(N, K)"""
    logarithms: Tensor
    """(N, K), of the probabilities"""
    top: Tensor
    """(N, 1), index of the predicted class"""
    is_top: Tensor
    """(N, K), true for the predicted class"""
    error: Tensor
    """(N, 1), 1 − the probability of the predicted class, computed without cancellation"""


def predicted(logits: Tensor) -> Predicted:
    """Logits (N, K) in float64 to probabilities; the predicted class is the first largest logit."""
    probabilities = logits.softmax(dim=-1)
    top = logits.argmax(dim=-1, keepdim=True)
    is_top = torch.arange(logits.shape[-1], device=logits.device) == top
    error = torch.where(is_top, 0.0, probabilities).sum(dim=-1, keepdim=True)
    return Predicted(probabilities, logits.log_softmax(dim=-1), top, is_top, error)


def generalised_entropy(prediction: Predicted) -> Tensor:
    """Σ (p (1 − p))^γ over the largest probabilities, (N, 1)."""
    p = prediction.probabilities
    products = p * torch.where(prediction.is_top, prediction.error, 1.0 - p)
    largest = max(MIN_LARGEST, math.ceil(SHARE_OF_CLASSES * p.shape[-1]))
    if p.shape[-1] > largest:  # p (1 − p) has the same largest elements as p
        products = products.topk(largest, dim=-1).values
    return products.pow(GAMMA).sum(dim=-1, keepdim=True)


class FlagScore(nn.Module):
    """Class probabilities, precision of the meta-model's α and reduced taps of N images to the flag score."""

    inner: Tensor
    """(R, S) from the S scores to the R ramps: one for the softmax term, five for each other term"""
    inner_bias: Tensor
    """(R,)"""

    def __init__(self, widths: Sequence[int], classes: int, fit_images: int, *, distance: bool = True) -> None:
        super().__init__()
        if fit_images < MIN_IMAGES:
            raise DataError(f"The fit split has {fit_images} images; the flag score needs {MIN_IMAGES} or more.")
        self.density: Density | FoldedDensity | None = Density(widths, classes) if distance else None
        gated = len(self.names) - 1
        ramps = 1 + gated * len(GATE)
        self.register_buffer("inner", torch.zeros(ramps, 2 + gated, dtype=torch.float64))
        self.register_buffer("inner_bias", torch.zeros(ramps, dtype=torch.float64))
        outer = torch.zeros(1 + gated, ramps, dtype=torch.float64)
        outer[0, 0] = 1.0
        for term in range(gated):
            outer[1 + term, 1 + term * len(GATE) : 1 + (term + 1) * len(GATE)] = 1 / len(GATE)
        self.outer: Tensor
        self.outer_bias: Tensor
        self.register_buffer("outer", outer, persistent=False)
        self.register_buffer(
            "outer_bias", torch.tensor([-LOWEST] + [0.0] * gated, dtype=torch.float64), persistent=False
        )

    @property
    def names(self) -> list[str]:
        """Names of the terms, in the order of `forward`."""
        return ["softmax", "evidence", *(["distance"] if self.density is not None else [])]

    def folded(self) -> Self:
        """A copy that computes the same with fewer weights and nodes; its distance cannot be fitted."""
        copied = copy.deepcopy(self)
        if isinstance(copied.density, Density):
            copied.density = copied.density.folded()
        return copied

    def fit_density(self, taps: Sequence[NDArray[Any]], labels: NDArray[np.int64]) -> None:
        """Fit the distance to the training images, whose reduced taps (N, D) may be memory-mapped."""
        if isinstance(self.density, Density):
            self.density.fit(taps, labels)

    def fit(self, logits: NDArray[np.float32], log_alpha: NDArray[Any], taps: Sequence[NDArray[Any]]) -> None:
        """Learn mean and standard deviation of each score on the images of the fit split."""

        def scores(prediction: Predicted, precision: Tensor, features: Sequence[Tensor]) -> Tensor:
            return self.scores(prediction, precision, None if self.density is None else self.density(features))

        self.fit_scores(self._in_batches(scores, logits, log_alpha, taps))

    def fit_scores(self, scores: NDArray[np.float64]) -> None:
        """`fit` from the results of `scores`, (N, S)."""
        means = scores.mean(axis=0)
        deviations = np.maximum(scores.std(axis=0), MIN_DEVIATION * np.maximum(1.0, np.abs(means)))
        inner, bias = np.zeros(self.inner.shape), np.zeros(self.inner_bias.shape)
        inner[0, :2] = 0.5 / deviations[:2]
        bias[0] = LOWEST - 0.5 * (means[:2] / deviations[:2]).sum()
        for column in range(2, scores.shape[1]):
            rows = slice(1 + (column - 2) * len(GATE), 1 + (column - 1) * len(GATE))
            slope = (-1 if column == _PRECISION else 1) / deviations[column]
            inner[rows, column] = slope
            bias[rows] = -means[column] * slope - np.array(GATE)
        self.inner.copy_(torch.from_numpy(inner))
        self.inner_bias.copy_(torch.from_numpy(bias))

    def scores(self, prediction: Predicted, meta_precision: Tensor, distance: Tensor | None) -> Tensor:
        """Log entropy, log generalised entropy, log precision of the meta-model and distance, (N, S) float64."""
        entropy = -(prediction.probabilities * prediction.logarithms).sum(dim=-1, keepdim=True)
        both = torch.cat([entropy, generalised_entropy(prediction)], dim=1).clamp(min=MIN_ENTROPY).log()
        columns = [both, meta_precision.log()]
        if distance is not None:
            columns.append(distance.double())
        return torch.cat(columns, dim=1)

    def forward(
        self, prediction: Predicted, meta_precision: Tensor, taps: Sequence[Tensor]
    ) -> tuple[Tensor | None, Tensor, Tensor]:
        """The distance (N, 1), the terms (N, J) and their sum (N, 1); meta_precision (N, 1) is float64."""
        distance = None if self.density is None else self.density(taps)
        terms = self.terms(self.scores(prediction, meta_precision, distance))
        return distance, terms, terms.sum(dim=-1, keepdim=True)

    def terms(self, scores: Tensor) -> Tensor:
        """The terms (N, J) from the scores (N, S)."""
        return F.linear(F.relu(F.linear(scores, self.inner, self.inner_bias)), self.outer, self.outer_bias)

    def of_arrays(
        self, logits: NDArray[np.float32], log_alpha: NDArray[Any], taps: Sequence[NDArray[Any]]
    ) -> NDArray[np.float64]:
        """The flag score (N,) of arrays that may be memory-mapped."""
        return self._in_batches(lambda *inputs: self(*inputs)[2], logits, log_alpha, taps).squeeze(1)

    @torch.inference_mode()
    def _in_batches(
        self,
        function: Callable[[Predicted, Tensor, Sequence[Tensor]], Tensor],
        logits: NDArray[np.float32],
        log_alpha: NDArray[Any],
        taps: Sequence[NDArray[Any]],
    ) -> NDArray[np.float64]:
        parts = []
        for start in range(0, len(logits), ROWS):
            rows = slice(start, start + ROWS)
            source, z = (torch.from_numpy(np.array(values[rows], dtype=np.float64)) for values in (logits, log_alpha))
            features = [torch.from_numpy(np.array(values[rows], dtype=np.float32)) for values in taps]
            parts.append(function(predicted(source), z.exp().sum(dim=-1, keepdim=True), features))
        return torch.cat(parts).numpy()
