"""The learned cost curve and batch limit, from runs whose durations are given."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qualms.inference.cost import FIRST_REVISIT, LAST_REVISIT, REJECTION_TRIALS, TRIALS, CostCurve, CostLearner


def tiny(rows: int) -> float:
    """The run time of a small network, which gains from every doubling."""
    return 1e-4 + 4e-5 * rows


def large(rows: int) -> float:
    """The run time of a large network, which gains from two images at once, and nothing from more."""
    return 0.01 if rows == 1 else 0.0094 * rows


def fill(learner: CostLearner, seconds: Callable[[int], float], runs: int) -> list[int]:
    """Run as many images as allowed; returns the sizes of the runs."""
    sizes = []
    for _ in range(runs):
        sizes.append(learner.max_batch)
        learner.observe(sizes[-1], seconds(sizes[-1]))
    return sizes


def test_cost_is_linear_between_sizes_and_proportional_beyond_them() -> None:
    cost = CostCurve((1, 4, 8), (1.0, 2.5, 6.5))
    assert [cost(rows) for rows in (1, 2, 4, 6, 8)] == [1.0, 1.5, 2.5, 4.5, 6.5]
    assert cost(16) == 13.0


def test_before_larger_batches_are_run_their_cost_is_proportional() -> None:
    learner = CostLearner(64)
    learner.observe(1, 0.01)
    assert [learner.cost(rows) for rows in (1, 2, 64)] == pytest.approx([0.01, 0.02, 0.64])
    assert learner.max_batch == 2


@pytest.mark.parametrize("max_batch", [1, 2, 11, 64])
def test_batches_of_a_small_network_reach_the_maximum_by_doubling(max_batch: int) -> None:
    learner = CostLearner(max_batch)
    learner.observe(1, tiny(1))
    sizes = fill(learner, tiny, TRIALS * max_batch.bit_length() + 1)
    assert learner.max_batch == max_batch
    assert all(later <= 2 * earlier for earlier, later in zip(sizes, sizes[1:], strict=False))
    assert [learner.cost(rows) for rows in (1, max_batch)] == pytest.approx([tiny(1), tiny(max_batch)])


def test_batches_stop_growing_where_throughput_stops_growing() -> None:
    learner = CostLearner(64)
    assert max(fill(learner, large, 50)) == 4, "one doubling is tried beyond the last that gained"
    assert learner.max_batch == 2


def test_a_size_rejected_by_noise_is_tried_again() -> None:
    learner = CostLearner(64)
    fill(learner, lambda rows: 0.01 * rows, 1 + REJECTION_TRIALS)
    assert learner.max_batch == 1
    sizes = fill(learner, tiny, FIRST_REVISIT + 10 * TRIALS)
    assert sizes[FIRST_REVISIT // 2] == 1
    assert learner.max_batch == 64


def test_a_few_slow_runs_do_not_reject_a_size() -> None:
    learner = CostLearner(64)
    learner.observe(1, tiny(1))
    for _ in range(REJECTION_TRIALS - 1):
        learner.observe(2, 10 * tiny(2))
    fill(learner, tiny, 6 * TRIALS)
    assert learner.max_batch == 64


def test_a_size_that_never_gains_is_tried_ever_more_rarely() -> None:
    learner = CostLearner(64)
    sizes = fill(learner, large, 20 * LAST_REVISIT)
    assert learner.max_batch == 2
    assert 0 < sizes.count(4) <= 30 * REJECTION_TRIALS


def test_a_size_that_became_slower_is_given_up() -> None:
    learner = CostLearner(64)
    fill(learner, tiny, 10 * TRIALS)
    fill(learner, lambda rows: tiny(rows) * (3 if rows > 16 else 1), 2000)
    assert learner.max_batch == 16


def test_partly_filled_runs_do_not_soon_decide_against_a_size() -> None:
    learner = CostLearner(64)
    fill(learner, tiny, 4 * TRIALS)
    assert learner.max_batch == 16
    for _ in range(TRIALS + 1):
        learner.observe(9, tiny(9))
    assert learner.max_batch == 16
    fill(learner, tiny, 4 * TRIALS)
    assert learner.max_batch == 64


def test_sizes_whose_runs_are_longer_than_allowed_are_not_used() -> None:
    learner = CostLearner(64, max_run_seconds=0.5)
    assert max(fill(learner, lambda rows: 0.1 * rows - 0.01, 20)) <= 8
    assert max(fill(learner, lambda rows: 0.1 * rows, 20)) <= 4
    slow = CostLearner(64, max_run_seconds=0.01)
    assert fill(slow, lambda rows: 0.1 * rows, 10) == 10 * [1]


def test_a_size_that_needs_too_much_memory_is_never_run_again() -> None:
    learner = CostLearner(64)
    fill(learner, tiny, 4 * TRIALS)
    learner.too_large(16)
    assert max(fill(learner, tiny, 10 * LAST_REVISIT)) == 8
    learner.too_large(1)
    assert learner.max_batch == 1


@given(st.lists(st.tuples(st.integers(1, 64), st.floats(1e-6, 10)), min_size=1, max_size=60))
def test_more_images_never_cost_less_and_the_limit_is_kept(runs: list[tuple[int, float]]) -> None:
    learner = CostLearner(32)
    for rows, seconds in runs:
        learner.observe(rows, seconds)
        assert 1 <= learner.max_batch <= 32
    costs = [learner.cost(rows) for rows in range(1, 100)]
    assert all(later >= earlier * (1 - 1e-12) for earlier, later in zip(costs, costs[1:], strict=False))


def test_slow_outliers_hardly_change_the_cost() -> None:
    learner, rng = CostLearner(1), np.random.default_rng(0)
    for _ in range(2000):
        learner.observe(1, 0.01 * (1 + rng.exponential(0.02) + 50 * (rng.random() < 0.02)))
    assert learner.cost(1) == pytest.approx(0.01, rel=0.05)


def test_a_lasting_slowdown_becomes_the_cost() -> None:
    learner = CostLearner(1)
    fill(learner, lambda _: 0.01, 10)
    fill(learner, lambda _: 0.02, 1000)
    assert learner.cost(1) == pytest.approx(0.02, rel=0.05)
