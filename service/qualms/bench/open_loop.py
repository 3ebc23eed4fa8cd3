"""Requests at fixed times, whatever came back: the load of many clients that know nothing of each other.

A closed loop slows down with the server and so can never overload it. Here latency counts from the time a request was
due, so that a generator which lags behind shows in the figures instead of improving them.
"""

import asyncio
import resource
import time
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from qualms.bench.closed_loop import Connection, post

MOST_CONNECTIONS = 4096
_SPARE_FILES = 64
"""of those a process may open, left for everything that is no connection of ours"""
_BURST = 64
"""requests sent in a row before replies are read"""
_TICK_SECONDS = 0.001
_STALE_SECONDS = 4.0
"""a connection idle for longer is not used again, as the server may just be closing it"""
_PATIENCE = 2.0
"""seconds beyond the deadline in which replies that are due still count as replies"""


@dataclass
class Offered:
    """What became of each request that was due: offered = good + refused + others + unanswered."""

    rate: float
    """requests/s that were due"""
    seconds: float
    deadline: float
    good: "array[float]" = field(default_factory=lambda: array("d"))
    """seconds from when a request was due to the last byte of its reply of status 200"""
    refusals: Counter[bytes | None] = field(default_factory=Counter)
    """replies of status 429 by what their Retry-After says, None without one"""
    others: Counter[int] = field(default_factory=Counter)
    """all other replies by status"""
    unanswered: int = 0
    lags: "array[float]" = field(default_factory=lambda: array("d"))
    """seconds from when a request was due to when it was sent, or found no connection yet and asked for one"""
    too_late: int = 0
    """not offered: the generator itself was too far behind"""
    no_connection: int = 0
    """not offered: as many connections as may be were all busy"""
    connections: int = 0
    """at most, at a time"""
    busy_seconds: float = 0.0
    """from the first request to the last reply, at least `seconds`"""

    @property
    def offered(self) -> int:
        """Requests sent."""
        return len(self.lags)

    @property
    def refused(self) -> int:
        """Replies of status 429."""
        return self.refusals.total()

    @property
    def in_time(self) -> int:
        """Good replies within the deadline."""
        return int(np.count_nonzero(np.frombuffer(self.good) <= self.deadline)) if self.good else 0

    @property
    def waits(self) -> list[int]:
        """The Retry-After of each refusal that a client can follow: whole seconds, at least 1."""
        texts = [text for text in self.refusals.elements() if text is not None]
        return [int(text) for text in texts if text.isdigit() and int(text) >= 1]


async def offer(
    url: str,
    bodies: list[bytes],
    rate: float,
    seconds: float,
    deadline: float,
    *,
    most_connections: int = MOST_CONNECTIONS,
    most_lag: float | None = None,
) -> Offered:
    """POST the bodies in turn, `rate` a second for `seconds`, each to be answered within `deadline` seconds.

    A request that cannot be sent within `most_lag` seconds, else a tenth of the deadline, is not offered.
    """
    found = Offered(rate, seconds, deadline)
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files != resource.RLIM_INFINITY:
        most_connections = max(1, min(most_connections, files - _SPARE_FILES))
    most_lag = 0.1 * deadline if most_lag is None else most_lag
    await _Generator(url, post(url, bodies, deadline), found, most_connections, most_lag).run()
    return found


class _Generator:
    """Sends what is due, and keeps the account."""

    def __init__(
        self, url: str, requests: Iterator[bytes], found: Offered, most_connections: int, most_lag: float
    ) -> None:
        self._url, self._requests, self._found = url, requests, found
        self._most_connections, self._most_lag = most_connections, most_lag
        self._total = max(1, round(found.rate * found.seconds))
        self._turn = 0
        self._start = 0.0
        self._idle: list[_Caller] = []
        """the one used last is at the end, and is used first: so the others can go stale"""
        self._callers: set[_Caller] = set()
        self._opening: set[asyncio.Task[None]] = set()
        self._waiting = 0
        self._all_sent = asyncio.Event()
        self._all_answered = asyncio.Event()

    async def run(self) -> None:
        """From the first request to the last reply, or to the end of patience."""
        self._start = time.perf_counter()
        self._tick()
        try:
            await self._all_sent.wait()
            left = self._start + self._found.seconds - time.perf_counter()
            await asyncio.sleep(max(0.0, left))
            self._settle()
            try:
                await asyncio.wait_for(self._all_answered.wait(), self._found.deadline + _PATIENCE)
            except TimeoutError:
                self._found.unanswered += self._waiting
        finally:
            for task in self._opening:
                task.cancel()
            await asyncio.gather(*self._opening, return_exceptions=True)
            for caller in list(self._callers):
                caller.close()
        self._found.busy_seconds = max(self._found.busy_seconds, self._found.seconds)

    def _tick(self) -> None:
        """Send what is due, and come again for what is due next."""
        loop = asyncio.get_running_loop()
        for _ in range(_BURST):
            due, now = self._start + self._turn / self._found.rate, time.perf_counter()
            if self._turn == self._total:
                self._all_sent.set()
                return
            if due > now:
                loop.call_later(max(_TICK_SECONDS, due - now), self._tick)
                return
            self._turn += 1
            self._offer(due, now)
        loop.call_soon(self._tick)

    def _offer(self, due: float, now: float) -> None:
        if now - due > self._most_lag:
            self._found.too_late += 1
            return
        caller = self._free(now)
        if caller is None and len(self._callers) >= self._most_connections:
            self._found.no_connection += 1
            return
        self._found.lags.append(now - due)
        self._waiting += 1
        if caller is None:
            caller = _Caller(self, due)
            self._callers.add(caller)
            self._found.connections = max(self._found.connections, len(self._callers))
            task = asyncio.create_task(self._open(caller))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)
        else:
            caller.call(next(self._requests), due)

    def _free(self, now: float) -> "_Caller | None":
        """A connection that waits for a request."""
        while self._idle:
            caller = self._idle.pop()
            if caller.is_open and now - caller.idle_since < _STALE_SECONDS:
                return caller
            caller.close()
            self._callers.discard(caller)
        return None

    async def _open(self, caller: "_Caller") -> None:
        try:
            await caller.open(self._url)
        except OSError:
            self.lost(caller)
        else:
            if caller.is_open:  # else its loss is counted
                caller.send(next(self._requests))

    def replied(self, caller: "_Caller", status: int, headers: dict[bytes, bytes]) -> None:
        """Count a reply, and keep the connection for another request."""
        now = time.perf_counter()
        self._found.busy_seconds = now - self._start
        if status == 200:
            self._found.good.append(now - caller.due)
        elif status == 429:
            self._found.refusals[headers.get(b"retry-after")] += 1
        else:
            self._found.others[status] += 1
        if caller.is_kept:
            caller.idle_since = now
            self._idle.append(caller)
        else:
            caller.close()
            self._callers.discard(caller)
        self._waiting -= 1
        self._settle()

    def lost(self, caller: "_Caller") -> None:
        """Count a request that will never be answered."""
        self._callers.discard(caller)
        self._found.unanswered += 1
        self._waiting -= 1
        self._settle()

    def left(self, caller: "_Caller") -> None:
        """An idle connection was closed by the server, as it may."""
        self._callers.discard(caller)

    def _settle(self) -> None:
        if self._all_sent.is_set() and not self._waiting:
            self._all_answered.set()


class _Caller(Connection):
    """One connection of the pool."""

    def __init__(self, generator: _Generator, due: float) -> None:
        super().__init__()
        self._generator = generator
        self._calling = True
        """whether a request waits for its reply, from before there is a connection"""
        self.due = due
        self.idle_since = 0.0

    def call(self, request: bytes, due: float) -> None:
        self.due, self._calling = due, True
        self.send(request)

    def answered(self, status: int, headers: dict[bytes, bytes]) -> None:
        self._calling = False
        self._generator.replied(self, status, headers)

    def broken(self) -> None:
        if self._calling:
            self._calling = False
            self._generator.lost(self)
        else:
            self._generator.left(self)
