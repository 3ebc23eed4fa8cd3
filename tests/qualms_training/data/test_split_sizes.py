"""Sizes of splits grow with the data up to a limit, never exceed them, and suffice for the guarantee."""

import pytest

from qualms.decisions.flag import rank
from qualms_training.data.split_sizes import (
    MAX_CALIBRATION,
    MAX_FIT,
    MAX_TRAIN,
    MAX_VALIDATION,
    MIN_FIT,
    MIN_TEST,
    HeldOut,
    plan_sizes,
    smallest_calibration,
)
from qualms_training.errors import DataError
from qualms_training.meta.surprisal import MIN_TAIL


@pytest.mark.parametrize("held_out", ["train", "test"])
@pytest.mark.parametrize("target", [0.01, 0.05, 0.001])
@pytest.mark.parametrize("count", [400, 431, 500, 1_000, 3_000, 10_000, 60_000])
def test_splits_fit_into_the_data_and_support_the_guarantee(held_out: HeldOut, target: float, count: int) -> None:
    try:
        sizes = plan_sizes(count, count, held_out=held_out, target_fpr=target)
    except DataError:
        assert count < smallest_calibration(target, "confident") + 32 + 150
        return
    splits = sizes.splits
    from_train = sum(splits.values()) if held_out == "train" else splits["train"] + splits["validation"]
    assert from_train <= count
    held = 0 if held_out == "train" else splits["fit"] + splits["calibration"]
    assert sizes.test == count - held >= MIN_TEST
    assert rank(splits["calibration"], target, "confident") >= 1
    assert splits["fit"] >= MIN_FIT
    assert min(splits.values()) > 0


def test_splits_of_large_data_are_limited() -> None:
    sizes = plan_sizes(1_281_167, 50_000, held_out="test", target_fpr=0.01)
    limits = {"train": MAX_TRAIN, "validation": MAX_VALIDATION, "fit": MAX_FIT, "calibration": MAX_CALIBRATION}
    assert sizes.splits == limits
    assert sizes.test == 50_000 - MAX_FIT - MAX_CALIBRATION


def test_a_fit_split_is_as_large_as_the_scores_need() -> None:
    assert MIN_FIT == 2 * MIN_TAIL


@pytest.mark.parametrize(("train", "test", "title"), [(90, 1_000, "Mine"), (1_000, 300, "Yours")])
def test_the_error_names_the_set_that_is_too_small(train: int, test: int, title: str) -> None:
    with pytest.raises(DataError, match=rf"^{title} has \d+ images, and at least \d+ are needed"):
        plan_sizes(train, test, held_out="test", target_fpr=0.01, titles=("Mine", "Yours"))
