"""The application: the prediction handler, and FastAPI for all other routes."""

import asyncio
import gc
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from qualms.access.key_ring import KeyRing
from qualms.access.keys_file import read_keys
from qualms.access.reloading import Reloadable, ReloadedFiles, watch
from qualms.bundle.file import Bundle
from qualms.errors import QualmsError
from qualms.http1.exchange import Exchange
from qualms.http1.messages import REASONS as PROTOCOL_REASONS
from qualms.http1.messages import Reply
from qualms.images.preprocess import warm_up
from qualms.images.worker_pool import KilledFor
from qualms.inference.decoding import Decoder, Limits
from qualms.inference.engine import Engine
from qualms.machine.cpu import available_cores, lower_priority
from qualms.machine.memory import available_memory, return_free_memory
from qualms.replies import RequestLimits
from qualms.settings import Settings
from qualms.signing.opening import open_trusted
from qualms.telemetry.access_metrics import AccessMetrics, KeyMetrics
from qualms.telemetry.logs import Throttle, access, dropped
from qualms.telemetry.metrics import ServiceMetrics
from qualms.telemetry.score_log import ScoreLog
from qualms.web.calibration import add_calibration
from qualms.web.gate import REASONS as ACCESS_REASONS
from qualms.web.gate import Gate, scope_of
from qualms.web.openapi import describe
from qualms.web.page.routes import add_page
from qualms.web.parameters import parse_request_id
from qualms.web.predict import REASONS, STATUSES, PredictHandler
from qualms.web.problems import Problem, from_error, send_reply
from qualms.web.refusals import Refusals
from qualms.web.routes import HEALTH, METRICS_PATH, add_routes, nothing_at, route_name
from qualms.web.served_model import ServedModel
from qualms.web.state import ServiceState
from qualms.web.status import add_status

MANAGEMENT_PATHS = frozenset((METRICS_PATH, *HEALTH))
_LOG_SECONDS = 1.0
"""killed workers are logged together"""
_log = logging.getLogger("qualms")


def create_app(
    settings: Settings,
    *,
    registry: CollectorRegistry | None = None,
    state: ServiceState | None = None,
    on_failure: Callable[[Exception], None] | None = None,
) -> "Application":
    """The service for one model. Loading starts with the server; /readyz reports when it is done.

    `on_failure` is called with the error if the model cannot be loaded.
    """
    registry = registry or CollectorRegistry()
    state = state or ServiceState()
    state.bodies.max_bytes = settings.max_upload_bytes
    metrics = ServiceMetrics(registry, STATUSES, REASONS, PROTOCOL_REASONS)
    metrics.export(lambda: state.connections(), lambda: state.bodies.used, dropped)  # noqa: PLW0108  # the server sets it later
    threads = settings.decode_threads or available_cores()
    pool = ThreadPoolExecutor(threads, thread_name_prefix="qualms-parse", initializer=lower_priority)
    limits = Limits(settings.max_pixels, settings.max_side, settings.max_decode_bytes)
    kills, lock = Throttle(_LOG_SECONDS), threading.Lock()

    def worker_killed(reason: KilledFor) -> None:
        metrics.worker_killed(reason)
        with lock:  # several threads may call this
            count = kills.due(time.monotonic())
        if count:
            _log.warning("decoding workers were killed", extra={"killed": count, "reason": reason})

    decoder = Decoder(threads, limits, on_killed=worker_killed)
    opened = [open_trusted(settings.model, settings.trusted_keys)]
    """emptied by the start, so that nothing refers to the bytes of the graph once the engine has loaded it"""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        loading = asyncio.create_task(_load(opened.pop(), settings, decoder, state, registry, on_failure))
        watching = asyncio.create_task(watch(app.reloaded))
        yield
        watching.cancel()
        await loading
        if state.model is not None:
            await state.model.batcher.stop()
            await asyncio.to_thread(state.model.close)
        await asyncio.to_thread(app.close)

    access_metrics = AccessMetrics(registry, ACCESS_REASONS)
    keys, reloaded = _keys(settings, registry, access_metrics)
    app = Application(title="Qualms", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url="/openapi.json")
    published = RequestLimits.model_validate({name: getattr(settings, name) for name in RequestLimits.model_fields})
    add_routes(app, state, registry, published)
    add_status(app, state)
    add_calibration(app, state)
    if settings.page:
        add_page(app)
    describe(app, lambda path: scope_of(path) is not None)
    predict = PredictHandler(settings, state, metrics, pool, decoder)

    def close() -> None:
        decoder.close()
        pool.shutdown(cancel_futures=True)

    app.close = close
    app.refusals = Refusals(metrics)
    app.reloaded, app.access_metrics = reloaded, access_metrics
    gate = None if keys is None else Gate(keys, metrics, access_metrics, predict.callers)
    _add_entrances(app, predict, metrics, gate, None if settings.management_port is None else METRICS_PATH)
    return app


def _add_entrances(
    app: "Application", predict: PredictHandler, metrics: ServiceMetrics, gate: Gate | None, elsewhere: str | None
) -> None:
    """The entrances of the main port and of the management port, on which the path `elsewhere` is served alone."""
    app.edge = _Edge(app.framework, predict, metrics, gate, lambda path: path != elsewhere)
    app.management = _Edge(app.framework, predict, metrics, None, MANAGEMENT_PATHS.__contains__)
    app.direct = predict.direct if gate is None else partial(_direct, gate, predict)


def _direct(gate: Gate, predict: PredictHandler, exchange: Exchange) -> bool:
    """Answer a request that has no valid key, or one for a prediction; False if it is neither."""
    return gate.refuses(exchange) or predict.direct(exchange)


def _keys(
    settings: Settings, registry: CollectorRegistry, metrics: AccessMetrics
) -> tuple[KeyRing | None, list[Reloadable]]:
    """The keys, and their file, to be read again when it changes; None if no keys are needed."""
    if settings.keys_file is None:
        return None, []
    path, ring = Path(settings.keys_file), KeyRing([])
    file = ReloadedFiles(
        "keys",
        [path],
        lambda: read_keys(path),
        ring.replace,
        lambda accepted: metrics.reloaded("keys", accepted),
    )
    ring.replace(file.load())
    registry.register(KeyMetrics(ring))
    return ring, [file]


class Application(FastAPI):
    """FastAPI behind `_Edge`. As a middleware, `_Edge` would run inside FastAPI's own ones, which cost every request."""

    edge: "_Edge"
    refusals: Refusals
    direct: Callable[[Exchange], bool]
    """called by `qualms.http1`"""
    management: "_Edge"
    """an ASGI application with the routes of the management port"""
    reloaded: list[Reloadable]
    """files that are read again when they change"""
    access_metrics: AccessMetrics
    close: Callable[[], None]
    """ends the threads and worker processes that decode; may be called more than once"""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Handle one connection."""
        await self.edge(scope, receive, send)

    async def framework(self, scope: Any, receive: Any, send: Any) -> None:
        """FastAPI's own handling."""
        await super().__call__(scope, receive, send)


async def _load(
    bundle: Bundle,
    settings: Settings,
    decoder: Decoder,
    state: ServiceState,
    registry: CollectorRegistry,
    on_failure: Callable[[Exception], None] | None,
) -> None:
    started = time.monotonic()
    try:
        warm_up()
        engine = await asyncio.to_thread(
            Engine,
            bundle,
            settings.device,
            settings.threads,
            settings.max_batch,
            settings.max_run_seconds,
            max_memory=available_memory() * 3 // 4,
        )
        bundle = engine.bundle
        score_log = await asyncio.to_thread(_score_log, bundle, settings)
        model = ServedModel(bundle, engine, registry, state, decoder, score_log)
    except Exception as error:
        expected = isinstance(error, QualmsError)
        state.failure = str(error) if expected else "The model could not be loaded; the log has the reason."
        _log.critical(state.failure, exc_info=None if expected else error)
        if on_failure:
            on_failure(error)
        return
    model.batcher.start()
    state.model = model
    _tune_garbage_collection()
    return_free_memory()
    _log.info(
        "ready",
        extra={
            "model": bundle.manifest.name,
            "version": bundle.manifest.version,
            "digest": bundle.digest,
            "provider": engine.provider,
            "seconds": round(time.monotonic() - started, 3),
        },
    )


def _score_log(bundle: Bundle, settings: Settings) -> ScoreLog | None:
    if settings.score_log is None:
        return None
    manifest = bundle.manifest
    return ScoreLog(Path(settings.score_log), settings.score_log_images, manifest.graph_sha256, list(manifest.scores))


def _tune_garbage_collection() -> None:
    """Exclude the loaded objects from garbage collection and run it rarely: requests leave no reference cycles.

    With hundreds of requests in progress, collection would otherwise take a tenth of the time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 50, 50)


class _Edge:
    """The outermost layer, pure ASGI: passes predictions to their handler; counts and logs all other requests."""

    def __init__(
        self,
        app: Any,
        predict: PredictHandler,
        metrics: ServiceMetrics,
        gate: Gate | None,
        serves: Callable[[str], bool],
    ) -> None:
        """`serves`: whether a path is served on this port; all others are unknown there."""
        self._app, self._predict, self._metrics, self._gate, self._serves = app, predict, metrics, gate, serves

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif self._gate is None or "caller" in scope.get("state", {}):  # our own server has asked the gate
            await self._answer(scope, receive, send)
        else:
            await self._check(self._gate, scope, receive, send)

    async def _check(self, gate: Gate, scope: Any, receive: Any, send: Any) -> None:
        """Check the key of a request of another server."""
        result = gate.check(_path(scope), dict(scope["headers"]), (scope.get("client") or ("",))[0])
        if isinstance(result, Reply):
            await send_reply(send, result)
            return
        # A new state: some servers give all requests of a connection the same one, and a key counts for one request.
        admitted = {**scope, "state": {**scope.get("state", {}), "caller": result}}
        try:
            await self._answer(admitted, receive, send)
        finally:
            if result is not None:
                result.release()

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        path = _path(scope)
        if scope["method"] == "POST" and self._serves(path) and self._predict.answers(path):
            await self._predict(scope, receive, send)
        else:
            await self._other(path, scope, receive, send)

    async def _other(self, path: str, scope: Any, receive: Any, send: Any) -> None:
        started, code, begun = time.monotonic(), 500, False
        headers = dict(scope["headers"])
        request_id = parse_request_id(headers)
        state = {**scope.get("state", {}), "request_id": request_id}
        # A route that has GET has HEAD (RFC 9110, 9.3.2); the server omits the body.
        inner = {**scope, "state": state, "method": "GET" if scope["method"] == "HEAD" else scope["method"]}

        async def send_with_headers(message: Any) -> None:
            nonlocal code, begun
            if message["type"] == "http.response.start":
                code, begun = message["status"], True
                message = {**message, "headers": [*message["headers"], (b"x-request-id", request_id.encode())]}
            await send(message)

        problem = None
        if not self._serves(path):
            problem = nothing_at(path)
        elif self._predict.answers(path):
            problem = Problem.wrong_method(scope["method"], "POST")
        else:
            try:
                await self._app(inner, receive, send_with_headers)
            except Exception as error:
                _log.exception("a route failed", extra={"request_id": request_id})
                problem = None if begun else from_error(error)
        if problem is not None:
            code = problem.status
            await send_reply(send, problem.reply(request_id))
        route, seconds = route_name(path), time.monotonic() - started
        self._metrics.answered(route, code, seconds)
        caller = state.get("caller")
        if caller is not None:
            caller.count(code)
        if route not in ("health", "metrics", "status"):  # probes, scrapes and the page's polling would fill the log
            peer = (scope.get("client") or ("",))[0]
            access(
                _log,
                request_id=request_id,
                method=scope["method"],
                route=route,
                status=code,
                duration_ms=1e3 * seconds,
                **self._predict.callers.fields(peer, headers, caller),
            )


def _path(scope: Any) -> str:
    """The path that routes and keys refer to: without the prefix `root_path`, under which another server may have the service."""
    path, root = str(scope["path"]), str(scope.get("root_path", ""))
    return path[len(root) :] if root and path.startswith(f"{root}/") else path
