"""Batching without waiting: an idle runner takes what is there; while it runs, requests gather for the next run.

Everything but the run itself happens on the event loop, so no state is locked except the queue between loop and
runner. Rows are counted, not requests. A request whose deadline the queue cannot meet is refused on arrival, by
the cost curve measured at warm-up; one that expired or whose client left is dropped before it is run.
"""

import asyncio
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from service.engine import CostCurve

_ADAPTS = 0.1
"""how fast the estimate of slowness follows what is seen"""
_SLOWEST = 20.0
"""one stall must not close the door for long"""


class Overloaded(Exception):  # noqa: N818
    """The queue cannot meet the request's deadline; trying again after `retry_after` seconds may help."""

    def __init__(self, retry_after: int) -> None:
        super().__init__(f"the queue cannot meet the deadline; retry after {retry_after} s")
        self.retry_after = retry_after


class Expired(Exception):  # noqa: N818
    """The request was admitted and its deadline passed before it could be run."""


class Left(Exception):  # noqa: N818
    """The client was gone before its request could be run."""


class Draining(Exception):  # noqa: N818
    """The service is stopping and takes nothing new."""


class Runner(Protocol):
    """What the batcher needs of an engine."""

    cost: CostCurve
    max_batch: int

    def run(self, images: NDArray[np.uint8]) -> list[NDArray[Any]]:
        """Outputs, each (N, …), of images (N, H, W, C)."""
        ...


@dataclass(eq=False, slots=True)
class Job:
    """One request's images on their way through the queue."""

    images: list[NDArray[np.uint8]]
    deadline: float
    """on the clock of time.monotonic"""
    gone: Callable[[], bool]
    """whether the client has left"""
    future: "asyncio.Future[Answer]"
    queued: float
    dropped_for: Expired | Left | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """What one run gave, shared by all requests in it."""

    outputs: list[NDArray[Any]]
    seconds: float
    rows: int
    started: float
    notes: dict[object, Any] = field(default_factory=dict)
    """room for what is worked out once for the whole batch"""


@dataclass(frozen=True, slots=True)
class Answer:
    """A request's share of a batch: rows start … start + count."""

    batch: Batch
    start: int
    count: int
    waited: float


class Batcher:
    """The queue of one engine. Create it, `start` it on the event loop, `submit` images, `stop` it when empty."""

    def __init__(
        self,
        engine: Runner,
        *,
        on_batch: Callable[[Batch], None] | None = None,
    ) -> None:
        self._engine = engine
        self._on_batch = on_batch or (lambda _: None)
        self._ready: deque[Job] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._waking = False
        self._rows_waiting = 0
        self._rows_decoding = 0
        self._running_until = 0.0
        self._slowness = 1.0
        self._idle_since = 0.0
        self._thread = threading.Thread(target=self._work, name="qualms-runner", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Start the runner's thread; results arrive on the event loop this is called on."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """Run what was admitted, then end the thread."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join)

    @property
    def depth(self) -> int:
        """Rows that wait."""
        return self._rows_waiting

    def predicted_wait(self, rows: int) -> float:
        """Seconds until `rows` more would be answered: what runs now, what waits, and they themselves.

        Only runs can tell that slowness has passed, so it is never a reason to refuse what would run alone.
        """
        ahead = self._rows_waiting + self._rows_decoding
        full, rest = divmod(ahead + rows, self._engine.max_batch)
        queued = full * self._engine.cost(self._engine.max_batch) + (self._engine.cost(rest) if rest else 0.0)
        if not ahead and not self._running_until:
            return queued
        return max(0.0, self._running_until - time.monotonic()) + self._slowness * queued

    @contextmanager
    def decoding(self, rows: int) -> Iterator[None]:
        """Count rows that are on their way to the queue, so that those who come after know of them."""
        self._rows_decoding += rows
        try:
            yield
        finally:
            self._rows_decoding -= rows

    def admit(self, rows: int, deadline: float) -> None:
        """Refuse what cannot be answered in time: before it is decoded, and again when it is queued."""
        if self._stopping:
            raise Draining
        late = time.monotonic() + self.predicted_wait(rows) - deadline
        if late > 0:
            raise Overloaded(max(1, math.ceil(late)))

    def submit(
        self, images: list[NDArray[np.uint8]], deadline: float, gone: Callable[[], bool]
    ) -> "asyncio.Future[Answer]":
        """Queue decoded images; the future holds their share of a batch, or raises Expired or Left."""
        self.admit(len(images), deadline)
        assert self._loop is not None
        job = Job(images, deadline, gone, self._loop.create_future(), time.monotonic())
        with self._wake:
            self._ready.append(job)
            self._rows_waiting += len(images)
        # Once for all that one pass of the loop brings: woken for each, the runner would take the core from the loop
        # after the first, and run batches of one or two while dozens wait to be read.
        if not self._waking:
            self._waking = True
            self._loop.call_soon(self._notify)
        return job.future

    def _notify(self) -> None:
        self._waking = False
        with self._wake:
            self._wake.notify()

    # The runner's thread.

    def _work(self) -> None:
        while True:
            with self._wake:
                while not self._ready and not self._stopping:
                    self._idle_since = 0.0
                    self._wake.wait()
                if not self._ready:
                    return
                jobs, dropped = self._take()
            self._run(jobs, dropped)

    def _take(self) -> tuple[list[Job], list[Job]]:
        """Live jobs up to the cap, at least one, and the dead ones met on the way."""
        now, rows = time.monotonic(), 0
        taken: list[Job] = []
        dropped: list[Job] = []
        while self._ready:
            job = self._ready[0]
            if job.gone() or job.future.cancelled():
                job.dropped_for = Left()
            elif job.deadline < now:
                job.dropped_for = Expired()
            elif taken and rows + len(job.images) > self._engine.max_batch:
                break
            self._ready.popleft()
            self._rows_waiting -= len(job.images)
            if job.dropped_for is None:
                taken.append(job)
                rows += len(job.images)
            else:
                dropped.append(job)
        if taken:
            self._running_until = now + self._slowness * self._engine.cost(rows)
        return taken, dropped

    def _learn(self, rows: int, started: float, ended: float, more: bool) -> None:
        """Follow how much slower runs are than at warm-up, when cores are shared with parsing and decoding.

        With work left over, the time since the last run ended counts in full: that is what the next row waits for.
        """
        since = self._idle_since or started
        ratio = (ended - since) / max(self._engine.cost(rows), 1e-9)
        self._slowness += _ADAPTS * (min(max(ratio, 1.0), _SLOWEST) - self._slowness)
        self._idle_since = ended if more else 0.0

    def _run(self, jobs: list[Job], dropped: list[Job]) -> None:
        assert self._loop is not None
        result: Batch | Exception | None = None
        if jobs:
            try:
                images = np.stack([image for job in jobs for image in job.images])
                started = time.monotonic()
                outputs = self._engine.run(images)
                ended = time.monotonic()
                result = Batch(outputs, ended - started, len(images), started)
                self._learn(len(images), started, ended, more=bool(self._ready))
            except Exception as error:
                result = error
            self._running_until = 0.0
        else:
            self._idle_since = 0.0  # all that waited was dropped, so nothing waits
        self._loop.call_soon_threadsafe(self._deliver, jobs, dropped, result)

    # The event loop again.

    def _deliver(self, jobs: list[Job], dropped: list[Job], result: Batch | Exception | None) -> None:
        for job in dropped:
            assert job.dropped_for is not None
            if not job.future.done():
                job.future.set_exception(job.dropped_for)
        if isinstance(result, Batch):
            try:
                self._on_batch(result)
            except Exception as error:  # whoever waits must hear of it
                result = error
        start = 0
        for job in jobs:
            count = len(job.images)
            if not job.future.done():
                if isinstance(result, Batch):
                    job.future.set_result(Answer(result, start, count, result.started - job.queued))
                elif result is not None:
                    job.future.set_exception(result)
            start += count
