from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from qualms.bundle.calibration_data import AsSent, Calibration
from qualms.bundle.manifest import SetMethod
from qualms.bundle.scores import ScoreSpec, as_uncertainty
from qualms.decisions.calibration import (
    REFERENCE_LEVELS,
    TRUST_LEVELS,
    CalibrationSource,
    calibrate,
    calibrate_worst,
    reference,
    trust_grid,
)
from qualms.decisions.prediction_sets import label_scores
from qualms.errors import DataError

SPECS = {
    "entropy": ScoreSpec(direction="higher", kind="total"),
    "max_probability": ScoreSpec(direction="lower", kind="total"),
}
N = 200
GRID = (np.array([0.25, 0.5, 1], np.float32), np.array([0.2, 0.5, 3], np.float32))
SOURCE = CalibrationSource(split="calibration", data="drawn", data_sha256="0" * 64)


def draw_outputs(seed: int = 0) -> tuple[dict[str, NDArray[Any]], NDArray[np.int64]]:
    """Unsorted outputs on N images, rounded so that scores tie, and labels with some wrong predictions."""
    rng = np.random.default_rng(seed)
    entropy = rng.gamma(2, 0.3, N).round(2).astype(np.float32)
    prediction = rng.integers(0, 3, N)
    labels = np.where(rng.random(N) < entropy / 4, (prediction + 1) % 3, prediction)
    alpha = rng.random((N, 3), np.float32) + 0.1
    outputs: dict[str, NDArray[Any]] = {
        "prediction": prediction,
        "entropy": entropy,
        "max_probability": np.exp(-entropy),
        "alpha": alpha,
        "probabilities": alpha / alpha.sum(axis=1, keepdims=True),
    }
    return outputs, labels


def calibrated(
    outputs: dict[str, NDArray[Any]],
    labels: NDArray[np.int64] | None,
    grid: tuple[NDArray[np.float32], NDArray[np.float32]] | None = None,
) -> Calibration:
    return calibrate(outputs, labels, SPECS, grid or GRID, source=SOURCE)


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


def test_predicted_classes_are_stored_in_the_order_of_the_images() -> None:
    outputs, labels = draw_outputs()
    predictions = calibrated(outputs, labels).predictions
    assert predictions is not None
    assert predictions.dtype == np.int32
    assert predictions.tolist() == outputs["prediction"].tolist()


@pytest.mark.parametrize("method", ["lac", "raps"])
def test_the_scores_of_the_true_classes_are_those_of_the_set_method(method: Literal["lac", "raps"]) -> None:
    outputs, labels = draw_outputs()
    sets = SetMethod(method=method, penalty=0.1)
    calibration = calibrate(outputs, labels, SPECS, GRID, source=SOURCE, sets=sets)
    expected = label_scores(outputs["probabilities"], labels, sets)
    assert calibration.label_scores is not None
    np.testing.assert_array_equal(calibration.label_scores, expected)


def test_without_labels_errors_and_scores_of_true_classes_are_left_out() -> None:
    outputs, _ = draw_outputs()
    calibration = calibrated(outputs, None)
    assert calibration.wrong is None
    assert calibration.label_scores is None
    assert not calibration.has_labels
    assert calibration.scores["entropy"].tolist() == outputs["entropy"].tolist()
    assert calibration.predictions is not None


def test_all_fields_of_the_source_are_stored() -> None:
    outputs, labels = draw_outputs()
    source = CalibrationSource(
        split="mine",
        data="photos",
        data_sha256="1" * 64,
        as_sent=AsSent(encodings=["jpeg:75-95"], form="mixture", seed=5),
        observed={"jpeg 70-79, same size": N},
        fingerprints=np.arange(N, dtype=np.uint64),
        trimmed=0.05,
    )
    calibration = calibrate(outputs, labels, SPECS, GRID, source=source)
    assert (calibration.split, calibration.data, calibration.data_sha256) == ("mine", "photos", "1" * 64)
    assert (calibration.as_sent, calibration.observed) == (source.as_sent, source.observed)
    assert calibration.trimmed == 0.05
    assert calibration.fingerprints is not None
    assert calibration.fingerprints.tolist() == list(range(N))


# Several settings


WORST = replace(SOURCE, as_sent=AsSent(encodings=["png", "jpeg:75", "gif"], form="worst", seed=0))


def in_settings() -> tuple[dict[str, dict[str, NDArray[Any]]], NDArray[np.int64]]:
    """Outputs in three settings, and the labels of the images."""
    drawn = {name: draw_outputs(seed) for seed, name in enumerate(("png", "jpeg:75", "gif"))}
    return {name: outputs for name, (outputs, _) in drawn.items()}, drawn["png"][1]


@pytest.mark.parametrize("name", list(SPECS))
def test_the_envelope_has_the_largest_of_the_sorted_uncertainties_in_both_directions(name: str) -> None:
    settings, labels = in_settings()
    calibration = calibrate_worst(settings, labels, SPECS, GRID, paired=["entropy"], source=WORST)
    direction = SPECS[name].direction
    columns = [np.sort(as_uncertainty(outputs[name], direction)) for outputs in settings.values()]
    envelope = as_uncertainty(calibration.scores[name], direction)
    assert envelope.tolist() == [max(values) for values in zip(*columns, strict=True)]
    for column in columns:
        for threshold in np.unique(envelope):
            assert (column > threshold).sum() <= (envelope > threshold).sum()


def test_every_setting_has_paired_scores_predictions_and_errors_in_the_order_of_the_images() -> None:
    settings, labels = in_settings()
    sets = SetMethod(method="raps")
    calibration = calibrate_worst(settings, labels, SPECS, GRID, paired=["entropy"], source=WORST, sets=sets)
    assert [one.encoding for one in calibration.settings] == list(settings)
    for part, outputs in zip(calibration.settings, settings.values(), strict=True):
        assert list(part.scores) == ["entropy"]
        assert part.scores["entropy"].tolist() == outputs["entropy"].tolist()
        assert part.predictions.tolist() == outputs["prediction"].tolist()
        assert part.wrong == np.flatnonzero(outputs["prediction"] != labels).tolist()
        assert part.label_scores is not None
        np.testing.assert_array_equal(part.label_scores, label_scores(outputs["probabilities"], labels, sets))
    assert calibration.wrong is None
    assert calibration.predictions is None
    assert calibration.label_scores is None
    assert (calibration.n, calibration.has_labels) == (N, True)


def test_settings_without_labels_have_no_errors() -> None:
    settings, _ = in_settings()
    calibration = calibrate_worst(settings, None, SPECS, GRID, paired=["entropy"], source=WORST)
    assert [(one.wrong, one.label_scores) for one in calibration.settings] == 3 * [(None, None)]
    assert not calibration.has_labels


def test_non_finite_scores_in_any_setting_are_refused_with_their_name() -> None:
    settings, labels = in_settings()
    settings["gif"]["max_probability"][7] = np.nan
    with pytest.raises(DataError, match=r"^1 of 200 calibration images have no finite max_probability\.$"):
        calibrate_worst(settings, labels, SPECS, GRID, paired=["entropy"], source=WORST)


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
    result = reference([outputs], SPECS, classes=4)
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


def test_the_reference_of_several_settings_is_that_of_all_images_together() -> None:
    samples = [draw_outputs(seed)[0] for seed in (0, 1)]
    together = {name: np.concatenate([outputs[name] for outputs in samples]) for name in samples[0]}
    assert reference(samples, SPECS, classes=3) == reference([together], SPECS, classes=3)
