"""Splits are disjoint, of the requested sizes, and repeatable; the calibration guarantee depends on it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qualms_training.data.splits import SPLITS, make_splits, splits_record
from qualms_training.errors import DataError

COUNTS = {"train": 60, "validation": 10, "fit": 12, "calibration": 15}


@given(
    counts=st.lists(st.integers(1, 50), min_size=4, max_size=4),
    spare=st.integers(0, 20),
    seed=st.integers(0, 99),
)
def test_splits_are_disjoint_in_range_and_of_the_requested_sizes(counts: list[int], spare: int, seed: int) -> None:
    sizes = dict(zip(SPLITS, counts, strict=True))
    n = sum(counts) + spare
    splits = make_splits(n, sizes, seed)
    together = np.concatenate(list(splits.values()))
    assert {name: len(indices) for name, indices in splits.items()} == sizes
    assert len(np.unique(together)) == len(together)
    assert 0 <= together.min() <= together.max() < n


def test_splits_depend_on_the_seed_and_not_on_the_order_of_sizes() -> None:
    first = make_splits(100, COUNTS, 3)
    again = make_splits(100, dict(reversed(COUNTS.items())), 3)
    other = make_splits(100, COUNTS, 4)
    for name in SPLITS:
        np.testing.assert_array_equal(first[name], again[name])
        assert (np.diff(first[name]) > 0).all()
    assert any((first[name] != other[name]).any() for name in SPLITS)


def test_the_record_is_repeatable_and_its_digest_changes_with_the_splits() -> None:
    splits = make_splits(100, COUNTS, 3)
    record = splits_record(splits, 100, 3)
    assert record == splits_record(make_splits(100, COUNTS, 3), 100, 3)
    assert record["sizes"] == COUNTS
    assert (record["n"], record["seed"]) == (100, 3)
    swapped = {**splits, "fit": splits["validation"], "validation": splits["fit"]}
    assert splits_record(swapped, 100, 3)["sha256"] != record["sha256"]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            {"train": 90, "calibration": 11},
            r"train, calibration need 101 images in total \(data.splits\), but there are 100",
        ),
        ({"train": 90, "test": 5}, "'test' is not known; accepted are train, validation, fit, calibration"),
        ({"train": 90, "fit": 0}, "'fit' would have 0 of 100"),
        ({"train": -1}, "'train' would have -1"),
    ],
)
def test_impossible_sizes_are_an_error(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(DataError, match=message):
        make_splits(100, sizes, 0)
