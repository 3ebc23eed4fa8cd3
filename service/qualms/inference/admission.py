"""Admission: refuse a request on arrival if the queue cannot answer it before its deadline.

The prediction uses the learned cost curve, multiplied by the measured slowdown of recent runs. While the queue
is full, the event loop pauses between bursts of refusals, which leaves the CPU core to the model.
"""

import asyncio
import math
import threading
from collections.abc import Callable

from qualms.inference.batch import Batch, BatchEngine

PAUSE_SECONDS = 0.01
"""longest pause of the event loop"""
_ADAPTATION = 0.1
"""weight of the newest observation in a moving average"""
_SAFETY_FACTOR = 1.5
"""factor on predicted waits; without it, all queued requests would be late as soon as one run takes longer than predicted"""
_MAX_SLOWDOWN = 20.0
"""maximum of one observed slowdown, which limits the effect of a single stall"""


class Admission:
    """Predicts when a request would be answered. Counts rows (images), not requests."""

    def __init__(
        self,
        engine: BatchEngine,
        in_progress: Callable[[], int],
        rows_decoding: Callable[[], int],
        clock: Callable[[], float],
    ) -> None:
        """`in_progress` returns the number of requests that were read and are not answered yet, without those whose images
        are being decoded in threads or workers; `rows_decoding` returns the number of these images.
        """
        self._engine = engine
        self._in_progress = in_progress
        self._rows_decoding = rows_decoding
        self._clock = clock
        self.rows_waiting = 0
        """rows in the queue; the batcher changes it under its lock"""
        self._running_until = 0.0
        """when the current run is expected to end; 0 while nothing runs"""
        self._slowdown = 1.0
        """moving average of actual over predicted run time"""
        self._busy_since = 0.0
        """end of the last run if requests were waiting then, else 0"""

    def cost(self, rows: int) -> float:
        """Seconds for `rows` on an idle service, in as many runs as they need."""
        max_batch, cost = self._engine.max_batch, self._engine.cost
        if rows <= max_batch:
            return cost(rows)
        full, rest = divmod(rows, max_batch)
        return full * cost(max_batch) + (cost(rest) if rest else 0.0)

    def predicted_wait(self, rows: int, decoding: float | None = None) -> float:
        """Seconds until `rows` more would be answered; `decoding` as in `retry_after`."""
        return self._wait(rows, self._rows_ahead(decoding), self._clock(), decoding)

    def retry_after(self, rows: int, deadline: float, decoding: float | None = None) -> int | None:
        """None if `rows` more can be answered before `deadline`, else whole seconds after which to retry.

        `decoding`: predicted seconds until they are decoded in threads or workers, None if they are decoded inline. Only
        requests that need it wait for decoding.
        """
        ahead, now = self._rows_ahead(decoding), self._clock()
        factor = _SAFETY_FACTOR if ahead or self._running_until else 1.0
        late = now + factor * self._wait(rows, ahead, now, decoding) - deadline
        return None if late <= 0 else max(1, math.ceil(late))

    @property
    def queue_is_full(self) -> bool:
        """Whether the next run is full, so that a new request could not be part of it."""
        return self.rows_waiting >= self._engine.max_batch

    def run_end(self, rows: int, now: float, *, alone: bool) -> float:
        """Predicted end of a run of `rows` that starts now; the slowdown is not applied to a single request (`alone`)."""
        return now + (1.0 if alone else self._slowdown) * self.cost(rows)

    def run_started(self, rows: int, now: float) -> None:
        """A run of `rows` begins."""
        self._running_until = now + self._slowdown * self.cost(rows)

    def run_ended(self, batch: Batch | None, *, work_left: bool) -> None:
        """Update the slowdown after a run; `batch` is None if it failed, `work_left` whether requests are still waiting.

        If requests were waiting when the previous run ended, time is counted from that end, because they waited that long.
        """
        self._running_until = 0.0
        if batch is None:
            return
        ended = batch.started + batch.seconds
        ratio = (ended - (self._busy_since or batch.started)) / max(self.cost(batch.rows), 1e-9)
        self._slowdown += _ADAPTATION * (min(max(ratio, 1.0), _MAX_SLOWDOWN) - self._slowdown)
        self._busy_since = ended if work_left else 0.0

    def all_dropped(self) -> None:
        """Reduce the slowdown because every waiting request was dropped; a wrong estimate would drop all later ones too."""
        self._busy_since = 0.0
        self._slowdown += _ADAPTATION * (1.0 - self._slowdown)

    def idle(self) -> None:
        """Nothing is waiting, so the time until the next request does not count as slowdown."""
        self._busy_since = 0.0

    def _rows_ahead(self, decoding: float | None) -> int:
        """Rows before a new request: waiting, or read but not queued yet; with `decoding` also those that are decoded."""
        ahead = max(self.rows_waiting, self._in_progress() - 1)
        return ahead if decoding is None else ahead + self._rows_decoding()

    def _wait(self, rows: int, ahead: int, now: float, decoding: float | None) -> float:
        """Seconds until `rows` more would be answered after the `ahead` rows before them.

        The slowdown is ignored for a request that would run alone, because only its run can show that the slowdown has
        passed.
        """
        queued = self.cost(ahead + rows)
        if not ahead and not self._running_until:
            return queued + (decoding or 0.0)
        return max(self._running_until - now, decoding or 0.0, 0.0) + self._slowdown * queued


class LoopPause:
    """Blocks the event loop until the current run on the other thread ends, for at most `seconds`.

    Each turn of the loop evicts the model from the core's caches. Refusals sent in bursts cost a fraction of refusals sent
    one by one.
    """

    def __init__(self, connections: Callable[[], int], seconds: float = PAUSE_SECONDS) -> None:
        """`connections` returns the number of open connections."""
        self._connections = connections
        self._seconds = seconds
        self._last_connections = 0
        self._scheduled = False
        self._ended = threading.Condition()
        self._runs_ended = 0

    def schedule(self, loop: asyncio.AbstractEventLoop) -> None:
        """Pause once all requests of the loop's current iteration have been answered."""
        if not self._scheduled:
            self._scheduled = True
            loop.call_soon(self._pause, self._runs_ended)

    def run_ended(self) -> None:
        """End the pause; called by the runner's thread."""
        with self._ended:
            self._runs_ended += 1
            self._ended.notify()

    def _pause(self, runs_ended: int) -> None:
        self._scheduled = False
        before, self._last_connections = self._last_connections, self._connections()
        if self._last_connections > before:  # one iteration accepts one connection, so more may be waiting
            return
        with self._ended:
            self._ended.wait_for(lambda: self._runs_ended != runs_ended, self._seconds)
