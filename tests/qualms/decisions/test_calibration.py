from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from qualms.bundle.manifest import Calibration
from qualms.bundle.scores import ScoreSpec
from qualms.decisions.calibration import REFERENCE_LEVELS, TRUST_LEVELS, calibrate, reference, trust_grid
from qualms.errors import DataError

SPECS = {
    "entropy": ScoreSpec(direction="higher", kind="total"),
    "max_probability": ScoreSpec(direction="lower", kind="total"),
}
N = 200


def outputs(seed: int = 0) -> tuple[dict[str, NDArray[Any]], NDArray[np.int64]]:
    """Outputs on N images in no order, rounded so that scores tie, and labels that are wrong now and then."""
    rng = np.random.default_rng(seed)
    entropy = rng.gamma(2, 0.3, N).round(2).astype(np.float32)
    prediction = rng.integers(0, 3, N)
    labels = np.where(rng.random(N) < entropy / 4, (prediction + 1) % 3, prediction)
    found: dict[str, NDArray[Any]] = {
        "prediction": prediction,
        "entropy": entropy,
        "max_probability": np.exp(-entropy),
        "alpha": rng.random((N, 3), np.float32),
    }
    return found, labels


def calibrated(
    found: dict[str, NDArray[Any]],
    labels: NDArray[np.int64],
    trust_score: str = "entropy",
    grid: tuple[NDArray[np.float32], NDArray[np.float32]] | None = None,
) -> Calibration:
    levels = np.array([0.25, 0.5, 1], np.float32)
    return calibrate(
        found,
        labels,
        SPECS,
        trust_score,
        grid or (levels, np.array([0.2, 0.5, 3], np.float32)),
        split="calibration",
        data="drawn",
        data_sha256="0" * 64,
    )


# Calibration


def test_each_score_is_sorted_and_nothing_else_is_kept() -> None:
    found, labels = outputs()
    calibration = calibrated(found, labels)
    assert list(calibration.scores) == list(SPECS)
    for name, values in calibration.scores.items():
        assert values.tolist() == sorted(found[name].tolist())
        assert values.dtype == np.float32
    assert (calibration.n, calibration.split, calibration.data) == (N, "calibration", "drawn")


@pytest.mark.parametrize(("trust_score", "sign"), [("entropy", 1), ("max_probability", -1)])
def test_accepted_and_errors_are_counted_at_each_threshold(trust_score: str, sign: int) -> None:
    found, labels = outputs()
    grid = trust_grid(sign * outputs(seed=1)[0][trust_score])
    trust = calibrated(found, labels, trust_score, grid).trust
    doubts = [sign * float(value) for value in found[trust_score]]
    wrong = [bool(p != y) for p, y in zip(found["prediction"], labels, strict=True)]
    assert any(wrong)
    for j, threshold in enumerate(grid[1].tolist()):
        inside = [error for doubt, error in zip(doubts, wrong, strict=True) if doubt <= threshold]
        assert trust.accepted[j] == len(inside)
        assert trust.errors[j] == sum(inside)
    np.testing.assert_array_equal(trust.levels, grid[0])
    np.testing.assert_array_equal(trust.thresholds, grid[1])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_score_that_is_not_finite_is_refused_and_named(bad: float) -> None:
    found, labels = outputs()
    found["max_probability"][[3, 50]] = bad
    with pytest.raises(DataError, match=r"^2 of 200 calibration images give no finite max_probability\.$"):
        calibrated(found, labels)


def test_outputs_that_are_no_scores_may_be_anything() -> None:
    found, labels = outputs()
    found["alpha"][0] = np.inf
    assert calibrated(found, labels).n == N


# The grid of trust thresholds


def test_the_grid_is_percentiles_that_were_observed_on_the_fit_split() -> None:
    doubts = outputs(seed=2)[0]["entropy"]
    levels, thresholds = trust_grid(doubts)
    assert levels.tolist() == [np.float32(j / 100) for j in range(1, TRUST_LEVELS + 1)]
    assert set(thresholds.tolist()) <= set(doubts.tolist())
    assert thresholds[-1] == doubts.max()
    assert (np.diff(thresholds) >= 0).all()


@given(st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=250))
def test_at_least_the_level_of_the_fit_split_lies_at_or_below_its_threshold(values: list[float]) -> None:
    doubts = np.array(values, np.float32)
    levels, thresholds = trust_grid(doubts)
    shares = (doubts[:, None] <= thresholds).mean(axis=0)
    assert (shares >= levels - 1e-6).all()
    assert set(thresholds.tolist()) <= set(doubts.tolist())


def test_the_grid_passes_over_doubts_that_are_not_finite() -> None:
    doubts = np.array([1, np.nan, 2, np.inf, 3], np.float32)
    np.testing.assert_array_equal(trust_grid(doubts)[1], trust_grid(np.array([1, 2, 3], np.float32))[1])


@pytest.mark.parametrize("doubts", [[], [np.nan, np.inf]])
def test_a_fit_split_without_finite_scores_is_refused(doubts: list[float]) -> None:
    with pytest.raises(DataError, match=r"^The fit split gives no finite trust scores, .*\.$"):
        trust_grid(np.array(doubts, np.float32))


# The reference


def test_the_reference_holds_quantiles_and_class_shares() -> None:
    found, _ = outputs()
    made = reference(found, SPECS, classes=4)
    assert made.levels == list(REFERENCE_LEVELS)
    assert list(made.quantiles) == list(SPECS)
    for name, quantiles in made.quantiles.items():
        ordered = sorted(found[name].tolist())
        assert quantiles[0] == ordered[0]
        assert quantiles[-1] == ordered[-1]
        assert quantiles[REFERENCE_LEVELS.index(0.5)] == pytest.approx((ordered[99] + ordered[100]) / 2)
    counts = [found["prediction"].tolist().count(index) for index in range(4)]
    assert made.class_shares == [count / N for count in counts]
    assert counts[3] == 0
