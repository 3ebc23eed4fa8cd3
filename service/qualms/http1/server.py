"""The server: uvicorn's, with our connections, which drains before it stops.

Of uvicorn it uses the option `http=` and the methods and attributes of `Server` that are listed in `_USED`.
"""

import asyncio
import logging
import signal
import socket
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn

from qualms.errors import QualmsError
from qualms.http1.connection import Connection
from qualms.http1.connections import Connections
from qualms.http1.listener import accept_pending, drop_new_connections, handshakes_under_way
from qualms.http1.tls import TlsLayer

ACCEPT_SECONDS = 1.0
"""time in which handshakes that have begun may end before the listener closes"""
_MAX_ACCEPT_SECONDS = 3.5
"""the same while the kernel shows such handshakes: packets that are lost are sent again after 1 s and 3 s"""
LAST_REQUEST_SECONDS = 1.0
"""time that open connections have to send a request after the listener has closed"""
_STOP_SECONDS = 0.5
"""time for each of the last two steps: to send the replies of cancelled requests, and for clients to close their side"""
_INTERRUPT_SECONDS = 1.0
"""time for requests in progress after SIGINT"""
_STEP_SECONDS = 0.01
_HANDSHAKE_STEP_SECONDS = 0.05
_USED = ("handle_exit", "on_tick", "shutdown", "serve", "startup")
_DRAIN_SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))
_log = logging.getLogger("qualms.server")


def check_uvicorn() -> None:
    """Check that the installed uvicorn has the methods that this module overrides or calls."""
    for name in _USED:
        if not hasattr(uvicorn.Server, name):
            raise QualmsError(
                f"uvicorn {uvicorn.__version__} has no Server.{name}; "
                "install a version that qualms supports: pip install --upgrade qualms."
            )


def protocol(connections: Connections) -> Callable[..., Connection | TlsLayer]:
    """The value of uvicorn's option `http=`: creates the protocol of each connection."""

    def create(app_state: dict[str, Any] | None = None, **_: Any) -> Connection | TlsLayer:
        connection = Connection(connections, app_state)
        return connection if connections.tls is None else TlsLayer(connection, connections, connections.tls())

    return create


class DrainingServer(uvicorn.Server):
    """A server that drains on the first SIGTERM or SIGHUP, ends at once on SIGINT, and stops on any second signal.

    uvicorn closes its listener on the first signal, before load balancers notice. Here the first signal only turns
    readiness to 503 (`on_drain`). Requests are accepted for `drain_seconds`, then the listener closes without losing a
    connection, admitted requests are finished, and the process exits with 0, at most `grace_seconds` after the signal.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        connections: Connections,
        *,
        drain_seconds: float,
        grace_seconds: float,
        on_drain: Callable[[], None],
        management: tuple[socket.socket, Connections] | None = None,
    ) -> None:
        """`management` is a second listener with connections of its own; it is served until the application stops."""
        super().__init__(config)
        self._management = management
        self._management_server: asyncio.Server | None = None
        self._connections = connections
        self._drain_seconds = drain_seconds
        self._grace_seconds = grace_seconds
        self._stop_seconds = min(_STOP_SECONDS, grace_seconds / 8)
        self._on_drain = on_drain
        self._signal: int | None = None
        self._close_at = self._end_at = 0.0
        self._logged = False
        self.failure: Exception | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, and begin to check the timeouts of connections."""
        await self.on_tick(0)  # the first connections need the Date header
        self._connections.start()
        await super().startup(sockets=sockets)
        if self._management is not None:
            listener, connections = self._management
            connections.start()
            loop = asyncio.get_running_loop()
            self._management_server = await loop.create_server(protocol(connections), sock=listener)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The signal handler. uvicorn's own would raise the signal again after a clean stop."""
        if self._signal is not None or sig not in (*_DRAIN_SIGNALS, signal.SIGINT):
            self.force_exit = self.should_exit = True
            return
        self._signal = sig
        interrupted = sig == signal.SIGINT
        now = time.monotonic()
        self._close_at = now + (0.0 if interrupted else self._drain_seconds)
        self._end_at = now + (_INTERRUPT_SECONDS if interrupted else self._grace_seconds - 2 * self._stop_seconds)
        self._connections.draining = True
        self._on_drain()

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second; True closes the listener."""
        stop = await super().on_tick(counter)
        if counter % 10 == 0:
            headers = self.server_state.default_headers
            encoded = b"".join(b"%b: %b\r\n" % header for header in headers)
            self._connections.default_headers = encoded
            if self._management is not None:
                self._management[1].default_headers = encoded
        if self._signal is None:
            return stop
        if not self._logged:  # not in the signal handler, which may interrupt the writing of a log line
            self._logged = True
            _log.info("draining", extra={"seconds": round(max(0.0, self._close_at - time.monotonic()), 1)})
        return stop or time.monotonic() >= self._close_at

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close the listener, finish the requests that were admitted, and stop the application."""
        connections = self._connections
        if self._signal is None:  # the model could not be loaded
            self._end_at = time.monotonic()
        await self._close_listeners(sockets or [], wait=self._signal in _DRAIN_SIGNALS)
        if self._signal in _DRAIN_SIGNALS:
            await self._wait(lambda: not connections.active, min(LAST_REQUEST_SECONDS, self._left / 2))
        for connection in list(connections.active):
            connection.shutdown()
        if not await self._wait(lambda: not connections.busy, self._left):
            if not self.force_exit:
                _log.warning("requests were not finished in time", extra={"requests": connections.busy})
            connections.cancel()
            await self._wait(lambda: not connections.busy, self._stop_seconds)
        if self._signal in _DRAIN_SIGNALS:
            await self._wait(lambda: not connections.active, self._stop_seconds)
        for connection in list(connections.active):
            connection.close()
        self._close_management()
        if not self.force_exit:
            await self.lifespan.shutdown()

    def _close_management(self) -> None:
        """Close the second listener and its connections."""
        if self._management is not None and self._management_server is not None:
            self._management_server.close()
            for connection in list(self._management[1].active):
                connection.close()

    @property
    def _left(self) -> float:
        """Seconds until requests in progress are cancelled."""
        return max(0.0, self._end_at - time.monotonic())

    async def _wait(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Wait for a condition, or until the time is over or a second signal arrives; returns whether it holds."""
        end = time.monotonic() + seconds
        while not condition():
            if self.force_exit or time.monotonic() >= end:
                return False
            await asyncio.sleep(_STEP_SECONDS)
        return True

    async def _close_listeners(self, sockets: list[socket.socket], *, wait: bool) -> None:
        """Close the listeners without resetting a connection: serve those whose handshake has begun."""
        duplicates = [listener.dup() for listener in sockets]
        for listener in duplicates:
            drop_new_connections(listener)
        if wait:
            await self._finish_handshakes({listener.getsockname()[1] for listener in sockets})
        for server in self.servers:
            server.close()
        pending = []
        for listener in duplicates:
            with listener:
                pending += accept_pending(listener)
        for listener in sockets:
            listener.close()
        loop, state, create = asyncio.get_running_loop(), self.lifespan.state, protocol(self._connections)
        for connection in pending:
            await loop.connect_accepted_socket(lambda: create(state), connection)

    async def _finish_handshakes(self, ports: set[int]) -> None:
        """Accept connections until handshakes that have begun have ended, for at most half of the time that is left."""
        now = time.monotonic()
        end = now + min(_MAX_ACCEPT_SECONDS, self._left / 2)
        await self._wait(lambda: False, min(ACCEPT_SECONDS, end - now))
        while time.monotonic() < end and not self.force_exit and await asyncio.to_thread(handshakes_under_way, ports):
            await asyncio.sleep(_HANDSHAKE_STEP_SECONDS)

    def fail(self, error: Exception) -> None:
        """Stop because the model cannot be loaded."""
        self.failure = error
        self.should_exit = True
