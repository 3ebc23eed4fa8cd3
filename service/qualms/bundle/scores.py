"""The uncertainty scores of a model: one graph output of shape (N,) per score.

To add a score, add an entry to `SCORES` and compute it in `qualms_training.meta`. A score of the Dirichlet distribution is also
listed in `DIRICHLET_SCORES`, and is a field of `qualms_training.meta.dirichlet.DirichletScores` with an exact formula in
`qualms_training.bench.score_accuracy`. The outputs of the graph, manifest, calibration, thresholds, evaluation and accepted
values of `?score=` follow; a field of the reply is declared in `qualms.decisions.results`. The test graph in
`tests/qualms/conftest.py` needs the output, too.

At run time the directions come from the manifest, because a model may have scores that are not listed here.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict

Direction = Literal["higher", "lower"]
"""The end of a score's range that means more uncertainty."""

ScoreKind = Literal["total", "epistemic", "aleatoric"]


class ScoreSpec(BaseModel):
    """Direction of a score and the kind of uncertainty it measures."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    direction: Direction
    kind: ScoreKind


SCORES: Mapping[str, ScoreSpec] = MappingProxyType(
    {
        # entropy of the mean class probabilities, in nats
        "entropy": ScoreSpec(kind="total", direction="higher"),
        # largest mean class probability
        "max_probability": ScoreSpec(kind="total", direction="lower"),
        # mutual information between the class and the class distribution, in nats
        "mutual_information": ScoreSpec(kind="epistemic", direction="higher"),
        # differential entropy of the Dirichlet distribution; not monotone in the evidence where α falls below 1
        "differential_entropy": ScoreSpec(kind="epistemic", direction="higher"),
        # total evidence α₀
        "precision": ScoreSpec(kind="epistemic", direction="lower"),
        # logarithm of the total evidence α₀
        "log_precision": ScoreSpec(kind="epistemic", direction="lower"),
        # expected entropy of the class distributions under the Dirichlet distribution, in nats
        "expected_entropy": ScoreSpec(kind="aleatoric", direction="higher"),
        # one minus the largest mean class probability, computed without cancellation
        "error_probability": ScoreSpec(kind="total", direction="higher"),
        # one minus the probability of the served class by the network that predicts, computed without cancellation
        "predicted_error": ScoreSpec(kind="total", direction="higher"),
        # mutual information of the meta-model's own Dirichlet distribution, in nats
        "meta_mutual_information": ScoreSpec(kind="epistemic", direction="higher"),
        # squared distance of the tapped features from the nearest class
        "distance": ScoreSpec(kind="epistemic", direction="higher"),
        # sum of the terms of the flag score, in standard deviations of in-distribution images
        "fused": ScoreSpec(kind="total", direction="higher"),
    }
)
"""Scores by name, in the order of the graph's outputs."""

DIRICHLET_SCORES = (
    *("entropy", "max_probability", "mutual_information", "differential_entropy"),
    *("precision", "log_precision", "expected_entropy", "error_probability"),
)
"""Functions of the Dirichlet parameters α, which every bundle has."""
FEATURE_SCORES = ("distance",)
"""Scores of models with a fitted density of their training features."""

DEFAULT_FLAG_SCORE = "fused"
"""Score for flags if the recipe names no other."""
DEFAULT_TRUST_SCORE = "predicted_error"
"""Score for trust if the recipe names no other."""


def as_uncertainty(values: npt.ArrayLike, direction: Direction) -> npt.NDArray[np.float64]:
    """Convert scores of any shape so that larger means more uncertain. Applied twice, it returns the scores again.

    NaN becomes +∞, so a score that cannot be computed counts as maximal uncertainty.
    """
    uncertainty = np.negative(values) if direction == "lower" else values
    return np.fmin(uncertainty, np.inf, dtype=np.float64)  # fmin ignores NaN
