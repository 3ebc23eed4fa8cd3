"""The fused score's weights separate noisy and misclassified images from the others."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from sklearn.metrics import roc_auc_score

from qualms_training.meta.fusion import ERRORS, Fusion, FusionData, auroc, aurocs, merit, select

Array = NDArray[np.float64]


def draw(n: int, shift: tuple[float, ...], seed: int) -> Array:
    return np.random.default_rng(seed).normal(size=(n, len(shift))) + shift


def two_blind_scores() -> FusionData:
    """The first score rises with one kind of noise, the second with the other, the third with neither."""
    none_wrong = np.zeros(2000, dtype=np.bool_)
    noisy = {"one": draw(2000, (2, 0, 0), 1), "other": draw(2000, (0, 2, 0), 2)}
    return FusionData(draw(2000, (0, 0, 0), 0), none_wrong, noisy)


def test_auroc_agrees_with_scikit_learn_including_ties() -> None:
    rng = np.random.default_rng(0)
    negatives, positives = rng.integers(10, size=300).astype(float), rng.integers(3, 13, size=200).astype(float)
    truth = np.arange(500) >= 300
    assert auroc(negatives, positives) == pytest.approx(
        100 * roc_auc_score(truth, np.concatenate([negatives, positives]))
    )


def test_merit_is_the_average_of_mean_and_minimum() -> None:
    assert merit([100.0, 80.0, 60.0]) == pytest.approx(70.0)


def test_complementary_scores_share_the_weight_and_uninformative_ones_get_little() -> None:
    weights = select(two_blind_scores())
    assert weights.sum() == pytest.approx(1)
    assert weights[2] < 0.1
    assert abs(weights[0] - weights[1]) < 0.2


def test_a_repeated_score_gets_no_additional_weight() -> None:
    data = two_blind_scores()
    noisy = {kind: scores[:, [0, 0, 1]] for kind, scores in data.noisy.items()}
    repeated = FusionData(data.clean[:, [0, 0, 1]], data.wrong, noisy)
    weights = select(repeated)
    assert weights[0] + weights[1] == pytest.approx(0.5, abs=0.15)


def test_the_fused_score_is_better_than_each_single_score_on_its_worst_kind() -> None:
    data = two_blind_scores()
    fusion = Fusion(3, 2000)
    reached = fusion.fit(data)
    assert set(reached) == {"one", "other"}
    for single in np.eye(3):
        assert min(reached.values()) > min(aurocs(data, single).values()) + 10
    clean = fusion(torch.from_numpy(data.clean).float()).double().numpy()
    noisy = fusion(torch.from_numpy(data.noisy["one"]).float()).double().numpy()
    assert auroc(clean, noisy) == pytest.approx(reached["one"], abs=1e-3)


@pytest.mark.parametrize(("errors", "counted"), [(0, False), (9, False), (10, True), (1990, True), (1991, False)])
def test_errors_count_as_a_kind_if_there_are_enough_wrong_and_right_predictions(errors: int, counted: bool) -> None:
    data = two_blind_scores()
    pairs = FusionData(data.clean, np.arange(2000) < errors, data.noisy).pairs()
    assert (ERRORS in pairs) is counted
    if counted:
        assert (len(pairs[ERRORS][0]), len(pairs[ERRORS][1])) == (2000 - errors, errors)
