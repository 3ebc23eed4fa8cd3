"""Images of several requests through the model: stacked, and in runs of at most the engine's cap."""

import time
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from qualms.inference.engine import CostCurve
from qualms.inference.jobs import Batch, Job


class Runner(Protocol):
    """What is needed of an engine."""

    cost: CostCurve
    max_batch: int

    def run(self, images: NDArray[np.uint8]) -> list[NDArray[Any]]:
        """Outputs, each (N, …), of images (N, H, W, C)."""
        ...


def cost_of(rows: int, engine: Runner) -> float:
    """Seconds for `rows` alone, in as many runs as they take."""
    most, cost = engine.max_batch, engine.cost
    if rows <= most:
        return cost(rows)
    full, rest = divmod(rows, most)
    return full * cost(most) + (cost(rest) if rest else 0.0)


def run_together(jobs: list[Job], engine: Runner) -> Batch:
    """What the model says of all jobs' images; a request with more rows than a run may have takes several."""
    images, most = _stacked(jobs), engine.max_batch
    parts, runs = list[list[NDArray[Any]]](), list[tuple[int, float]]()
    started = ended = time.monotonic()
    for first in range(0, len(images), most):
        part, begun = images[first : first + most], ended
        parts.append(engine.run(part))
        ended = time.monotonic()
        runs.append((len(part), ended - begun))
    return Batch(_joined(parts), runs, started)


def _stacked(jobs: list[Job]) -> NDArray[np.uint8]:
    """The images of all jobs, (N, H, W, C); a lone one is not copied."""
    if len(jobs) == 1 and len(jobs[0].images) == 1:
        return jobs[0].images[0][np.newaxis]
    return np.array([image for job in jobs for image in job.images])


def _joined(parts: list[list[NDArray[Any]]]) -> list[NDArray[Any]]:
    """Each output of all runs, (N, …)."""
    return parts[0] if len(parts) == 1 else [np.concatenate(values) for values in zip(*parts, strict=True)]
