"""Time several things fairly on a noisy machine: in turns within one run, compared by their medians."""

import time
from collections.abc import Callable, Mapping

import numpy as np


def medians(actions: Mapping[str, Callable[[], object]], repeats: int, warm_up: int = 3) -> dict[str, float]:
    """Median seconds of each action over `repeats` rounds in which all take their turn."""
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
