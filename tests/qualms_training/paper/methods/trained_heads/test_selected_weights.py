"""The weights of the former flag score separate noisy and misclassified images from the others."""

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray
from sklearn.metrics import roc_auc_score

from qualms_training.data.noise import NOISES
from qualms_training.paper.inputs import LabelledOutputs, PostHocInputs
from qualms_training.paper.methods.trained_heads.selected_weights import (
    SelectedWeights,
    SelectionData,
    auroc,
    aurocs,
    select,
)
from qualms_training.paper.noise_merit import ERRORS

Array = NDArray[np.float64]
DrawOutputs = Callable[..., LabelledOutputs]
MakePostHocInputs = Callable[..., PostHocInputs]


def draw(n: int, shift: tuple[float, ...], seed: int) -> Array:
    return np.random.default_rng(seed).normal(size=(n, len(shift))) + shift


def two_blind_scores() -> SelectionData:
    """The first score rises with one kind of noise, the second with the other, the third with neither."""
    none_wrong = np.zeros(2000, dtype=np.bool_)
    noisy = {"one": draw(2000, (2, 0, 0), 1), "other": draw(2000, (0, 2, 0), 2)}
    return SelectionData(draw(2000, (0, 0, 0), 0), none_wrong, noisy)


def test_auroc_agrees_with_scikit_learn_including_ties() -> None:
    rng = np.random.default_rng(0)
    negatives, positives = rng.integers(10, size=300).astype(float), rng.integers(3, 13, size=200).astype(float)
    truth = np.arange(500) >= 300
    assert auroc(negatives, positives) == pytest.approx(
        100 * roc_auc_score(truth, np.concatenate([negatives, positives]))
    )


def test_complementary_scores_share_the_weight_and_uninformative_ones_get_little() -> None:
    weights = select(two_blind_scores())
    assert weights.sum() == pytest.approx(1)
    assert weights[2] < 0.1
    assert abs(weights[0] - weights[1]) < 0.2


def test_a_repeated_score_gets_no_additional_weight() -> None:
    data = two_blind_scores()
    noisy = {kind: scores[:, [0, 0, 1]] for kind, scores in data.noisy.items()}
    repeated = SelectionData(data.clean[:, [0, 0, 1]], data.wrong, noisy)
    weights = select(repeated)
    assert weights[0] + weights[1] == pytest.approx(0.5, abs=0.15)


def test_the_weighted_sum_is_better_than_each_single_score_on_its_worst_kind() -> None:
    data = two_blind_scores()
    reached = aurocs(data, select(data))
    assert set(reached) == {"one", "other"}
    for single in np.eye(3):
        assert min(reached.values()) > min(aurocs(data, single).values()) + 10


@pytest.mark.parametrize(("errors", "counted"), [(0, False), (9, False), (10, True), (1990, True), (1991, False)])
def test_errors_count_as_a_kind_if_there_are_enough_wrong_and_right_predictions(errors: int, counted: bool) -> None:
    data = two_blind_scores()
    pairs = SelectionData(data.clean, np.arange(2000) < errors, data.noisy).pairs()
    assert (ERRORS in pairs) is counted
    if counted:
        assert (len(pairs[ERRORS][0]), len(pairs[ERRORS][1])) == (2000 - errors, errors)


def test_the_fitted_method_detects_ood_data_and_has_seen_every_noise(
    make_post_hoc_inputs: MakePostHocInputs, draw_outputs: DrawOutputs
) -> None:
    method, inputs = SelectedWeights(), make_post_hoc_inputs()
    method.fit(inputs)
    known, ood = draw_outputs(400, seed=3).outputs, draw_outputs(400, seed=4, shift=3.0).outputs
    np.testing.assert_array_equal(method.score(known).predictions, known.predictions)
    scores = [method.score(outputs).scores for outputs in (known, ood)]
    assert set(scores[0]) == {"fused"}
    assert auroc(scores[0]["fused"], scores[1]["fused"]) > 90
    assert method.seen_noise(inputs.recipe, "fused") == [*inputs.recipe.meta.stop_noise, *([kind] for kind in NOISES)]
