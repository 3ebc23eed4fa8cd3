"""Learning-rate schedules: functions of the global step, so that resuming needs no state."""

import math
from collections.abc import Callable, Sequence
from typing import Literal

ScheduleName = Literal["constant", "steps", "one-cycle", "cosine"]
LearningRate = Callable[[int], float]

_RISE = 0.3
"""share of the steps of a one-cycle schedule in which the rate rises"""
_FLOOR = 0.04
"""its first rate, as a share of the peak"""


def learning_rate(
    schedule: ScheduleName,
    peak: float,
    *,
    epochs: int,
    steps_per_epoch: int,
    milestones: Sequence[int] = (),
    factors: Sequence[float] = (),
) -> LearningRate:
    """The learning rate by global step; `steps` multiplies `peak` by the factor of the last milestone (an epoch) reached."""
    total = max(1, epochs * steps_per_epoch)
    rise = _RISE * total

    def steps(step: int) -> float:
        passed = [factor for epoch, factor in zip(milestones, factors, strict=True) if step >= epoch * steps_per_epoch]
        return peak * (passed[-1] if passed else 1.0)

    def one_cycle(step: int) -> float:
        if step < rise:
            return peak * (_FLOOR + (1 - _FLOOR) * (1 - _half_cosine(step / rise)))
        return peak * _half_cosine((step - rise) / (total - rise))

    shapes: dict[ScheduleName, LearningRate] = {
        "constant": lambda _: peak,
        "steps": steps,
        "one-cycle": one_cycle,
        "cosine": lambda step: peak * _half_cosine(step / total),
    }
    return shapes[schedule]


def _half_cosine(share: float) -> float:
    """Half a cosine from 1 to 0."""
    return 0.5 * (1 + math.cos(math.pi * share))
