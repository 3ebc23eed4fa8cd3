"""The scores a model may report and which way each points, so that one rule can flag on any of them.

Training fills a manifest from `SCORES`; whoever decides takes the directions from that manifest, since a
model may bring scores that are not listed here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import numpy as np
import numpy.typing as npt

Direction = Literal["higher", "lower"]
"""Which end of a score means more uncertain."""

Kind = Literal["total", "epistemic", "aleatoric"]


@dataclass(frozen=True)
class Score:
    """One (N,) output of the graph, with what a reader must know to use it."""

    name: str
    kind: Kind
    higher_is_uncertain: bool
    description: str

    @property
    def direction(self) -> Direction:
        """The same as `higher_is_uncertain`, in the manifest's words."""
        return "higher" if self.higher_is_uncertain else "lower"


SCORES: Mapping[str, Score] = MappingProxyType(
    {
        score.name: score
        for score in (
            Score("entropy", "total", True, "Entropy of the mean class probabilities, in nats."),
            Score("max_probability", "total", False, "Largest mean class probability."),
            Score(
                "mutual_information",
                "epistemic",
                True,
                "Entropy that knowing the class distribution would remove, in nats.",
            ),
            Score(
                "differential_entropy",
                "epistemic",
                True,
                "Differential entropy of the Dirichlet; not monotone in the evidence where α falls below 1.",
            ),
            Score("precision", "epistemic", False, "Total evidence α₀."),
            Score("log_precision", "epistemic", False, "Logarithm of the total evidence α₀."),
            Score(
                "expected_entropy",
                "aleatoric",
                True,
                "Mean entropy of the class distributions the Dirichlet holds likely, in nats.",
            ),
            Score(
                "error_probability",
                "total",
                True,
                "One minus the largest mean class probability, computed without cancellation.",
            ),
            Score("distance", "epistemic", True, "Squared distance of the tapped features from the nearest class."),
            Score("fused", "total", True, "All doubts as one: a weighted sum of how surprising each is, in nats."),
        )
    }
)
"""By name, in the order of the graph's outputs."""

FEATURE_SCORES = ("distance", "fused")
"""scores that only models have which know how dense their training data lie"""
DIRICHLET_SCORES = tuple(name for name in SCORES if name not in FEATURE_SCORES)
"""scores that every model has"""

DEFAULT_FLAG_SCORE = "mutual_information"
DEFAULT_TRUST_SCORE = "error_probability"
"""what decides where a recipe names no other"""


def as_uncertainty(values: npt.ArrayLike, direction: Direction) -> npt.NDArray[np.float64]:
    """Turn scores, of any shape, so that larger means more doubtful; apart from NaN it is its own inverse.

    NaN becomes +∞: a score that cannot be computed is no reason for trust.
    """
    turned = np.negative(values) if direction == "lower" else values
    return np.fmin(turned, np.inf, dtype=np.float64)  # of a number and NaN, the number
