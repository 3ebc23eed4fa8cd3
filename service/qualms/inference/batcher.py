"""Batching without waiting: an idle engine runs all queued requests; requests that arrive during a run form the next batch.

Requests that arrive in one iteration of the event loop are decoded together, which is faster than decoding each of them
between reads and writes. Short runs are made on the event loop, because the hand-over to the runner's thread and back
would cost more; long runs are made on that thread. Queue lengths and limits count rows (images), not requests. Requests
that have expired, or whose client has disconnected, are dropped before they are run. A lone
request on an idle service is run at once, in `queue`.
"""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from qualms.inference.admission import PAUSE_SECONDS, Admission, LoopPause
from qualms.inference.batch import Answer, Batch, BatchEngine, Decode, Done, Draining, Job, run_jobs
from qualms.machine.cpu import yield_to_other_threads

SHORT_SECONDS = 0.005
"""a run of at most this duration is made on the event loop: about the time that reading and answering its requests takes"""

_log = logging.getLogger("qualms.batcher")


class Batcher:
    """The queue of one engine: `start` it on the event loop, `queue` images, `stop` it."""

    def __init__(
        self,
        engine: BatchEngine,
        *,
        on_batch: Callable[[Batch], None] = lambda _: None,
        short_seconds: float = SHORT_SECONDS,
        pause_seconds: float = PAUSE_SECONDS,
        rows_decoding: Callable[[], int] = lambda: 0,
        in_progress: Callable[[], int] = lambda: 0,
        connections: Callable[[], int] = lambda: 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`in_progress` and `rows_decoding` as in Admission; `connections` returns the number of open connections."""
        self._engine = engine
        self._clock = clock
        self._in_progress = in_progress
        self._short_seconds = short_seconds
        self._on_batch = on_batch
        self.admission = Admission(engine, in_progress, rows_decoding, clock)
        self._pause = LoopPause(connections, pause_seconds)
        self._arrived: deque[Job] = deque()
        """not decoded yet; used only on the event loop"""
        self._ready: deque[Job] = deque()
        """decoded; shared with the runner's thread under `_lock`"""
        self._lock = threading.Condition()
        self._stopping = False
        self.failed_runs = 0
        """runs that failed since the last one that did not"""
        self._thread_idle = True
        self._arrived_before = 0
        """length of `_arrived` at the previous `_process` if it expected more requests, else 0"""
        self._scheduled = False
        """whether `_process` is scheduled"""
        self._yields = False
        """whether `yield_to_other_threads` was called"""
        self._single = False
        """whether the last run had one request; set in the loop iteration after that run"""
        self._thread = threading.Thread(target=self._work, name="qualms-runner", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Start the runner's thread; `done` callbacks run on the current event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        self._yield_if_runs_are_long()

    def _yield_if_runs_are_long(self) -> None:
        """Once full batches are known to be run on the thread, let the event loop not preempt them."""
        if not self._yields and self._engine.cost(self._engine.max_batch) > self._short_seconds:
            self._yields = True
            yield_to_other_threads()

    async def stop(self) -> None:
        """Run all admitted requests, then end the thread."""
        with self._lock:
            self._stopping = True
            self._lock.notify()
        await asyncio.to_thread(self._thread.join)

    @property
    def depth(self) -> int:
        """Rows in the queue."""
        return self.admission.rows_waiting

    def retry_after(self, rows: int, deadline: float, decoding: float | None = None) -> int | None:
        """As `Admission.retry_after`; raises Draining while stopping.

        The caller sends the refusal. Once all requests of this loop iteration are answered, the loop may pause.
        """
        if self._stopping:
            raise Draining
        seconds = self.admission.retry_after(rows, deadline, decoding)
        if seconds is not None and self.admission.queue_is_full and not self._thread_idle:
            assert self._loop is not None
            self._pause.schedule(self._loop)
        return seconds

    def queue(self, decode: Decode, rows: int, deadline: float, disconnected: Callable[[], bool], done: Done) -> None:
        """Queue `rows` images that were admitted; `done` is called once."""
        job = Job(decode, rows, deadline, disconnected, done, self._clock())
        idle, in_progress = self._thread_idle and not self.admission.rows_waiting, self._in_progress()
        if idle and in_progress <= 1:
            self.admission.idle()
        # A lone request is run at once, unless the previous run had several requests: others of this loop iteration may then
        # not be read yet, and each would be run by itself.
        lone = idle and self._single and in_progress == 1
        if lone and self.admission.cost(rows) <= self._short_seconds:
            if self._decode(job, job.queued, waiting_rows=0):
                self._deliver([job], [], self._run([job]))
            return
        self._arrived.append(job)
        with self._lock:
            self.admission.rows_waiting += rows
        self._schedule()

    def _schedule(self) -> None:
        """Call `_process` once per loop iteration; otherwise the first request would run alone while others are unread."""
        if not self._scheduled:
            self._scheduled = True
            assert self._loop is not None
            self._loop.call_soon(self._process)

    def _process(self) -> None:
        """Decode new requests. Make the next run here if it is short and the thread is idle, else wake the thread."""
        self._scheduled = False
        if self._more_expected():
            self._schedule()
            return
        ready = self._decode_arrived()
        with self._lock:
            self._ready.extend(ready)
            here = self._thread_idle and self.admission.cost(self._next_rows()) <= self._short_seconds
            if here:
                jobs, dropped = self._take()
            else:
                self._lock.notify()
        if here:
            self._deliver(jobs, dropped, self._run(jobs))
        else:
            self._yield_if_runs_are_long()
        if self._arrived or (here and self._ready):  # in the next iteration, after other callbacks
            self._schedule()

    def _more_expected(self) -> bool:
        """Whether the last iteration brought several requests, so that the next one may bring more for the same run.

        The delay ends with the first iteration without a new request, and a lone request is not delayed.
        """
        more = len(self._arrived) > max(1, self._arrived_before) and not self.admission.queue_is_full
        self._arrived_before = len(self._arrived) if more else 0
        return more

    def _decode_arrived(self) -> list[Job]:
        """Decode new requests, up to about one batch; returns those that can be run."""
        ready, rows = list[Job](), 0
        now = self._clock()
        while self._arrived and rows < self._engine.max_batch:
            job = self._arrived.popleft()
            if self._decode(job, now, waiting_rows=job.rows):
                ready.append(job)
                rows += job.rows
            now += job.decode_seconds
        return ready

    def _decode(self, job: Job, now: float, waiting_rows: int) -> bool:
        """Decode the images of a job and return whether it can be run.

        A job that is dropped or fails is answered here, and its `waiting_rows` are removed from the queue.
        """
        if job.check_dropped(now):
            assert job.dropped_for is not None
            self._end(job, job.dropped_for, waiting_rows)
            return False
        try:
            job.images = job.decode()
        except Exception as error:
            self._end(job, error, waiting_rows)
            return False
        finally:
            job.decode_seconds = self._clock() - now
        return True

    def _end(self, job: Job, error: Exception, waiting_rows: int) -> None:
        with self._lock:  # before `done`, which may request admission again
            self.admission.rows_waiting -= waiting_rows
        job.done(error)

    def _next_rows(self) -> int:
        """Upper bound on the rows of the next batch."""
        if not self._ready:
            return 0
        return max(self._ready[0].rows, min(self.admission.rows_waiting, self._engine.max_batch))

    # On the runner's thread.

    def _work(self) -> None:
        while True:
            with self._lock:
                self._thread_idle = True
                while not self._ready and not self._stopping:
                    self.admission.idle()
                    self._lock.wait()
                if not self._ready:
                    return
                self._thread_idle = False
                jobs, dropped = self._take()
            result = self._run(jobs)
            assert self._loop is not None
            self._loop.call_soon_threadsafe(self._deliver, jobs, dropped, result)
            self._pause.run_ended()

    # On either thread.

    def _take(self) -> tuple[list[Job], list[Job]]:
        """Remove the jobs of the next run from the queue, and the dropped jobs before them; the caller holds the lock.

        A run has at most `max_batch` rows, except for a single request with more.
        """
        now, rows = self._clock(), 0
        ends = self.admission.run_end(self._next_rows(), now, alone=len(self._ready) <= 1)
        taken: list[Job] = []
        dropped: list[Job] = []
        while self._ready:
            job = self._ready[0]
            drop = job.check_dropped(ends)
            if not drop and taken and rows + job.rows > self._engine.max_batch:
                break
            self._ready.popleft()
            self.admission.rows_waiting -= job.rows
            if drop:
                dropped.append(job)
            else:
                taken.append(job)
                rows += job.rows
        if taken:
            self.admission.run_started(rows, now)
        return taken, dropped

    def _run(self, jobs: list[Job]) -> Batch | Exception | None:
        if not jobs:
            self.admission.all_dropped()
            return None
        try:
            batch = run_jobs(jobs, self._engine, self._clock)
        except Exception as error:
            self.admission.run_ended(None, work_left=False)
            self.failed_runs += 1
            return error
        self.failed_runs = 0
        self.admission.run_ended(batch, work_left=bool(self._ready) or self._in_progress() > len(jobs))
        return batch

    # On the event loop.

    def _deliver(self, jobs: list[Job], dropped: list[Job], result: Batch | Exception | None) -> None:
        for job in dropped:
            assert job.dropped_for is not None
            job.done(job.dropped_for)
        if isinstance(result, Exception):
            for job in jobs:
                job.done(result)
        elif result is not None:
            start, started = 0, result.started
            for job in jobs:
                rows, seconds = job.rows, job.decode_seconds
                job.done(Answer(result, start, rows, started - job.queued - seconds, seconds))
                start += rows
            assert self._loop is not None
            self._single = False
            self._loop.call_soon(self._count, result, len(jobs) == 1)  # after the replies are sent

    def _count(self, batch: Batch, single: bool) -> None:
        self._single = single
        try:
            self._on_batch(batch)
        except Exception:
            _log.exception("a batch could not be counted")
