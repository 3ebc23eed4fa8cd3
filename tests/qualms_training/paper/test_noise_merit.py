"""The merit of a score is the average of its mean and its worst AUROC."""

import pytest

from qualms_training.paper.noise_merit import merit


def test_merit_is_the_average_of_mean_and_minimum() -> None:
    assert merit([100.0, 80.0, 60.0]) == pytest.approx(70.0)
