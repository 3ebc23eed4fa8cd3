"""Run the application under uvicorn, and stop it without cutting anybody off.

uvicorn closes its listener as soon as it is told to stop, which load balancers notice only afterwards. Here the
first signal only turns readiness to 503; requests still flow for `drain_seconds`, then the listener closes, what
was admitted is finished, and the process ends with 0.
"""

import asyncio
import logging
import signal
import socket
import time
from types import FrameType

import uvicorn
from fastapi import FastAPI

from qualms.settings import Settings
from qualms.telemetry.logs import configure
from qualms.web.app import create_app
from qualms.web.listener import BACKLOG, listen, take_waiting, turn_away
from qualms.web.protocol import JoiningProtocol
from qualms.web.state import ServiceState

_LINGER_SECONDS = 1.0
"""how long the last connections have to send the request they were opened for"""
_log = logging.getLogger("qualms.server")


class DrainingServer(uvicorn.Server):
    """A server whose first signal drains and whose second one stops at once."""

    def __init__(self, config: uvicorn.Config, state: ServiceState, drain_seconds: float) -> None:
        super().__init__(config)
        self._state = state
        self._drain_seconds = drain_seconds
        self._close_at: float | None = None
        self._told = False
        self.failure: Exception | None = None
        state.tasks = lambda: len(self.server_state.tasks)
        state.connections = lambda: len(self.server_state.connections)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The signal handler: uvicorn would remember the signal and die of it after a clean stop."""
        if self._state.draining or sig not in (signal.SIGTERM, signal.SIGINT):
            self.force_exit = self.should_exit = True
            return
        self._state.draining = True
        self._close_at = time.monotonic() + (self._drain_seconds if sig == signal.SIGTERM else 0.0)

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second: close the listener once draining has lasted long enough."""
        if self._close_at is not None:
            if not self._told:  # not in the handler, which may interrupt the writing of a log line
                self._told = True
                _log.info("draining", extra={"seconds": round(self._close_at - time.monotonic(), 1)})
            if time.monotonic() >= self._close_at:
                return True
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Answer the connections that were made before the listener closed, then stop as uvicorn does.

        uvicorn would close those whose request has not arrived yet. While draining, every reply closes its
        connection, so what is left after a moment is idle.
        """
        if self._state.draining:
            await self._take_last(sockets or [])
            give_up = time.monotonic() + _LINGER_SECONDS
            while self.server_state.connections and time.monotonic() < give_up and not self.force_exit:
                await asyncio.sleep(0.01)
        await super().shutdown(sockets)

    async def _take_last(self, sockets: list[socket.socket]) -> None:
        """Close the listeners, but not on those who wait to be accepted: the kernel would reset them."""
        kept = [listener.dup() for listener in sockets]
        for listener in kept:
            turn_away(listener)
        for server in self.servers:
            server.close()
        waiting = []
        for listener in kept:
            with listener:
                waiting += take_waiting(listener)
        for connection in waiting:
            await asyncio.get_running_loop().connect_accepted_socket(self._protocol, connection)

    def _protocol(self) -> asyncio.Protocol:
        return self.config.http_protocol_class(  # type: ignore[call-arg]
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )

    def fail(self, error: Exception) -> None:
        """The model cannot be loaded: there is nothing to serve."""
        self.failure = error
        self.should_exit = True


def configuration(app: FastAPI, settings: Settings) -> uvicorn.Config:
    """How uvicorn is run. Nothing may be wrapped around the application, whose shortcut the protocol looks for."""
    return uvicorn.Config(
        app,
        loop="uvloop",
        http=JoiningProtocol,
        lifespan="on",
        ws="none",
        access_log=False,
        log_config=None,
        server_header=False,
        proxy_headers=False,  # nothing here looks at the client's address
        backlog=BACKLOG,
        timeout_graceful_shutdown=max(1, int(settings.grace_seconds - settings.drain_seconds - _LINGER_SECONDS)),
    )


def serve(settings: Settings) -> None:
    """Serve until a signal; raises what made the model or the address unusable."""
    configure(settings.log_level)
    state = ServiceState()
    server: DrainingServer

    def fail(error: Exception) -> None:
        server.fail(error)

    app = create_app(settings, state=state, on_failure=fail)
    config = configuration(app, settings)
    server = DrainingServer(config, state, settings.drain_seconds)
    with listen(settings.host, settings.port) as listener:
        host, port = listener.getsockname()[:2]
        _log.info("listening", extra={"host": host, "port": port})
        server.run([listener])
    if server.failure is not None:
        raise server.failure
