"""Thresholds by predicted class: which classes share one, and the flags and p-values of each group."""

from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from qualms.bundle.scores import Direction, as_uncertainty
from qualms.decisions.by_class import ClassFlags, group_classes, sort_by_class
from qualms.decisions.flag import choose_flag_point, p_values, smallest_n
from qualms.errors import OperatingPointError

FPR = 0.05
NEEDED = 59
"""images that the confident rule needs for this rate"""


class Images(NamedTuple):
    """Uncertainty and predicted class of calibration images, each (n,)."""

    uncertainty: NDArray[np.float64]
    predictions: NDArray[np.int32]


def sample(*counts: int, seed: int = 0, shift: float = 0) -> Images:
    """Images predicted as each class, in random order; later classes have higher scores."""
    rng = np.random.default_rng(seed)
    predictions = rng.permutation(np.repeat(np.arange(len(counts)), counts)).astype(np.int32)
    return Images(rng.normal(predictions + shift, 1).round(3), predictions)


def flags_of(*samples: Images, classes: int, direction: Direction = "higher", fpr: float = FPR) -> ClassFlags:
    divided = [sort_by_class(*one, classes) for one in samples]
    return ClassFlags(divided, score="score", direction=direction, target_fpr=fpr)


# Pooling


def test_the_confident_rule_needs_59_images_for_5_percent() -> None:
    assert smallest_n(FPR, "by-class") == NEEDED


@pytest.mark.parametrize(
    ("counts", "groups"),
    [
        ([59, 60, 100], [(0,), (1,), (2,)]),
        ([58, 60, 100], [(2,), (0, 1)]),  # one small class cannot be a pool, so the smallest other class joins it
        ([30, 100, 29, 60], [(1,), (3,), (0, 2)]),  # two small classes together have enough
        ([30, 100, 28, 60], [(1,), (0, 2, 3)]),
        ([0, 100, 0, 60], [(1,), (0, 2, 3)]),
        ([0, 58], [(0, 1)]),
        ([10, 10, 10], [(0, 1, 2)]),
        ([0, 500], [(0, 1)]),
        ([60, 60, 1], [(1,), (0, 2)]),  # of equally many, the first class
    ],
)
def test_classes_with_too_few_images_are_pooled(counts: list[int], groups: list[tuple[int, ...]]) -> None:
    assert group_classes(np.array([counts]), NEEDED) == groups


def test_a_class_needs_enough_images_in_every_setting() -> None:
    counts = np.array([[100, 60, 90], [100, 70, 30]])
    assert group_classes(counts, NEEDED) == [(0,), (1, 2)]
    assert group_classes(counts[:1], NEEDED) == [(0,), (1,), (2,)]


@given(st.lists(st.lists(st.integers(0, 200), min_size=4, max_size=4), min_size=1, max_size=3), st.integers(1, 300))
def test_groups_partition_the_classes_and_have_enough_images_if_there_are_enough(
    counts: list[list[int]], needed: int
) -> None:
    table = np.array(counts)
    groups = group_classes(table, needed)
    assert sorted(index for group in groups for index in group) == [0, 1, 2, 3]
    if table.sum(axis=1).min() >= needed:
        assert all(table[:, group].sum(axis=1).min() >= needed for group in groups)
    else:
        assert len(groups) == 1
    assert sum(len(group) > 1 for group in groups) <= 1


# One setting


@pytest.mark.parametrize("direction", ["higher", "lower"])
def test_every_class_has_the_confident_threshold_of_its_own_images(direction: Direction) -> None:
    images = sample(80, 200, 300)
    flags = flags_of(images, classes=3, direction=direction)
    assert [group.classes for group in flags.groups] == [(0,), (1,), (2,)]
    for index, group in enumerate(flags.groups):
        own = np.sort(images.uncertainty[images.predictions == index])
        expected = choose_flag_point(own, score="score", direction=direction, target_fpr=FPR, guarantee="confident")
        assert (group.point.threshold, group.point.k, group.point.n) == (expected.threshold, expected.k, expected.n)
        assert group.rate_bound == expected.rate_bound
        assert flags.thresholds[index] == expected.threshold
        assert group.n == len(own)


def test_pooled_classes_share_the_threshold_of_all_their_images() -> None:
    images = sample(20, 200, 50)
    flags = flags_of(images, classes=3)
    assert [group.classes for group in flags.groups] == [(1,), (0, 2)]
    own = np.sort(images.uncertainty[images.predictions != 1])
    expected = choose_flag_point(own, score="score", direction="higher", target_fpr=FPR, guarantee="confident")
    assert flags.thresholds[0] == flags.thresholds[2] == expected.threshold != flags.thresholds[1]
    assert flags.groups[1].n == 70
    assert flags.group_of.tolist() == [1, 0, 1]


def test_limits_and_p_values_are_those_of_the_predicted_class() -> None:
    images = sample(80, 200, 300)
    flags = flags_of(images, classes=3)
    new = sample(30, 30, 30, seed=1)
    limits, values = flags.limits(new.predictions), flags.p_values(new.uncertainty, new.predictions)
    for row, (uncertainty, index) in enumerate(zip(*new, strict=True)):
        own = np.sort(images.uncertainty[images.predictions == index])
        assert values[row] == p_values(np.array([uncertainty]), own)[0]
        group = flags.groups[index]
        assert limits[row] == group.point.threshold
        assert (uncertainty > limits[row]) == (values[row] <= group.point.k / (group.n + 1))


def test_limits_are_uncertainties_whatever_the_direction() -> None:
    images = sample(80, 200)
    for direction in ("higher", "lower"):
        flags = flags_of(images, classes=2, direction=direction)
        np.testing.assert_array_equal(
            flags.limits(np.array([1, 0])), as_uncertainty(flags.thresholds, direction)[[1, 0]]
        )
    assert (flags.thresholds <= 0).any()


def test_the_point_of_all_classes_has_the_loosest_threshold_and_the_largest_rate_bound() -> None:
    images = sample(80, 200, 300)
    for direction in ("higher", "lower"):
        flags = flags_of(images, classes=3, direction=direction)
        point = flags.point
        assert (point.score, point.guarantee, point.target_fpr, point.n) == ("score", "by-class", FPR, 580)
        assert point.direction == direction
        loosest = max(as_uncertainty(flags.thresholds, direction))
        assert as_uncertainty(point.threshold, direction) == loosest
        assert point.rate_bound == max(group.rate_bound for group in flags.groups)
        assert point.k == sum(group.point.k for group in flags.groups)


def test_too_few_images_are_refused_with_the_needed_number() -> None:
    with pytest.raises(OperatingPointError) as caught:
        flags_of(sample(20, 30), classes=2)
    assert str(caught.value) == (
        "A by-class false-alarm rate of 0.05 needs at least 59 calibration images; there are 50."
    )
    assert caught.value.parameter == "target_fpr"


@pytest.mark.parametrize("fpr", [0.0, 1.0, -1.0, float("nan")])
def test_a_rate_that_is_not_between_0_and_1_is_refused(fpr: float) -> None:
    with pytest.raises(OperatingPointError, match="must lie strictly between 0 and 1") as caught:
        flags_of(sample(200, 0, 300), classes=3, fpr=fpr)
    assert caught.value.parameter == "target_fpr"


# Several settings


@pytest.mark.parametrize("direction", ["higher", "lower"])
def test_with_several_settings_threshold_and_p_value_are_the_largest_of_the_settings(direction: Direction) -> None:
    samples = [sample(80, 200, seed=seed, shift=shift) for seed, shift in ((0, 0.0), (1, 0.4), (2, -0.3))]
    alone = [flags_of(one, classes=2, direction=direction) for one in samples]
    together = flags_of(*samples, classes=2, direction=direction)
    predictions = np.repeat([0, 1], 50)
    uncertainty = np.random.default_rng(3).normal(predictions, 1.5)
    largest: NDArray[np.float64] = np.max([one.limits(predictions) for one in alone], axis=0)
    np.testing.assert_array_equal(together.limits(predictions), largest)
    highest: NDArray[np.float64] = np.max([one.p_values(uncertainty, predictions) for one in alone], axis=0)
    np.testing.assert_array_equal(together.p_values(uncertainty, predictions), highest)
    assert together.point.rate_bound == max(one.point.rate_bound for one in alone)


def test_the_number_of_images_of_a_group_is_that_of_the_setting_with_the_fewest() -> None:
    flags = flags_of(sample(80, 200), sample(70, 210, seed=1), classes=2)
    assert [group.n for group in flags.groups] == [70, 200]


def test_images_are_divided_by_predicted_class_and_sorted() -> None:
    divided = sort_by_class(np.array([3.0, 1.0, 2.0, 0.5]), np.array([2, 0, 2, 0], np.int32), 4)
    assert [one.tolist() for one in divided] == [[0.5, 1.0], [], [2.0, 3.0], []]
