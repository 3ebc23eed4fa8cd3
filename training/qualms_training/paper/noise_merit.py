"""Quality of a score on in-distribution data alone: its AUROC for noisy copies of images and for misclassified ones."""

from collections.abc import Iterable

import numpy as np

ERRORS = "errors"
"""the column of misclassified images among the kinds of noise"""


def merit(by_kind: Iterable[float]) -> float:
    """Quality of a score from its AUROC by kind: the average of their mean and their minimum."""
    values = list(by_kind)
    return float(np.mean(values) + np.min(values)) / 2
