import numpy as np
import pytest

from qualms.bundle.scores import (
    DEFAULT_FLAG_SCORE,
    DEFAULT_TRUST_SCORE,
    DIRICHLET_SCORES,
    FEATURE_SCORES,
    SCORES,
    Direction,
    as_uncertainty,
)


def test_the_registry_lists_the_graphs_scores_in_order() -> None:
    assert list(SCORES) == [
        "entropy",
        "max_probability",
        "mutual_information",
        "differential_entropy",
        "precision",
        "log_precision",
        "expected_entropy",
        "error_probability",
        "predicted_error",
        "meta_mutual_information",
        "distance",
        "fused",
    ]
    assert list(SCORES)[:8] == list(DIRICHLET_SCORES)
    assert set(FEATURE_SCORES) <= set(SCORES) - set(DIRICHLET_SCORES)


def test_only_probability_and_precision_scores_have_direction_lower() -> None:
    lower = {name for name, score in SCORES.items() if score.direction == "lower"}
    assert lower == {"max_probability", "precision", "log_precision"}


def test_kinds_of_uncertainty() -> None:
    kinds = {kind: {name for name, score in SCORES.items() if score.kind == kind} for kind in ("total", "aleatoric")}
    assert kinds["total"] == {"entropy", "max_probability", "error_probability", "predicted_error", "fused"}
    assert kinds["aleatoric"] == {"expected_entropy"}


def test_the_default_scores_need_no_density_and_measure_total_uncertainty() -> None:
    assert SCORES[DEFAULT_FLAG_SCORE].kind == SCORES[DEFAULT_TRUST_SCORE].kind == "total"
    assert not {DEFAULT_FLAG_SCORE, DEFAULT_TRUST_SCORE} & set(FEATURE_SCORES)


def test_the_registry_is_read_only() -> None:
    with pytest.raises(TypeError):
        SCORES["entropy"] = SCORES["precision"]  # type: ignore[index]


def test_larger_values_mean_more_uncertainty_for_both_directions() -> None:
    values = np.array([1.0, 2.0, 3.0], dtype=np.float32)
    assert as_uncertainty(values, "higher").tolist() == [1.0, 2.0, 3.0]
    assert as_uncertainty(values, "lower").tolist() == [-1.0, -2.0, -3.0]
    assert as_uncertainty(values, "lower").dtype == np.float64


@pytest.mark.parametrize("direction", ["higher", "lower"])
def test_nan_becomes_maximal_uncertainty(direction: Direction) -> None:
    assert as_uncertainty([0.5, np.nan], direction)[1] == np.inf


@pytest.mark.parametrize("direction", ["higher", "lower"])
def test_as_uncertainty_is_its_own_inverse_and_does_not_change_its_argument(direction: Direction) -> None:
    values = np.array([-1.5, 0.0, 2.0, np.inf])
    assert as_uncertainty(as_uncertainty(values, direction), direction).tolist() == values.tolist()
    assert values.tolist() == [-1.5, 0.0, 2.0, np.inf]
