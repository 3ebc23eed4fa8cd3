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
        "distance",
        "fused",
    ]
    assert list(SCORES) == [*DIRICHLET_SCORES, *FEATURE_SCORES]
    assert all(score.name == name and score.description.endswith(".") for name, score in SCORES.items())


def test_only_confidence_and_evidence_point_downwards() -> None:
    lower = {name for name, score in SCORES.items() if score.direction == "lower"}
    assert lower == {"max_probability", "precision", "log_precision"}


def test_each_score_says_what_kind_of_uncertainty_it_is() -> None:
    kinds = {kind: {name for name, score in SCORES.items() if score.kind == kind} for kind in ("total", "aleatoric")}
    assert kinds["total"] == {"entropy", "max_probability", "error_probability", "fused"}
    assert kinds["aleatoric"] == {"expected_entropy"}


def test_the_default_scores_are_of_the_kind_their_decision_needs_and_every_model_has_them() -> None:
    assert SCORES[DEFAULT_FLAG_SCORE].kind == "epistemic"
    assert SCORES[DEFAULT_TRUST_SCORE].kind == "total"
    assert {DEFAULT_FLAG_SCORE, DEFAULT_TRUST_SCORE} <= set(DIRICHLET_SCORES)


def test_nobody_can_change_the_registry() -> None:
    with pytest.raises(TypeError):
        SCORES["entropy"] = SCORES["precision"]  # type: ignore[index]


def test_doubt_grows_with_uncertainty_whichever_way_the_score_points() -> None:
    values = np.array([1.0, 2.0, 3.0], dtype=np.float32)
    assert as_uncertainty(values, "higher").tolist() == [1.0, 2.0, 3.0]
    assert as_uncertainty(values, "lower").tolist() == [-1.0, -2.0, -3.0]
    assert as_uncertainty(values, "lower").dtype == np.float64


@pytest.mark.parametrize("direction", ["higher", "lower"])
def test_a_score_that_cannot_be_computed_is_maximal_doubt(direction: Direction) -> None:
    assert as_uncertainty([0.5, np.nan], direction)[1] == np.inf


@pytest.mark.parametrize("direction", ["higher", "lower"])
def test_doubt_undoes_itself_and_leaves_its_argument_alone(direction: Direction) -> None:
    values = np.array([-1.5, 0.0, 2.0, np.inf])
    assert as_uncertainty(as_uncertainty(values, direction), direction).tolist() == values.tolist()
    assert values.tolist() == [-1.5, 0.0, 2.0, np.inf]
