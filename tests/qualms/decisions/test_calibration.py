from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from qualms.bundle.calibration_data import Calibration
from qualms.bundle.scores import ScoreSpec
from qualms.decisions.calibration import REFERENCE_LEVELS, TRUST_LEVELS, calibrate, reference, trust_grid
from qualms.errors import DataError

SPECS = {
    "entropy": ScoreSpec(direction="higher", kind="total"),
    "max_probability": ScoreSpec(direction="lower", kind="total"),
}
N = 200


def draw_outputs(seed: int = 0) -> tuple[dict[str, NDArray[Any]], NDArray[np.int64]]:
    """Unsorted outputs on N images, rounded so that scores tie, and labels with some wrong predictions."""
    rng = np.random.default_rng(seed)
    entropy = rng.gamma(2, 0.3, N).round(2).astype(np.float32)
    prediction = rng.integers(0, 3, N)
    labels = np.where(rng.random(N) < entropy / 4, (prediction + 1) % 3, prediction)
    outputs: dict[str, NDArray[Any]] = {
        "prediction": prediction,
        "entropy": entropy,
        "max_probability": np.exp(-entropy),
        "alpha": rng.random((N, 3), np.float32),
    }
    return outputs, labels


def calibrated(
    outputs: dict[str, NDArray[Any]],
    labels: NDArray[np.int64],
    grid: tuple[NDArray[np.float32], NDArray[np.float32]] | None = None,
) -> Calibration:
    levels = np.array([0.25, 0.5, 1], np.float32)
    return calibrate(
        outputs,
        labels,
        SPECS,
        grid or (levels, np.array([0.2, 0.5, 3], np.float32)),
        split="calibration",
        data="drawn",
        data_sha256="0" * 64,
    )


# Calibration


def test_only_the_scores_are_stored_in_the_order_of_the_images() -> None:
    outputs, labels = draw_outputs()
    calibration = calibrated(outputs, labels)
    assert list(calibration.scores) == list(SPECS)
    for name, values in calibration.scores.items():
        assert values.tolist() == outputs[name].tolist()
        assert values.dtype == np.float32
    assert (calibration.n, calibration.split, calibration.data) == (N, "calibration", "drawn")


def test_misclassified_images_are_stored_by_their_index() -> None:
    outputs, labels = draw_outputs()
    expected = [index for index in range(N) if outputs["prediction"][index] != labels[index]]
    assert len(expected) > 10
    assert calibrated(outputs, labels).wrong == expected
    assert calibrated(outputs, outputs["prediction"]).wrong == []


def test_the_grid_of_trust_thresholds_is_stored_without_counts() -> None:
    outputs, labels = draw_outputs()
    grid = trust_grid(draw_outputs(seed=1)[0]["entropy"])
    trust = calibrated(outputs, labels, grid).trust
    np.testing.assert_array_equal(trust.levels, grid[0])
    np.testing.assert_array_equal(trust.thresholds, grid[1])
    assert trust.accepted is trust.errors is None


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_scores_are_refused_with_their_name(bad: float) -> None:
    outputs, labels = draw_outputs()
    outputs["max_probability"][[3, 50]] = bad
    with pytest.raises(DataError, match=r"^2 of 200 calibration images have no finite max_probability\.$"):
        calibrated(outputs, labels)


def test_outputs_other_than_scores_may_be_non_finite() -> None:
    outputs, labels = draw_outputs()
    outputs["alpha"][0] = np.inf
    assert calibrated(outputs, labels).n == N


# The grid of trust thresholds


def test_the_thresholds_are_observed_percentiles_of_the_fit_split() -> None:
    uncertainty = draw_outputs(seed=2)[0]["entropy"]
    levels, thresholds = trust_grid(uncertainty)
    assert levels.tolist() == [np.float32(j / 100) for j in range(1, TRUST_LEVELS + 1)]
    assert set(thresholds.tolist()) <= set(uncertainty.tolist())
    assert thresholds[-1] == uncertainty.max()
    assert (np.diff(thresholds) >= 0).all()


@given(st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=250))
def test_at_least_the_level_of_the_fit_split_is_at_or_below_the_threshold(values: list[float]) -> None:
    uncertainty = np.array(values, np.float32)
    levels, thresholds = trust_grid(uncertainty)
    shares = (uncertainty[:, None] <= thresholds).mean(axis=0)
    assert (shares >= levels - 1e-6).all()
    assert set(thresholds.tolist()) <= set(uncertainty.tolist())


def test_the_grid_ignores_non_finite_values() -> None:
    values = np.array([1, np.nan, 2, np.inf, 3], np.float32)
    np.testing.assert_array_equal(trust_grid(values)[1], trust_grid(np.array([1, 2, 3], np.float32))[1])


@pytest.mark.parametrize("values", [[], [np.nan, np.inf]])
def test_a_fit_split_without_finite_scores_is_refused(values: list[float]) -> None:
    with pytest.raises(DataError, match=r"^The fit split has no finite trust scores, .*\.$"):
        trust_grid(np.array(values, np.float32))


# The reference


def test_the_reference_has_quantiles_and_class_shares() -> None:
    outputs, _ = draw_outputs()
    result = reference(outputs, SPECS, classes=4)
    assert result.levels == list(REFERENCE_LEVELS)
    assert list(result.quantiles) == list(SPECS)
    for name, quantiles in result.quantiles.items():
        ordered = sorted(outputs[name].tolist())
        assert quantiles[0] == ordered[0]
        assert quantiles[-1] == ordered[-1]
        assert quantiles[REFERENCE_LEVELS.index(0.5)] == pytest.approx((ordered[99] + ordered[100]) / 2)
    counts = [outputs["prediction"].tolist().count(index) for index in range(4)]
    assert result.class_shares == [count / N for count in counts]
    assert counts[3] == 0
