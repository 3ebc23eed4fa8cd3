"""Start the service under uvicorn and run it until a signal."""

import logging
import resource
import signal
import sys
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from ssl import SSLContext

import uvicorn

from qualms.access.certificates import TlsFiles, read_context
from qualms.access.exposure import check_exposure, log_exposure
from qualms.access.reloading import ReloadedFiles
from qualms.http1.connections import Connections, Limits
from qualms.http1.listener import BACKLOG, listen
from qualms.http1.server import DrainingServer, check_uvicorn, protocol
from qualms.machine.memory import available_memory
from qualms.settings import Settings, ignored_variables
from qualms.telemetry.logs import configure
from qualms.web.app import Application, create_app
from qualms.web.state import ServiceState

_OTHER_FILES = 256
"""descriptors for everything beside connections, and for connections that are being refused"""
_MANAGEMENT_CONNECTIONS = 64
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
    made = Connections(app, app.refusals.refuse, app.refusals.closed, limits, state.bodies, tls=_tls(app, settings))
    state.in_progress = lambda: made.in_progress
    state.connections = lambda: len(made.active)
    return made


def management_connections(app: Application, settings: Settings) -> Connections:
    """The connections of the management port: few, and without bodies."""
    limits = Limits(
        head_seconds=settings.head_timeout_seconds,
        keep_alive_seconds=settings.keep_alive_seconds,
        send_seconds=settings.send_timeout_seconds,
        connections=_MANAGEMENT_CONNECTIONS,
        body_bytes=0,
    )
    return Connections(app.management, app.refusals.refuse, app.refusals.closed, limits)


def _tls(app: Application, settings: Settings) -> Callable[[], SSLContext] | None:
    """Returns the TLS configuration of new connections, which is made again when its files change; None without TLS."""
    if settings.tls_cert is None or settings.tls_key is None:
        return None
    client_ca = None if settings.tls_client_ca is None else Path(settings.tls_client_ca)
    files = TlsFiles(Path(settings.tls_cert), Path(settings.tls_key), client_ca)
    contexts: deque[SSLContext] = deque(maxlen=1)
    file = ReloadedFiles(
        "TLS files",
        files.paths,
        lambda: read_context(files),
        contexts.append,
        lambda accepted: app.access_metrics.reloaded("tls", accepted),
    )
    contexts.append(file.load())
    app.reloaded.append(file)
    return lambda: contexts[0]


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
        proxy_headers=False,  # see `qualms.access.proxies`
        backlog=BACKLOG,
    )


def serve(settings: Settings) -> None:
    """Serve until a signal; raises the error if the model or the address cannot be used."""
    check_uvicorn()
    check_exposure(settings)
    configure(settings.log_level)
    if ignored := ignored_variables():
        _log.info("ignored variables of Kubernetes service links, not settings", extra={"variables": sorted(ignored)})
    sys.setswitchinterval(SWITCH_SECONDS)
    state = ServiceState()
    app = create_app(settings, state=state, on_failure=lambda error: server.fail(error))  # noqa: PLW0108  # set below
    made = connections(app, state, settings)

    def drain() -> None:
        state.draining = True

    with ExitStack() as listeners:
        listener = listeners.enter_context(listen(settings.host, settings.port))
        management = None
        if settings.management_port is not None:
            opened = listeners.enter_context(listen(settings.management_host, settings.management_port, "MANAGEMENT_"))
            management = (opened, management_connections(app, settings))
        server = DrainingServer(
            configuration(app, made),
            made,
            drain_seconds=settings.drain_seconds,
            grace_seconds=settings.grace_seconds,
            on_drain=drain,
            management=management,
        )
        if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # ignored: nohup
            signal.signal(signal.SIGHUP, server.handle_exit)
        log_exposure(settings)
        host, port = listener.getsockname()[:2]
        tls = {} if settings.tls_cert is None else {"tls": True}
        _log.info("listening", extra={"host": host, "port": port, **tls})
        if management is not None:
            host, port = management[0].getsockname()[:2]
            _log.info("management port", extra={"host": host, "port": port})
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
