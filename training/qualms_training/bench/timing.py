"""Compare the times of several actions on a noisy machine: interleaved in one run, by their medians."""

import time
from collections.abc import Callable, Mapping

import numpy as np


def medians(actions: Mapping[str, Callable[[], object]], repeats: int, warm_up: int = 3) -> dict[str, float]:
    """Median seconds of each action over `repeats` rounds, each of which runs all actions once."""
    for action in actions.values():
        for _ in range(warm_up):
            action()
    seconds: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(repeats):
        for name, action in actions.items():
            start = time.perf_counter()
            action()
            seconds[name].append(time.perf_counter() - start)
    return {name: float(np.median(values)) for name, values in seconds.items()}
