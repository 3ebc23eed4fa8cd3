import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from sklearn.metrics import roc_auc_score

from qualms_training.meta.fusion import ERRORS, Fusion, Shown, auroc, aurocs, merit, select

Array = NDArray[np.float64]


def draw(n: int, shift: tuple[float, ...], seed: int) -> Array:
    return np.random.default_rng(seed).normal(size=(n, len(shift))) + shift


def two_blind_doubts() -> Shown:
    """The first sees one kind of noise, the second the other; the third sees nothing."""
    nobody = np.zeros(2000, dtype=np.bool_)
    noisy = {"one": draw(2000, (2, 0, 0), 1), "other": draw(2000, (0, 2, 0), 2)}
    return Shown(draw(2000, (0, 0, 0), 0), nobody, noisy)


def test_auroc_is_that_of_scikit_learn_with_ties() -> None:
    rng = np.random.default_rng(0)
    negatives, positives = rng.integers(10, size=300).astype(float), rng.integers(3, 13, size=200).astype(float)
    truth = np.arange(500) >= 300
    assert auroc(negatives, positives) == pytest.approx(
        100 * roc_auc_score(truth, np.concatenate([negatives, positives]))
    )


def test_merit_counts_the_hardest_kind_as_much_as_all_together() -> None:
    assert merit([100.0, 80.0, 60.0]) == pytest.approx(70.0)


def test_doubts_that_see_different_things_share_the_weight_and_noise_gets_little() -> None:
    weights = select(two_blind_doubts())
    assert weights.sum() == pytest.approx(1)
    assert weights[2] < 0.1
    assert abs(weights[0] - weights[1]) < 0.2


def test_a_doubt_that_repeats_another_is_left_out() -> None:
    shown = two_blind_doubts()
    repeated = Shown(
        shown.known[:, [0, 0, 1]], shown.wrong, {kind: found[:, [0, 0, 1]] for kind, found in shown.noisy.items()}
    )
    weights = select(repeated)
    assert weights[0] + weights[1] == pytest.approx(0.5, abs=0.15)


def test_fused_beats_each_doubt_alone_on_its_worst_kind() -> None:
    shown = two_blind_doubts()
    fusion = Fusion(3, 2000)
    reached = fusion.fit(shown)
    assert set(reached) == {"one", "other"}
    for single in np.eye(3):
        assert min(reached.values()) > min(aurocs(shown, single).values()) + 10
    found = fusion(torch.from_numpy(shown.known).float()).double().numpy()
    strange = fusion(torch.from_numpy(shown.noisy["one"]).float()).double().numpy()
    assert auroc(found, strange) == pytest.approx(reached["one"], abs=1e-3)


@pytest.mark.parametrize(("errors", "counted"), [(0, False), (9, False), (10, True), (1990, True), (1991, False)])
def test_errors_are_a_kind_of_their_own_where_there_are_enough(errors: int, counted: bool) -> None:
    shown = two_blind_doubts()
    found = Shown(shown.known, np.arange(2000) < errors, shown.noisy).kinds()
    assert (ERRORS in found) is counted
    if counted:
        assert (len(found[ERRORS][0]), len(found[ERRORS][1])) == (2000 - errors, errors)
