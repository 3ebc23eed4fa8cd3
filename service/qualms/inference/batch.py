"""The data types of the queue: one `Job` per request, one `Batch` per run, and one `Answer` per request."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from qualms.inference.cost import CostCurve


class Expired(Exception):  # noqa: N818
    """The request was admitted, but its deadline passed before it could be run."""


class ClientDisconnected(Exception):  # noqa: N818
    """The client has closed the connection, so no reply can be sent."""


class Draining(Exception):  # noqa: N818
    """The service is stopping and accepts no new requests."""


class BatchEngine(Protocol):
    """The part of an engine that the queue uses."""

    cost: CostCurve
    max_batch: int

    def run(self, images: NDArray[np.uint8]) -> list[NDArray[Any]]:
        """Outputs, each (N, …), of images (N, H, W, C)."""
        ...


Decode: TypeAlias = Callable[[], list[NDArray[np.uint8]]]
"""returns the images of a request, each (H, W, C)"""
Done: TypeAlias = "Callable[[Answer | Exception], None]"
"""called once on the event loop with the request's rows, or with the error; must not raise"""


@dataclass(eq=False, slots=True)
class Job:
    """One request in the queue."""

    decode: Decode
    rows: int
    deadline: float
    """on the batcher's clock"""
    disconnected: Callable[[], bool]
    """whether the client has disconnected"""
    done: Done
    queued: float
    images: list[NDArray[np.uint8]] = field(default_factory=list)
    decode_seconds: float = 0.0
    dropped_for: Expired | ClientDisconnected | None = None

    def check_dropped(self, ends: float) -> bool:
        """Whether the client has disconnected or the deadline is before `ends`; sets `dropped_for` to the reason."""
        if self.disconnected():
            self.dropped_for = ClientDisconnected()
        elif self.deadline < ends:
            self.dropped_for = Expired()
        return self.dropped_for is not None


@dataclass(slots=True)
class Batch:
    """The outputs of images that were run together."""

    outputs: list[NDArray[Any]]
    runs: list[tuple[int, float]]
    """(rows, seconds) of each run; several only for one request with more rows than `max_batch`"""
    started: float
    images: NDArray[np.uint8]
    """(N, H, W, C)"""
    cache: dict[object, Any] = field(default_factory=dict)
    """values computed once for the whole batch, for example the verdicts at an operating point"""
    rows: int = field(init=False)
    """images in all runs"""
    seconds: float = field(init=False)
    """duration of all runs"""

    def __post_init__(self) -> None:
        self.rows = sum(rows for rows, _ in self.runs)
        self.seconds = sum(seconds for _, seconds in self.runs)


@dataclass(slots=True)
class Answer:
    """One request's rows of a batch: start … start + count."""

    batch: Batch
    start: int
    count: int
    waited: float
    """seconds from queueing to the start of the run, without decoding"""
    decode_seconds: float = 0.0


def run_jobs(jobs: list[Job], engine: BatchEngine, clock: Callable[[], float] = time.monotonic) -> Batch:
    """Run the images of all jobs, in several runs if one request has more rows than `max_batch`."""
    images, max_batch = _stack(jobs), engine.max_batch
    parts, runs = list[list[NDArray[Any]]](), list[tuple[int, float]]()
    started = ended = clock()
    for first in range(0, len(images), max_batch):
        part, begun = images[first : first + max_batch], ended
        parts.append(engine.run(part))
        ended = clock()
        runs.append((len(part), ended - begun))
    outputs = parts[0] if len(parts) == 1 else [np.concatenate(values) for values in zip(*parts, strict=True)]
    return Batch(outputs, runs, started, images)


def _stack(jobs: list[Job]) -> NDArray[np.uint8]:
    """The images of all jobs, (N, H, W, C); a single image is not copied."""
    if len(jobs) == 1 and len(jobs[0].images) == 1:
        return jobs[0].images[0][np.newaxis]
    return np.array([image for job in jobs for image in job.images])
