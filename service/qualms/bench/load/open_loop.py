"""Open-loop load: requests are sent at fixed times, independent of replies, like the load of many independent clients.

A closed loop slows down together with the server and so cannot overload it. Latency is measured from the time at which
a request was due, so delays of the generator increase the measured latency instead of hiding it.
"""

import asyncio
import resource
import time
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from qualms.bench.load.connection import Connection, post_requests

_RESERVED_FILES = 64
"""file descriptors that are not used for connections"""
_BURST = 64
"""maximum number of requests sent before replies are read"""
_TICK_SECONDS = 0.001
_MAX_IDLE_SECONDS = 4.0
"""connections idle for longer are not reused, because the server may be closing them"""


@dataclass
class OpenLoopResult:
    """Counts of all requests that were due: sent = good + refused + other statuses + unanswered."""

    rate: float
    """requests/s that were due"""
    seconds: float
    deadline: float
    good: "array[float]" = field(default_factory=lambda: array("d"))
    """seconds from the due time to the last byte of the reply, for replies with status 200"""
    refusals: Counter[bytes | None] = field(default_factory=Counter)
    """number of replies with status 429 by their Retry-After header, None if there was none"""
    other_statuses: Counter[int] = field(default_factory=Counter)
    """number of all other replies by status"""
    unanswered: int = 0
    lags: "array[float]" = field(default_factory=lambda: array("d"))
    """seconds from the due time until the request was sent or a new connection for it was opened"""
    skipped_late: int = 0
    """requests not sent because the generator was too far behind"""
    skipped_no_connection: int = 0
    """requests not sent because the maximum number of connections was in use"""
    opened: int = 0
    """number of connections opened"""
    peak_connections: int = 0
    busy_seconds: float = 0.0
    """from the first request to the last reply, at least `seconds`"""

    @property
    def sent(self) -> int:
        """Number of requests sent."""
        return len(self.lags)

    @property
    def refused(self) -> int:
        """Number of replies with status 429."""
        return self.refusals.total()

    @property
    def in_time(self) -> int:
        """Number of replies with status 200 within the deadline."""
        return int(np.count_nonzero(np.frombuffer(self.good) <= self.deadline)) if self.good else 0

    @property
    def retry_after_seconds(self) -> list[int]:
        """The Retry-After values that a client can use: whole seconds, at least 1."""
        texts = [text for text in self.refusals.elements() if text is not None]
        return [int(text) for text in texts if text.isdigit() and int(text) >= 1]


async def run_open_loop(
    url: str,
    bodies: list[bytes],
    rate: float,
    seconds: float,
    deadline: float,
    *,
    max_connections: int = 4096,
    max_lag: float | None = None,
    extra_wait: float = 2.0,
    single_use_every: int | None = None,
) -> OpenLoopResult:
    """POST the bodies in rotation, `rate` requests/s for `seconds`, each with a `deadline` in seconds.

    A request that cannot be sent within `max_lag` seconds (default: a tenth of the deadline) is skipped. Replies that
    arrive until `extra_wait` seconds after the deadline of the last request are counted. Every `single_use_every`-th
    request opens a connection of its own, which is closed after the reply; the others reuse connections.
    """
    result = OpenLoopResult(rate, seconds, deadline)
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files != resource.RLIM_INFINITY:
        max_connections = max(1, min(max_connections, files - _RESERVED_FILES))
    max_lag = 0.1 * deadline if max_lag is None else max_lag
    requests = post_requests(url, bodies, deadline)
    await _Generator(url, requests, result, max_connections, max_lag, single_use_every).run(extra_wait)
    return result


class _Generator:
    """Sends requests when they are due, over a pool of connections, and counts the replies."""

    def __init__(
        self,
        url: str,
        requests: Iterator[bytes],
        result: OpenLoopResult,
        max_connections: int,
        max_lag: float,
        single_use_every: int | None,
    ) -> None:
        self._url, self._requests, self._result = url, requests, result
        self._max_connections, self._max_lag = max_connections, max_lag
        self._single_use_every = single_use_every
        self._total = max(1, round(result.rate * result.seconds))
        self._next = 0
        self._start = 0.0
        self._idle: list[_PooledConnection] = []
        """last in, first out, so that surplus connections stay idle and are dropped"""
        self._connections: set[_PooledConnection] = set()
        self._opening: set[asyncio.Task[None]] = set()
        self._pending = 0
        self._all_sent = asyncio.Event()
        self._all_answered = asyncio.Event()

    async def run(self, extra_wait: float) -> None:
        """Send all requests and wait for their replies."""
        self._start = time.perf_counter()
        self._tick()
        try:
            await self._all_sent.wait()
            remaining = self._start + self._result.seconds - time.perf_counter()
            await asyncio.sleep(max(0.0, remaining))
            self._check_done()
            try:
                await asyncio.wait_for(self._all_answered.wait(), self._result.deadline + extra_wait)
            except TimeoutError:
                self._result.unanswered += self._pending
        finally:
            for task in self._opening:
                task.cancel()
            await asyncio.gather(*self._opening, return_exceptions=True)
            for connection in list(self._connections):
                connection.close()
        self._result.busy_seconds = max(self._result.busy_seconds, self._result.seconds)

    def _tick(self) -> None:
        """Send the requests that are due and schedule the next tick."""
        loop = asyncio.get_running_loop()
        for _ in range(_BURST):
            due, now = self._start + self._next / self._result.rate, time.perf_counter()
            if self._next == self._total:
                self._all_sent.set()
                return
            if due > now:
                loop.call_later(max(_TICK_SECONDS, due - now), self._tick)
                return
            self._next += 1
            self._send(due, now)
        loop.call_soon(self._tick)

    def _send(self, due: float, now: float) -> None:
        if now - due > self._max_lag:
            self._result.skipped_late += 1
            return
        single_use = self._single_use_every is not None and self._next % self._single_use_every == 0
        connection = None if single_use else self._take_idle(now)
        if connection is None and len(self._connections) >= self._max_connections:
            self._result.skipped_no_connection += 1
            return
        self._result.lags.append(now - due)
        self._pending += 1
        if connection is None:
            connection = _PooledConnection(self, due, single_use)
            self._connections.add(connection)
            self._result.opened += 1
            self._result.peak_connections = max(self._result.peak_connections, len(self._connections))
            task = asyncio.create_task(self._open(connection))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)
        else:
            connection.send_due(next(self._requests), due)

    def _take_idle(self, now: float) -> "_PooledConnection | None":
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open and now - connection.idle_since < _MAX_IDLE_SECONDS:
                return connection
            connection.close()
            self._connections.discard(connection)
        return None

    async def _open(self, connection: "_PooledConnection") -> None:
        try:
            await connection.open(self._url)
        except OSError:
            self.request_lost(connection)
        else:
            if connection.is_open:  # if it broke meanwhile, request_lost has been called
                connection.send(next(self._requests))

    def reply_received(self, connection: "_PooledConnection", status: int, headers: dict[bytes, bytes]) -> None:
        """Count a reply and return its connection to the pool."""
        now = time.perf_counter()
        self._result.busy_seconds = now - self._start
        if status == 200:
            self._result.good.append(now - connection.due)
        elif status == 429:
            self._result.refusals[headers.get(b"retry-after")] += 1
        else:
            self._result.other_statuses[status] += 1
        if connection.keep_alive and not connection.single_use:
            connection.idle_since = now
            self._idle.append(connection)
        else:
            connection.close()
            self._connections.discard(connection)
        self._pending -= 1
        self._check_done()

    def request_lost(self, connection: "_PooledConnection") -> None:
        """Count a request whose connection broke before the reply."""
        self._connections.discard(connection)
        self._result.unanswered += 1
        self._pending -= 1
        self._check_done()

    def idle_closed(self, connection: "_PooledConnection") -> None:
        """Remove an idle connection that the server has closed."""
        self._connections.discard(connection)

    def _check_done(self) -> None:
        if self._all_sent.is_set() and not self._pending:
            self._all_answered.set()


class _PooledConnection(Connection):
    def __init__(self, generator: _Generator, due: float, single_use: bool) -> None:
        super().__init__()
        self._generator = generator
        self.single_use = single_use
        self._has_request = True
        """whether a request waits for its reply; also true while the connection is being opened"""
        self.due = due
        self.idle_since = 0.0

    def send_due(self, request: bytes, due: float) -> None:
        self.due, self._has_request = due, True
        self.send(request)

    def reply_received(self, status: int, headers: dict[bytes, bytes]) -> None:
        self._has_request = False
        self._generator.reply_received(self, status, headers)

    def connection_broken(self) -> None:
        if self._has_request:
            self._has_request = False
            self._generator.request_lost(self)
        else:
            self._generator.idle_closed(self)
