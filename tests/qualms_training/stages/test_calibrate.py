import numpy as np
import pytest

from qualms_training.stages.calibrate import better_trust_score

WRONG = np.array([False, False, False, True, True])
APART = np.array([0.1, 0.2, 0.3, 0.4, 0.5])
MIXED = np.array([0.1, 0.2, 0.45, 0.4, 0.5])


def test_a_better_default_trust_score_is_named_with_both_figures() -> None:
    assert better_trust_score("entropy", {"entropy": MIXED, "predicted_error": APART}, WRONG) == (
        "The trust score predicted_error, from the softmax of the network that predicts, separates the errors of the fit split "
        "better than entropy: AUROC 100.0 % against 83.3 %."
    )


@pytest.mark.parametrize("given", [APART, MIXED])
def test_nothing_is_said_if_the_recipes_score_is_as_good_or_better(given: np.typing.NDArray[np.float64]) -> None:
    assert better_trust_score("entropy", {"entropy": given, "predicted_error": MIXED}, WRONG) is None


def test_nothing_is_said_about_the_default_trust_score() -> None:
    assert better_trust_score("predicted_error", {"predicted_error": MIXED}, WRONG) is None


@pytest.mark.parametrize("wrong", [np.zeros(5, bool), np.ones(5, bool)])
def test_nothing_is_said_without_errors_to_separate(wrong: np.typing.NDArray[np.bool_]) -> None:
    assert better_trust_score("entropy", {"entropy": MIXED, "predicted_error": APART}, wrong) is None
