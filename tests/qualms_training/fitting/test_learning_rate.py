"""Learning rates at points computed by hand: ten epochs of ten steps, a peak of 2."""

import pytest

from qualms_training.fitting.learning_rate import LearningRate, ScheduleName, learning_rate

PEAK = 2.0


def rate_of(schedule: ScheduleName) -> LearningRate:
    return learning_rate(schedule, PEAK, epochs=10, steps_per_epoch=10)


@pytest.mark.parametrize("step", [0, 37, 99])
def test_constant_is_the_peak(step: int) -> None:
    assert rate_of("constant")(step) == PEAK


@pytest.mark.parametrize(
    ("step", "share"),
    [(0, 1.0), (25, 0.8535533905932737), (50, 0.5), (75, 0.1464466094067262), (100, 0.0)],
)
def test_cosine_falls_from_the_peak_to_zero(step: int, share: float) -> None:
    assert rate_of("cosine")(step) == pytest.approx(PEAK * share, abs=1e-12)


@pytest.mark.parametrize(
    ("step", "share"),
    [
        (0, 0.04),  # the first rate
        (15, 0.52),  # half-way up: 0.04 + 0.96 / 2
        (30, 1.0),  # after 30 % of the steps
        (65, 0.5),  # half-way down
        (100, 0.0),
    ],
)
def test_one_cycle_rises_for_three_tenths_of_the_steps_and_falls_to_zero(step: int, share: float) -> None:
    assert rate_of("one-cycle")(step) == pytest.approx(PEAK * share, abs=1e-12)


@pytest.mark.parametrize("schedule", ["cosine", "one-cycle"])
def test_the_rate_of_the_last_step_is_small_but_not_zero(schedule: ScheduleName) -> None:
    assert 0 < rate_of(schedule)(99) < 0.01 * PEAK


@pytest.mark.parametrize(("step", "share"), [(0, 1.0), (19, 1.0), (20, 0.1), (59, 0.1), (60, 0.001), (99, 0.001)])
def test_steps_use_the_factor_of_the_last_milestone_reached(step: int, share: float) -> None:
    by_step = learning_rate("steps", PEAK, epochs=10, steps_per_epoch=10, milestones=[2, 6], factors=[0.1, 0.001])
    assert by_step(step) == pytest.approx(PEAK * share)


def test_steps_without_milestones_are_constant() -> None:
    assert rate_of("steps")(99) == PEAK
