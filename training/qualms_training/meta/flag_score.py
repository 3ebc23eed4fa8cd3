"""The flag score: the sum of the surprisals of three uncertainty scores that miss different OOD images.

- `generalised_entropy` of the class probabilities (GEN, Liu et al., CVPR 2023): images between classes;
- `meta_precision`, the total evidence of the meta-model's α: images whose inner features do not support a class;
- `distance` of the tapped features from the training data: images of another kind. It counts only beyond the median of
  in-distribution images, because an ordinary distance says nothing about images of similar classes.

Surprisals (`surprisal.py`) make the scores comparable, so there are no weights to learn: nothing is fitted but the
distribution of each score on the fit split, and no noisy or OOD image is used.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from qualms_training.meta.density import Density
from qualms_training.meta.dirichlet import is_largest
from qualms_training.meta.surprisal import Surprisal

GAMMA, LARGEST = 0.1, 100
"""exponent of the generalised entropy and number of classes in it, as its authors chose them"""
HALVINGS = {"distance": 1}
"""by term: it counts only beyond this many halvings of the in-distribution images, here beyond their median"""
ROWS = 4096
"""rows per batch when arrays are scored"""


class Predicted(NamedTuple):
    """Class probabilities of the network that predicts, in float64."""

    probabilities: Tensor
    """(N, K)"""
    is_top: Tensor
    """(N, K), true for the predicted class"""
    error: Tensor
    """(N, 1), 1 − the probability of the predicted class, computed without cancellation"""


def predicted(logits: Tensor) -> Predicted:
    """Logits (N, K) in float64 to probabilities; the predicted class is the first largest logit."""
    probabilities = logits.softmax(dim=-1)
    is_top = is_largest(logits)
    return Predicted(probabilities, is_top, torch.where(is_top, 0.0, probabilities).sum(dim=-1, keepdim=True))


def generalised_entropy(prediction: Predicted) -> Tensor:
    """Σ (p (1 − p))^γ over the largest probabilities, (N, 1)."""
    p = prediction.probabilities
    products = p * torch.where(prediction.is_top, prediction.error, 1.0 - p)
    if p.shape[-1] > LARGEST:  # p (1 − p) has the same largest elements as p
        products = products.topk(LARGEST, dim=-1).values
    return products.pow(GAMMA).sum(dim=-1, keepdim=True)


class FlagScore(nn.Module):
    """Class probabilities, log α of the meta-model and reduced taps of N images to the flag score."""

    def __init__(self, widths: Sequence[int], classes: int, fit_images: int, *, distance: bool = True) -> None:
        super().__init__()
        self.density = Density(widths, classes) if distance else None
        self.surprisal = Surprisal(len(self.names), fit_images)

    @property
    def names(self) -> list[str]:
        """Names of the terms, in the order of `forward`."""
        return ["generalised_entropy", "meta_precision", *(["distance"] if self.density is not None else [])]

    def fit_density(self, taps: Sequence[NDArray[Any]], labels: NDArray[np.int64]) -> None:
        """Fit the distance to the training images."""
        if self.density is not None:
            self.density.fit([np.asarray(tap, dtype=np.float32) for tap in taps], labels)

    def fit(self, logits: NDArray[np.float32], log_alpha: NDArray[Any], taps: Sequence[NDArray[Any]]) -> None:
        """Learn the distribution of each score on the images of the fit split."""

        def scores(prediction: Predicted, z: Tensor, features: Sequence[Tensor]) -> Tensor:
            return self.scores(prediction, z, None if self.density is None else self.density(features))

        values = self._in_batches(scores, logits, log_alpha, taps)
        self.surprisal.fit(values, [HALVINGS.get(name, 0) for name in self.names])

    def scores(self, prediction: Predicted, log_alpha: Tensor, distance: Tensor | None) -> Tensor:
        """The scores that are summed, (N, J) float64, larger for more uncertain images."""
        columns = [generalised_entropy(prediction), -log_alpha.logsumexp(dim=-1, keepdim=True)]
        if distance is not None:
            columns.append(distance.double())
        return torch.cat(columns, dim=1)

    def forward(
        self, prediction: Predicted, log_alpha: Tensor, taps: Sequence[Tensor]
    ) -> tuple[Tensor | None, Tensor, Tensor]:
        """The distance (N, 1), the terms (N, J) and their sum (N, 1); log α (N, K) is float64."""
        distance = None if self.density is None else self.density(taps)
        terms: Tensor = self.surprisal(self.scores(prediction, log_alpha, distance))
        return distance, terms, terms.sum(dim=-1, keepdim=True)

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
            parts.append(function(predicted(source), z, features))
        return torch.cat(parts).numpy()
