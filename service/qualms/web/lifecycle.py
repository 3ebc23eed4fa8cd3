"""Start the service under uvicorn and run it until a signal."""

import logging
import resource
import signal
import sys

import uvicorn

from qualms.http1.connections import Connections, Limits
from qualms.http1.listener import BACKLOG, listen
from qualms.http1.server import DrainingServer, check_uvicorn, protocol
from qualms.inference.memory import available_memory
from qualms.settings import Settings, ignored_variables
from qualms.telemetry.logs import configure
from qualms.web.app import Application, create_app
from qualms.web.state import ServiceState

_OTHER_FILES = 256
"""descriptors for everything beside connections, and for connections that are being refused"""
_CONNECTION_BYTES = 128 * 1024
"""memory that a connection may use: a head and the beginning of a body"""
SWITCH_SECONDS = 0.0005
"""time after which a thread that decodes gives way to the event loop; Python's default is ten times as long"""
_log = logging.getLogger("qualms.server")


def connections(app: Application, state: ServiceState, settings: Settings) -> Connections:
    """The connections of the server for an application."""
    limits = Limits(
        head_bytes=settings.max_head_bytes,
        head_seconds=settings.head_timeout_seconds,
        keep_alive_seconds=settings.keep_alive_seconds,
        send_seconds=settings.send_timeout_seconds,
        connections=_max_connections(settings.max_connections),
        body_bytes=settings.max_body_bytes,
        body_seconds=settings.request_timeout_seconds,
    )
    made = Connections(app, app.refusals.refuse, app.refusals.closed, limits, state.bodies)
    state.in_progress = lambda: made.in_progress
    state.connections = lambda: len(made.active)
    return made


def configuration(app: Application, made: Connections) -> uvicorn.Config:
    """uvicorn's configuration. The application must not be wrapped: the protocol calls its method `direct`."""
    return uvicorn.Config(
        app,
        loop="uvloop",
        http=protocol(made),  # type: ignore[arg-type]  # any function that makes protocols
        lifespan="on",
        ws="none",
        access_log=False,
        log_config=None,
        server_header=False,
        proxy_headers=False,  # the client's address is not used
        backlog=BACKLOG,
    )


def serve(settings: Settings) -> None:
    """Serve until a signal; raises the error if the model or the address cannot be used."""
    check_uvicorn()
    configure(settings.log_level)
    if ignored := ignored_variables():
        _log.info("ignored variables of Kubernetes service links, not settings", extra={"variables": sorted(ignored)})
    sys.setswitchinterval(SWITCH_SECONDS)
    state = ServiceState()
    app = create_app(settings, state=state, on_failure=lambda error: server.fail(error))  # noqa: PLW0108  # set below
    made = connections(app, state, settings)

    def drain() -> None:
        state.draining = True

    server = DrainingServer(
        configuration(app, made),
        made,
        drain_seconds=settings.drain_seconds,
        grace_seconds=settings.grace_seconds,
        on_drain=drain,
    )
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # ignored: nohup
        signal.signal(signal.SIGHUP, server.handle_exit)
    with listen(settings.host, settings.port) as listener:
        host, port = listener.getsockname()[:2]
        _log.info("listening", extra={"host": host, "port": port})
        try:
            server.run([listener])
        finally:
            app.close()  # a second signal skips the regular end of the application
    if server.failure is not None:
        raise server.failure


def _max_connections(wanted: int) -> int:
    """At most `wanted` connections, within the limits on open files and memory; raises the soft limit on open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + _OTHER_FILES
    if soft < needed and hard != soft:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    allowed = min(wanted, soft - _OTHER_FILES, available_memory() // 2 // _CONNECTION_BYTES)
    if allowed < wanted:
        _log.warning("fewer connections than configured", extra={"allowed": max(1, allowed), "open_files": soft})
    return max(1, allowed)
