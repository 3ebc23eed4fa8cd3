"""The bootstrap of AUROCs agrees with scikit-learn on the same draws, and its intervals with theory."""

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from qualms_training.paper.flags.bootstrap import CHUNK, interval, resampled_aurocs


class RecordedDraws:
    """A generator that records the indices it draws."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.drawn: list[np.ndarray] = []

    def integers(self, high: int, size: int) -> np.ndarray:
        self.drawn.append(self.rng.integers(high, size=size))
        return self.drawn[-1]


@pytest.mark.parametrize("decimals", [0, 1, 6])
def test_aurocs_of_resamples_agree_with_scikit_learn_also_with_ties(decimals: int) -> None:
    rng = np.random.default_rng(1)
    negatives = [rng.normal(size=60).round(decimals) for _ in range(2)]
    positives = [[rng.normal(1, 1, size=size).round(decimals) for size in (40, 50)] for _ in range(2)]
    draws, resamples = RecordedDraws(0), CHUNK + 3
    made = resampled_aurocs(negatives, positives, resamples, draws)  # type: ignore[arg-type]
    assert made.shape == (2, 2, resamples)
    position = 0
    for start in range(0, resamples, CHUNK):
        width = min(CHUNK, resamples - start)
        blocks = [draws.drawn[position + block * width :][:width] for block in range(3)]
        position += 3 * width
        for offset in range(width):
            for row in range(2):
                for column in range(2):
                    values = [negatives[row][blocks[0][offset]], positives[row][column][blocks[1 + column][offset]]]
                    is_positive = np.repeat([0, 1], [len(part) for part in values])
                    expected = 100 * roc_auc_score(is_positive, np.concatenate(values))
                    assert made[row, column, start + offset] == pytest.approx(expected)


def test_progress_counts_the_resamples() -> None:
    counted: list[int] = []
    values = np.arange(5.0)
    resampled_aurocs([values], [[values]], 2 * CHUNK + 1, np.random.default_rng(0), counted.append)
    assert counted == [CHUNK, CHUNK, 1]


def test_the_spread_of_resamples_is_the_standard_error_of_the_auroc() -> None:
    """Hanley and McNeil (1982): exact for exponential scores."""
    rng = np.random.default_rng(0)
    n, m, auroc = 1500, 1000, 0.75
    negatives, positives = rng.exponential(1, n), rng.exponential(3, m)  # P(negative < positive) = 3/4
    made = resampled_aurocs([negatives], [[positives]], 400, np.random.default_rng(1))
    first, second = auroc / (2 - auroc), 2 * auroc**2 / (1 + auroc)
    variance = auroc * (1 - auroc) + (m - 1) * (first - auroc**2) + (n - 1) * (second - auroc**2)
    assert made.std() == pytest.approx(100 * np.sqrt(variance / (n * m)), rel=0.15)
    assert made.mean() == pytest.approx(75, abs=2)


def test_equal_scores_have_equal_resamples() -> None:
    rng = np.random.default_rng(0)
    negatives, positives = rng.normal(size=100), rng.normal(size=80)
    made = resampled_aurocs([negatives, 2 * negatives], [[positives], [2 * positives]], 10, rng)
    np.testing.assert_array_equal(made[0], made[1])


def test_an_interval_has_the_central_share_of_the_resamples() -> None:
    made = interval(0.5, np.arange(1001) / 1000)
    assert made == pytest.approx((0.5, 0.025, 0.975))
    assert str(made) == "+0.50 [+0.03, +0.97]"
