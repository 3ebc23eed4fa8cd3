"""Batching without waiting: an idle runner takes what is there; while it runs, requests gather for the next run.

What one pass of the event loop brings is decoded in one go, which is quicker than between reading and answering. A run
that is short is made on the loop itself, where it costs less than a hand-over to the runner's thread and back; a long
one goes to that thread. Rows are counted, not requests. A request whose deadline the queue cannot meet is refused on
arrival, by the cost curve measured at warm-up; one that expired or whose client left is dropped before it is run. Where
the loop can only refuse, it does so in bursts and leaves the core to the model between them.
"""

import asyncio
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from qualms.inference.cpu import yield_to_other_threads
from qualms.inference.jobs import Answer, Batch, Decode, Done, Draining, Job, Overloaded
from qualms.inference.runs import Runner, cost_of, run_together
from qualms.inference.standback import StandBack

SHORT_SECONDS = 0.005
"""a run up to this long is made on the event loop: about what reading and answering its requests takes there"""
_ADAPTS = 0.1
"""how fast the estimate of slowness follows what is seen"""
_CAUTION = 1.5
"""a queue filled up to the deadline would make everybody late as soon as anything takes longer than foreseen"""
_SLOWEST = 20.0
"""one stall must not close the door for long"""

_log = logging.getLogger("qualms.batcher")


class Batcher:
    """The queue of one engine. Create it, `start` it on the event loop, `submit` images, `stop` it when empty."""

    def __init__(
        self,
        engine: Runner,
        *,
        on_batch: Callable[[Batch], None] | None = None,
        short_seconds: float = SHORT_SECONDS,
        decode_threads: int = 1,
        in_progress: Callable[[], int] = lambda: 0,
        connections: Callable[[], int] = lambda: 0,
    ) -> None:
        """`in_progress` tells how many requests the server has read and not answered, `connections` how many are open."""
        self._engine = engine
        self._in_progress = in_progress
        self._stand_back = StandBack(connections)
        self._decode_threads = decode_threads
        self._short_seconds = short_seconds
        self._on_batch = on_batch or (lambda _: None)
        self._arrived: deque[Job] = deque()
        self._ready: deque[Job] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._resting = True
        """whether the thread waits for work"""
        self._seen = 0
        """requests that had arrived at the last look"""
        self._due = False
        """whether `_pass` is about to run"""
        self.one_by_one = False
        """whether the last run was of one request, in an earlier pass of the loop: then the next may be alone, too"""
        self._rows_waiting = 0
        self._rows_decoding = 0
        self._decode_seconds = 0.0
        """of an image that was decoded elsewhere, lately"""
        self._running_until = 0.0
        self._slowness = 1.0
        self._idle_since = 0.0
        self._thread = threading.Thread(target=self._work, name="qualms-runner", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Start the runner's thread; results arrive on the event loop this is called on."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        yield_to_other_threads()

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
        """Seconds until `rows` more would be answered: what is decoded or runs now, what waits, and they themselves."""
        return self._wait(rows, self._ahead(), time.monotonic())

    def _wait(self, rows: int, ahead: int, now: float) -> float:
        """The same `now`, with so many rows before them.

        Only runs can tell that slowness has passed, so it is never a reason to refuse what would run alone.
        """
        queued = self.cost(ahead + rows)
        if not ahead and not self._running_until:
            return queued
        decoding = self._rows_decoding * self._decode_seconds / self._decode_threads
        return decoding + max(0.0, self._running_until - now) + self._slowness * queued

    def cost(self, rows: int) -> float:
        """Seconds for `rows` alone."""
        return cost_of(rows, self._engine)

    def _ahead(self) -> int:
        """Rows that are before a new request, whether they wait, are decoded, or were read and not looked at yet."""
        return max(self._rows_waiting + self._rows_decoding, self._in_progress() - 1)

    @contextmanager
    def decoding(self, rows: int) -> Iterator[None]:
        """Count rows that others decode for the queue, so that those who come after know of them."""
        self._rows_decoding += rows
        try:
            yield
        finally:
            self._rows_decoding -= rows

    def decoded(self, rows: int, seconds: float) -> None:
        """Hear how long it took to decode `rows` elsewhere, without waiting for a thread."""
        self._decode_seconds += _ADAPTS * (seconds / rows - self._decode_seconds)

    def admit(self, rows: int, deadline: float) -> None:
        """Refuse what cannot be answered in time: before it is decoded, and again when it is queued."""
        retry_after = self.refusal(rows, deadline)
        if retry_after is not None:
            raise Overloaded(retry_after, self.cost(rows))

    def refusal(self, rows: int, deadline: float) -> int | None:
        """Seconds after which to try again, if `rows` more cannot be answered in time; Draining if nothing is taken.

        Who is told so refuses, and when all of the loop's pass has been read, the loop stands back.
        """
        if self._stopping:
            raise Draining
        ahead, now = self._ahead(), time.monotonic()
        caution = _CAUTION if ahead or self._running_until else 1.0
        late = now + caution * self._wait(rows, ahead, now) - deadline
        if late <= 0:
            return None
        full = self._rows_waiting >= self._engine.max_batch  # what comes could not be run next
        if full and not self._resting:
            assert self._loop is not None
            self._stand_back.soon(self._loop)
        return max(1, math.ceil(late))

    def submit(
        self, decode: Decode, rows: int, deadline: float, gone: Callable[[], bool], *, alone: bool = False
    ) -> "asyncio.Future[Answer]":
        """Queue `rows` images; the future holds their share of a batch, or raises Expired, Left or what `decode` did."""
        assert self._loop is not None
        self.admit(rows, deadline)
        future: asyncio.Future[Answer] = self._loop.create_future()
        self.queue(decode, rows, deadline, lambda: gone() or future.cancelled(), partial(_resolve, future), alone=alone)
        return future

    def queue(
        self, decode: Decode, rows: int, deadline: float, gone: Callable[[], bool], done: Done, *, alone: bool = False
    ) -> None:
        """Queue `rows` images that were admitted, for who waits without a task; `done` is called once.

        Who knows that no other request can come with the same pass of the loop says `alone`, and need not wait for it.
        """
        job = Job(decode, rows, deadline, gone, done, time.monotonic())
        if self._idle and self._in_progress() <= 1:
            self._idle_since = 0.0  # nothing was left over, so the time before it came is nobody's wait
        if alone and self._idle and self.cost(rows) <= self._short_seconds:
            if self._decoded(job, job.queued):
                self._deliver([job], [], self._run([job]))
            return
        self._arrived.append(job)
        with self._wake:
            self._rows_waiting += rows
        self._soon()

    @property
    def _idle(self) -> bool:
        """Whether nothing waits or runs."""
        return self._resting and not self._rows_waiting

    def _soon(self) -> None:
        """Look at the queue once for all that one pass of the loop brings.

        After each request, the first would run alone while dozens wait to be read.
        """
        if not self._due:
            self._due = True
            assert self._loop is not None
            self._loop.call_soon(self._pass)

    def _pass(self) -> None:
        """Decode what arrived and run it, if that is short and the thread rests; else running is the thread's."""
        self._due = False
        if self._gathering():
            self._soon()
            return
        ready = self._decode_arrived()
        with self._wake:
            self._ready.extend(ready)
            here = self._resting and self.cost(self._next_rows()) <= self._short_seconds
            if here:
                jobs, dropped = self._take()
            else:
                self._wake.notify()
        if here:
            self._deliver(jobs, dropped, self._run(jobs))
        if self._arrived or (here and self._ready):  # but not before others had their turn on the loop
            self._soon()

    def _gathering(self) -> bool:
        """Whether to look once more, because the loop's last pass brought several requests and may bring others.

        Nothing waits idly: a pass that brings nothing new is the last, and a lone request does not cause another.
        """
        more = len(self._arrived) > max(1, self._seen) and self._rows_waiting < self._engine.max_batch
        self._seen = len(self._arrived) if more else 0
        return more

    def _decode_arrived(self) -> list[Job]:
        """Decode about a batch of what arrived."""
        ready, rows, gone = list[Job](), 0, 0
        now = time.monotonic()
        while self._arrived and rows < self._engine.max_batch:
            job = self._arrived.popleft()
            if self._decoded(job, now):
                ready.append(job)
                rows += job.rows
            else:
                gone += job.rows
            now += job.decode_seconds
        if gone:
            with self._wake:
                self._rows_waiting -= gone
        return ready

    def _decoded(self, job: Job, now: float) -> bool:
        """Decode a request's images; if that is impossible, or nobody waits for it any more, the request hears so."""
        if job.dead(now):
            assert job.dropped_for is not None
            job.done(job.dropped_for)
            return False
        try:
            job.images = job.decode()
        except Exception as error:
            job.done(error)
            return False
        finally:
            job.decode_seconds = time.monotonic() - now
        return True

    def _next_rows(self) -> int:
        """Rows of the batch that would be taken now, or a few more."""
        if not self._ready:
            return 0
        return max(self._ready[0].rows, min(self._rows_waiting, self._engine.max_batch))

    # The runner's thread.

    def _work(self) -> None:
        while True:
            with self._wake:
                self._resting = True
                while not self._ready and not self._stopping:
                    self._idle_since = 0.0
                    self._wake.wait()
                if not self._ready:
                    return
                self._resting = False
                jobs, dropped = self._take()
            result = self._run(jobs)
            assert self._loop is not None
            self._loop.call_soon_threadsafe(self._deliver, jobs, dropped, result)
            self._stand_back.run_ended()

    def _take(self) -> tuple[list[Job], list[Job]]:
        """Live jobs up to the cap, at least one, and the dead ones met on the way."""
        now, rows = time.monotonic(), 0
        slowness = self._slowness if len(self._ready) > 1 else 1.0  # as in `predicted_wait`
        ends = now + slowness * self.cost(self._next_rows())
        taken: list[Job] = []
        dropped: list[Job] = []
        while self._ready:
            job = self._ready[0]
            dead = job.dead(ends)
            if not dead and taken and rows + job.rows > self._engine.max_batch:
                break
            self._ready.popleft()
            self._rows_waiting -= job.rows
            if dead:
                dropped.append(job)
            else:
                taken.append(job)
                rows += job.rows
        if taken:
            self._running_until = now + self._slowness * self.cost(rows)
        return taken, dropped

    def _learn(self, rows: int, started: float, ended: float, more: bool) -> None:
        """Follow how much slower runs are than at warm-up, when cores are shared with parsing and decoding.

        With work left over, the time since the last run ended counts in full: that is what the next row waits for.
        """
        since = self._idle_since or started
        ratio = (ended - since) / max(self.cost(rows), 1e-9)
        self._slowness += _ADAPTS * (min(max(ratio, 1.0), _SLOWEST) - self._slowness)
        self._idle_since = ended if more else 0.0

    def _run(self, jobs: list[Job]) -> Batch | Exception | None:
        """One batch, on whichever thread calls this."""
        if not jobs:
            self._idle_since = 0.0  # all that waited was dropped, so nothing waits
            self._slowness += _ADAPTS * (1.0 - self._slowness)  # or a wrong estimate would drop everything for ever
            return None
        try:
            batch = run_together(jobs, self._engine)
        except Exception as error:
            return error
        else:
            more = bool(self._ready) or self._in_progress() > len(jobs)
            self._learn(batch.rows, batch.started, batch.started + batch.seconds, more=more)
            return batch
        finally:
            self._running_until = 0.0

    # The event loop again.

    def _deliver(self, jobs: list[Job], dropped: list[Job], result: Batch | Exception | None) -> None:
        for job in dropped:
            assert job.dropped_for is not None
            job.done(job.dropped_for)
        start = 0
        for job in jobs:
            if isinstance(result, Exception):
                job.done(result)
            elif result is not None:
                waited = result.started - job.queued - job.decode_seconds
                job.done(Answer(result, start, job.rows, waited, job.decode_seconds))
            start += job.rows
        if isinstance(result, Batch):
            assert self._loop is not None
            self.one_by_one = False
            # After the replies, which nobody should wait longer for.
            self._loop.call_soon(self._count, result, len(jobs) == 1)

    def _count(self, batch: Batch, lone: bool) -> None:
        self.one_by_one = lone
        try:
            self._on_batch(batch)
        except Exception:
            _log.exception("a batch could not be counted")


def _resolve(future: "asyncio.Future[Answer]", result: Answer | Exception) -> None:
    if future.done():
        return
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)
