"""Run the application under uvicorn, and stop it without cutting anybody off.

uvicorn closes its listener as soon as it is told to stop, which load balancers notice only afterwards. Here the
first signal only turns readiness to 503; requests still flow for `drain_seconds`, then the listener closes, what
was admitted is finished, and the process ends with 0.
"""

import logging
import signal
import time
from types import FrameType

import uvicorn

from service.app import create_app
from service.bundle.errors import QualmsError
from service.logs import configure
from service.settings import Settings
from service.state import ServiceState

_log = logging.getLogger("qualms.server")


class DrainingServer(uvicorn.Server):
    """A server whose first signal drains and whose second one stops at once."""

    def __init__(self, config: uvicorn.Config, state: ServiceState, drain_seconds: float) -> None:
        super().__init__(config)
        self._state = state
        self._drain_seconds = drain_seconds
        self._close_at: float | None = None
        self.failure: QualmsError | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The signal handler: uvicorn would remember the signal and die of it after a clean stop."""
        if self._state.draining or sig not in (signal.SIGTERM, signal.SIGINT):
            self.force_exit = self.should_exit = True
            return
        self._state.draining = True
        self._close_at = time.monotonic() + (self._drain_seconds if sig == signal.SIGTERM else 0.0)
        _log.info("draining", extra={"seconds": self._drain_seconds})

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second: close the listener once draining has lasted long enough."""
        if self._close_at is not None and time.monotonic() >= self._close_at:
            return True
        return await super().on_tick(counter)

    def fail(self, error: QualmsError) -> None:
        """The model cannot be loaded: there is nothing to serve."""
        self.failure = error
        self.should_exit = True


def serve(settings: Settings) -> None:
    """Serve until a signal; raises what made the model unusable."""
    configure(settings.log_level)
    state = ServiceState()
    server: DrainingServer

    def fail(error: QualmsError) -> None:
        server.fail(error)

    config = uvicorn.Config(
        create_app(settings, state=state, on_failure=fail),
        host=settings.host,
        port=settings.port,
        loop="uvloop",
        http="httptools",
        lifespan="on",
        ws="none",
        access_log=False,
        log_config=None,
        server_header=False,
        backlog=2048,
        timeout_graceful_shutdown=max(1, int(settings.grace_seconds - settings.drain_seconds)),
    )
    server = DrainingServer(config, state, settings.drain_seconds)
    server.run()
    if server.failure is not None:
        raise server.failure
