"""Prediction sets: all classes that are plausible for an image, such that the true class is among them with a given probability.

Split conformal prediction: every class of an image has a score, larger for a less plausible class. With n calibration images,
the threshold q is the ⌈c(n + 1)⌉-th smallest score of their true classes, and the set of a new image holds every class whose score
is at most q. If the image is exchangeable with the calibration images, the set holds its true class with probability at least
c, on average over calibration sets and images, for any score. It says nothing about single classes or about OOD images.

- lac: the score of a class is minus its probability, which gives the smallest sets on average. A set is empty if no class is
  as probable as the threshold: with a coverage below the accuracy, the most ambiguous images are not covered.
- raps (deterministic): the score of a class is the sum of the probabilities of more probable classes, plus a penalty for each
  rank beyond the first ones. The most probable class has the score 0, so no set is empty. Sets are larger, and larger
  where the image is ambiguous.

The probabilities are α/α₀. With calibration images in several settings, q is the largest of the settings' thresholds.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qualms.bundle.manifest import SetMethod
from qualms.errors import OperatingPointError

_ROUNDING = 1 - 1e-12
"""Compensates rounding of the coverage: 0.7 of 10 images are 7, but 0.7 * 10 > 7 in floating point."""
EMPTY = (
    "The set is empty: no class is as probable as the threshold, so the image is more ambiguous than the share of images that this "
    "coverage leaves out."
)


@dataclass(frozen=True)
class SetPoint:
    """The threshold of prediction sets for one coverage."""

    method: SetMethod
    coverage: float
    threshold: float

    def contains(self, probabilities: NDArray[np.float32]) -> NDArray[np.bool_]:
        """Whether each class is in the set of each image, (N, K), from class probabilities (N, K)."""
        return class_scores(probabilities, self.method) <= np.float32(self.threshold)

    def members(self, probabilities: NDArray[np.float32]) -> list[list[int]]:
        """The classes in the set of each image, most probable first."""
        contained = self.contains(probabilities)
        order = np.argsort(-probabilities, axis=1, kind="stable")
        return [row[inside[row]].tolist() for row, inside in zip(order, contained, strict=True)]


def class_scores(probabilities: NDArray[np.float32], method: SetMethod) -> NDArray[np.float32]:
    """The score of every class, (N, K); larger is less plausible."""
    if method.method == "lac":
        return np.negative(probabilities, dtype=np.float32)
    order = np.argsort(-probabilities, axis=1, kind="stable")
    descending = np.take_along_axis(probabilities, order, axis=1).astype(np.float64)
    before = np.cumsum(descending, axis=1) - descending
    ranks = np.arange(1, probabilities.shape[1] + 1)
    scores = before + method.penalty * np.maximum(0, ranks - method.free_ranks)
    result = np.empty(probabilities.shape, np.float32)
    np.put_along_axis(result, order, scores.astype(np.float32), axis=1)
    return result


def label_scores(
    probabilities: NDArray[np.float32], labels: NDArray[np.integer[Any]], method: SetMethod
) -> NDArray[np.float32]:
    """The score of the true class of every image, (N,)."""
    scores: NDArray[np.float32] = class_scores(probabilities, method)[np.arange(len(labels)), labels]
    return scores


def choose_set_point(scores: list[NDArray[np.float32]], coverage: float, method: SetMethod) -> SetPoint:
    """The threshold for a coverage; OperatingPointError if there are too few images.

    scores: by setting, (n,) scores of the true classes of the calibration images.
    """
    if not 0.0 < coverage < 1.0:
        raise OperatingPointError(f"The coverage must lie strictly between 0 and 1, not {coverage}.", "coverage")
    n = len(scores[0])
    rank = max(1, math.ceil(coverage * _ROUNDING * (n + 1)))
    if rank > n:
        needed = np.ceil(coverage * _ROUNDING / (1 - coverage))
        raise OperatingPointError(
            f"A coverage of {coverage} needs at least {needed:,.15g} labelled calibration images; there are {n:,}.",
            "coverage",
        )
    return SetPoint(method, coverage, float(max(np.partition(one, rank - 1)[rank - 1] for one in scores)))
