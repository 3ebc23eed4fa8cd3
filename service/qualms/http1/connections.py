"""All connections of the server: their limits and timeouts, and what they share."""

import asyncio
import ssl
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from qualms.http1.body import BodyMemory
from qualms.http1.messages import TOO_MANY_CONNECTIONS, Refusal, Reply

if TYPE_CHECKING:
    from qualms.http1.connection import Connection

SWEEP_SECONDS = 0.1
"""interval between checks of all timeouts; a timer per request would cost more than parsing it"""
_EVICT_SECONDS = 1.0
"""connections that waited at least this long for a request are closed if there are too many"""
_LARGE_READS = 1
"""connections with large reads that are read in one iteration of the loop, 256 kB each"""
_REFUSED_AT_ONCE = 128
"""connections above the limit that get a reply; further ones are reset"""


@dataclass(frozen=True)
class Limits:
    """Limits on connections, heads, and the bodies that are read for ASGI."""

    head_bytes: int = 64 * 1024
    head_seconds: float = 10.0
    keep_alive_seconds: float = 75.0
    send_seconds: float = 20.0
    connections: int = 2048
    body_bytes: int = 16 * 2**20
    body_seconds: float = 10.0


@dataclass(eq=False)
class Connections:
    """Shared by all connections of one server. `start` it on the event loop."""

    app: Any
    """an ASGI application; if it has a method `direct`, that is called first with each request"""
    refuse: Callable[[Refusal], Reply]
    """writes the reply to a refused request and counts it"""
    on_close: Callable[[str], None] = lambda _: None
    """called with the reason if a connection is closed without a reply"""
    limits: Limits = field(default_factory=Limits)
    memory: BodyMemory = field(default_factory=BodyMemory)
    clock: Callable[[], float] = time.monotonic
    now: float = 0.0
    """the time of the last sweep: precise enough for timeouts, and free"""
    in_progress: int = 0
    """requests that were read completely and are not answered"""
    default_headers: bytes = b""
    """headers of every reply"""
    draining: bool = False
    """whether every reply closes its connection, so that clients reconnect to another instance"""
    active: "set[Connection]" = field(default_factory=set)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    """the tasks of ASGI requests"""
    tls: Callable[[], ssl.SSLContext] | None = None
    """returns the TLS configuration of new connections; None if they have none"""

    def __post_init__(self) -> None:
        self.now = self.clock()
        self.direct: Callable[[Any], bool] | None = getattr(self.app, "direct", None)
        self._evictable: list[Connection] = []
        self._held: list[Connection] = []
        self._throttled: deque[Connection] = deque()
        self._asgi_started = False
        """whether a request was started in this iteration of the loop"""
        self._asgi_starts: deque[Callable[[], None]] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Begin to check timeouts, for as long as the event loop runs."""
        self._loop = asyncio.get_running_loop()
        self._sweep()

    def opened(self, connection: "Connection") -> Refusal | None:
        """Count a new connection; a Refusal if there are too many."""
        self.active.add(connection)
        excess = len(self.active) - self.limits.connections
        if excess <= 0 or self._evict():
            return None
        what = f"The service has {self.limits.connections:,} open connections, which is its limit; try again in 1 s."
        if excess > _REFUSED_AT_ONCE:
            connection.abort()
        return Refusal(503, TOO_MANY_CONNECTIONS, what)

    @property
    def busy(self) -> int:
        """Number of connections with a request in progress, or a reply that the client has not read."""
        return sum(connection.is_busy for connection in self.active)

    def cancel(self) -> None:
        """End all requests in progress with an error: the server's grace period is over."""
        for connection in list(self.active):
            connection.cancel()
        while self._asgi_starts:
            self._asgi_starts.popleft()()
        for task in list(self.tasks):
            task.cancel()

    def throttle(self, connection: "Connection") -> None:
        """Let a connection that sends faster than it is read go on in one of the next iterations of the loop.

        libuv would read up to 8 MB of one connection, and of every other one, before anything else is done.
        """
        if not self._throttled:
            assert self._loop is not None
            self._loop.call_soon(self._unthrottle)
        self._throttled.append(connection)

    def _unthrottle(self) -> None:
        for _ in range(min(_LARGE_READS, len(self._throttled))):
            self._throttled.popleft().unthrottle()
        if self._throttled:
            assert self._loop is not None
            self._loop.call_soon(self._unthrottle)

    def run_asgi(self, start: Callable[[], None]) -> None:
        """Start an ASGI request: one per iteration of the loop, because a route takes far longer than to read a request."""
        if self._asgi_started:
            self._asgi_starts.append(start)
            return
        self._asgi_started = True
        assert self._loop is not None
        self._loop.call_soon(self._start_next_asgi)
        start()

    def _start_next_asgi(self) -> None:
        self._asgi_started = False
        if self._asgi_starts:
            self.run_asgi(self._asgi_starts.popleft())

    def hold(self, connection: "Connection") -> None:
        """Send what a connection has to send at the end of this iteration of the loop.

        The replies of a batch are sent in one burst, so that a client on another core does not sleep in between.
        """
        if not self._held:
            assert self._loop is not None
            self._loop.call_soon(self._flush)
        self._held.append(connection)

    def _flush(self) -> None:
        held, self._held = self._held, []
        for connection in held:
            connection.flush()

    def _sweep(self) -> None:
        assert self._loop is not None
        self._loop.call_later(SWEEP_SECONDS, self._sweep)
        now = self.now = self.clock()
        expired = [connection for connection in self.active if connection.deadline <= now]
        for connection in expired:
            connection.expire()
        self._evictable = []
        if len(self.active) >= self.limits.connections // 2:
            waiting = [one for one in self.active if one.is_waiting and one.since <= now - _EVICT_SECONDS]
            self._evictable = sorted(waiting, key=lambda one: one.deadline, reverse=True)

    def _evict(self) -> bool:
        """Close the connection that has waited longest for its next request; False if there is none."""
        while self._evictable:
            connection = self._evictable.pop()
            if connection.is_waiting and connection.since <= self.now - _EVICT_SECONDS:
                connection.evict()
                return True
        return False
