"""Start the service under uvicorn and run it until a signal."""

import logging

import uvicorn
from fastapi import FastAPI

from qualms.settings import Settings
from qualms.telemetry.logs import configure
from qualms.web.app import create_app
from qualms.web.listener import BACKLOG, listen
from qualms.web.protocol import LINGER_SECONDS, DrainingServer, QualmsProtocol, check_uvicorn
from qualms.web.state import ServiceState

_log = logging.getLogger("qualms.server")


def configuration(app: FastAPI, settings: Settings) -> uvicorn.Config:
    """uvicorn's configuration. The application must not be wrapped: the protocol calls its method `direct`."""
    return uvicorn.Config(
        app,
        loop="uvloop",
        http=QualmsProtocol,
        lifespan="on",
        ws="none",
        access_log=False,
        log_config=None,
        server_header=False,
        proxy_headers=False,  # the client's address is not used
        backlog=BACKLOG,
        timeout_graceful_shutdown=max(1, int(settings.grace_seconds - settings.drain_seconds - LINGER_SECONDS)),
    )


def serve(settings: Settings) -> None:
    """Serve until a signal; raises the error if the model or the address cannot be used."""
    check_uvicorn()
    configure(settings.log_level)
    state = ServiceState()
    app = create_app(settings, state=state, on_failure=lambda error: server.fail(error))  # noqa: PLW0108  # set below
    server = DrainingServer(configuration(app, settings), state, settings.drain_seconds)
    with listen(settings.host, settings.port) as listener:
        host, port = listener.getsockname()[:2]
        _log.info("listening", extra={"host": host, "port": port})
        server.run([listener])
    if server.failure is not None:
        raise server.failure
