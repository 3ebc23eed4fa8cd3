"""What passes through the batcher: requests as jobs, runs as batches, answers, and why there may be none."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray


class Overloaded(Exception):  # noqa: N818
    """The queue cannot meet the request's deadline; trying again after `retry_after` seconds may help.

    It does not help whose deadline is shorter than what the request costs `alone`, in seconds.
    """

    def __init__(self, retry_after: int, alone: float) -> None:
        super().__init__(f"the queue cannot meet the deadline; retry after {retry_after} s")
        self.retry_after = retry_after
        self.alone = alone


class Expired(Exception):  # noqa: N818
    """The request was admitted and its deadline passed before it could be run."""


class Left(Exception):  # noqa: N818
    """The client was gone before its request could be run."""


class Draining(Exception):  # noqa: N818
    """The service is stopping and takes nothing new."""


Decode: TypeAlias = Callable[[], list[NDArray[np.uint8]]]
"""makes the images, each (H, W, C), that a request is about"""
Done: TypeAlias = "Callable[[Answer | Exception], None]"
"""hears, on the event loop, of a request's share of a batch, or of Expired, Left or what went wrong; must not raise"""


@dataclass(eq=False, slots=True)
class Job:
    """One request's images on their way through the queue."""

    decode: "Decode"
    rows: int
    deadline: float
    """on the clock of time.monotonic"""
    gone: Callable[[], bool]
    """whether the client has left"""
    done: "Done"
    queued: float
    images: list[NDArray[np.uint8]] = field(default_factory=list)
    decode_seconds: float = 0.0
    dropped_for: Expired | Left | None = None

    def dead(self, ends: float) -> bool:
        """Whether there is nobody, or by the time it `ends` no time, left to answer; `dropped_for` says which."""
        if self.gone():
            self.dropped_for = Left()
        elif self.deadline < ends:
            self.dropped_for = Expired()
        return self.dropped_for is not None


@dataclass(slots=True)
class Batch:
    """What was run together, shared by all requests in it."""

    outputs: list[NDArray[Any]]
    runs: list[tuple[int, float]]
    """rows and seconds of each: one, unless a lone request has more rows than a run may have"""
    started: float
    notes: dict[object, Any] = field(default_factory=dict)
    """room for what is worked out once for the whole batch"""

    @property
    def rows(self) -> int:
        """Of all runs."""
        return sum(rows for rows, _ in self.runs)

    @property
    def seconds(self) -> float:
        """Of all runs."""
        return sum(seconds for _, seconds in self.runs)


@dataclass(slots=True)
class Answer:
    """A request's share of a batch: rows start … start + count."""

    batch: Batch
    start: int
    count: int
    waited: float
    """seconds from queueing to the start of the run, without its own decoding"""
    decode_seconds: float = 0.0
