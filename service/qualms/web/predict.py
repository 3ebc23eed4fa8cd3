"""POST /predict, from head to reply: parse → admit → queue → decide → reply.

`PredictCall` is the one implementation. It has two thin entrances: `PredictHandler.direct`, which our own server calls and
which needs neither a task nor messages, and `PredictHandler.__call__`, an ASGI endpoint for other servers.

Small images are decoded on the event loop, which costs less than handing them to a thread; for all others see
`qualms.inference.decoding`.
"""

import asyncio
import logging
import time
from collections.abc import Mapping
from concurrent.futures import Executor
from functools import partial
from typing import Any, Protocol

from qualms.errors import ExplanationError, OperatingPointError
from qualms.http1.body import Reservation, memory_used_up
from qualms.http1.exchange import Caller, Exchange
from qualms.http1.messages import Refusal, Reply
from qualms.images.observed import ObservedEncoding, observe
from qualms.images.worker_pool import NoWorkerError
from qualms.inference.batch import Answer, ClientDisconnected, Draining, Expired
from qualms.inference.decode_queue import Decoded, InvalidImage, Plan
from qualms.inference.decoding import INLINE_BYTES, Decoder, NotInline
from qualms.settings import Settings
from qualms.telemetry.callers import Callers
from qualms.telemetry.logs import Throttle, access
from qualms.telemetry.metrics import ServiceMetrics
from qualms.web.bodies.parsing import Limits, parse_images, read_body
from qualms.web.parameters import EXPLAIN, parse_query, parse_request_id, parse_timeout
from qualms.web.problems import PREDICT_KINDS, Kind, Problem, from_error, overloaded_reply, send_reply
from qualms.web.reply import DEFAULT_QUERY
from qualms.web.served_model import ServedModel
from qualms.web.state import ServiceState

PATH = "/predict"
INLINE_PARSE_BYTES = 2 * 1024
"""forms and JSON bodies up to this size are parsed on the event loop; larger ones may have many images"""
INLINE_FILE_BYTES = 2**20
"""the same for image files, of which only the headers are read, and those of scans in a progressive JPEG"""
CLIENT_CLOSED_REQUEST = 499
"""the status counted if the client disconnects before the reply"""

STATUSES = (200, CLIENT_CLOSED_REQUEST, *dict.fromkeys(kind.status for kind in PREDICT_KINDS))
REASONS = (
    *dict.fromkeys(kind.reason for kind in PREDICT_KINDS if kind.reason),
    "disconnected",
    "loading",
    "draining",
    "no_worker",
)
"""labels of the metrics of predictions"""

_LOG_SECONDS = 1.0
"""refusals are logged together: one line for each would cost more than the refusal"""

_log = logging.getLogger("qualms.predict")
Headers = Mapping[bytes, bytes]


class PredictHandler:
    """Answers predictions for the default model."""

    def __init__(
        self, settings: Settings, state: ServiceState, metrics: ServiceMetrics, pool: Executor, decoder: Decoder
    ) -> None:
        """Large bodies are parsed in the `pool`."""
        self.settings = settings
        self.state = state
        self.pool = pool
        self.decoder = decoder
        self.limits = Limits(
            settings.max_body_bytes, settings.max_images, settings.max_json_depth, settings.max_json_numbers
        )
        self.callers = Callers(settings.trusted_proxies)
        self._metrics = metrics
        self._refusals = Throttle(_LOG_SECONDS)

    def answers(self, path: str) -> bool:
        """Whether predictions are sent to this path: `/predict`, or `/models/{name}/predict` of the served model."""
        if path == PATH:
            return True
        if not (path.startswith("/models/") and path.endswith(PATH)):
            return False
        model = self.state.model  # None while it is loading, when every prediction is answered with 503
        return model is None or path == f"/models/{model.bundle.manifest.name}{PATH}"

    def direct(self, exchange: Exchange) -> bool:
        """Start to answer a request; False if it is not a prediction."""
        head = exchange.head
        if head.path != PATH or head.method != "POST":
            return False
        request = PredictCall(self, head.fields, exchange)
        exchange.on_cancel = request.cancel
        if request.parse_head(head.query):
            exchange.read_body(self.limits.body_bytes, request.timeout, request.answer, request.refuse)
            request.just_admitted = False
        return True

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one request over ASGI."""
        headers = dict(scope["headers"])
        memory = Reservation(self.state.bodies)
        channel = _AsgiChannel(memory)
        channel.caller = scope.get("state", {}).get("caller")
        channel.peer = (scope.get("client") or ("",))[0]
        request = PredictCall(self, headers, channel)
        try:
            if request.parse_head(scope["query_string"]):
                request.just_admitted = False
                request.answer(await self._read(headers, receive, request.timeout, memory))
            await channel.replied.wait()
        except (Exception, asyncio.CancelledError) as error:
            request.fail(error)
        finally:
            memory.release()
        if channel.result is not None:
            await send_reply(send, channel.result)

    async def _read(self, headers: Headers, receive: Any, timeout: float, memory: Reservation) -> bytes:
        """The body, which must arrive within the request's timeout."""

        def check(size: int) -> None:
            if not memory.grow(size):
                raise Problem.from_refusal(memory_used_up())

        try:
            async with asyncio.timeout(timeout):
                return await read_body(headers, receive, self.limits.body_bytes, check)
        except TimeoutError:
            raise Problem.too_slow(timeout) from None

    def count(
        self, status: int, kind: Kind | None, started: float, request_id: str, channel: "Channel", headers: Headers
    ) -> None:
        """Count a request that is over, and log it unless it was answered as usual."""
        seconds = time.monotonic() - started
        self._metrics.answered("predict", status, seconds)
        if channel.caller is not None:
            channel.caller.count(status)
        if status == 200 and not _log.isEnabledFor(logging.DEBUG):
            return
        if (reason := self._rejection(status, kind)) is not None:
            self._metrics.rejected(reason)
        if status == Kind.OVERLOADED.status:
            if refused := self._refusals.due(started + seconds):
                _log.warning("overloaded", extra={"refused": refused, "request_id": request_id})
        else:
            access(
                _log,
                request_id=request_id,
                method="POST",
                route="predict",
                status=status,
                duration_ms=1e3 * seconds,
                **self.callers.fields(channel.peer, headers, channel.caller),
            )

    def _rejection(self, status: int, kind: Kind | None) -> str | None:
        if status == CLIENT_CLOSED_REQUEST:
            return "disconnected"
        if kind is Kind.UNAVAILABLE:
            return "draining" if self.state.draining else "loading" if self.state.model is None else "no_worker"
        return kind.reason if kind else None


class Channel(Protocol):
    """The way back to the client: an `Exchange` of our own server, or `_AsgiChannel`."""

    disconnected: bool
    """whether the client has disconnected"""
    caller: Caller | None
    """the client, if it is known by name"""

    @property
    def peer(self) -> str:
        """The address at the other end of the connection."""

    def reply(self, reply: Reply | None) -> None:
        """Called once, with the reply, or with None if the client has disconnected."""

    def release_body(self) -> None:
        """Called when the body is decoded, so that its memory is free for others."""


class _AsgiChannel:
    """The way back to the client of another server, which does not report disconnects before the reply."""

    disconnected = False

    def __init__(self, memory: Reservation) -> None:
        self.result: Reply | None = None
        self.caller: Caller | None = None
        self.peer = ""
        self.replied = asyncio.Event()
        self.release_body = memory.release

    def reply(self, reply: Reply | None) -> None:
        self.result = reply
        self.replied.set()


class PredictCall:
    """One request."""

    # Defaults of the class instead of slots: most requests set few of them.
    timeout = 0.0
    just_admitted = False
    """whether the body follows `parse_head` at once: a request for one image is then not admitted again"""
    _model: ServedModel
    _query = DEFAULT_QUERY
    _decode_seconds = 0.0
    _plan: Plan | None = None
    _encodings: list[ObservedEncoding] | None = None
    _finished = False

    def __init__(self, handler: PredictHandler, headers: Headers, channel: Channel) -> None:
        self._handler = handler
        self._headers = headers
        self._channel = channel
        self._started = time.monotonic()
        self.id = parse_request_id(headers)

    def parse_head(self, query: bytes) -> bool:
        """Check readiness, query, headers and the queue; False if the request was answered here.

        An overloaded service refuses before it reads or parses the body, because a refusal must cost little.
        """
        state, settings = self._handler.state, self._handler.settings
        try:
            self._model = state.ready_model()
            self._query = parse_query(query)
            self.timeout = parse_timeout(
                self._headers, settings.request_timeout_seconds, settings.max_request_timeout_seconds
            )
            self.just_admitted = True
            # A large body needs decoding in a thread or a worker, which may be overloaded while the model is not.
            is_large = int(self._headers.get(b"content-length", 0)) > INLINE_BYTES
            return self._admit(1, self._handler.decoder.shortest_wait() if is_large else None)
        except Exception as error:
            self.fail(error)
            return False

    def refuse(self, refusal: Refusal | None) -> None:
        """Answer a request whose body cannot be read; None if the client has disconnected."""
        self.fail(ClientDisconnected() if refusal is None else Problem.from_refusal(refusal))

    def answer(self, body: bytes) -> None:
        """Parse the body, admit the request and queue its images."""
        try:
            limit = (
                INLINE_FILE_BYTES
                if self._headers.get(b"content-type", b"").startswith(b"image/")
                else INLINE_PARSE_BYTES
            )
            if len(body) <= limit:
                self._queue(self._parse(body), admitted_rows=int(self.just_admitted))
            else:
                loop = asyncio.get_running_loop()
                loop.run_in_executor(self._handler.pool, self._parse, body).add_done_callback(self._parsed)
        except Exception as error:
            self.fail(error)

    def _parse(self, body: bytes) -> Plan:
        content_type = self._headers.get(b"content-type", b"")
        images = parse_images(content_type, body, self._handler.limits)
        return self._handler.decoder.plan(images, self._model.bundle.manifest.input)

    def _parsed(self, future: "asyncio.Future[Plan]") -> None:
        try:
            self._queue(future.result())
        except (Exception, asyncio.CancelledError) as error:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Answer with the problem that corresponds to an error."""
        if self._finished:
            return
        if isinstance(error, ClientDisconnected):
            self._finish(CLIENT_CLOSED_REQUEST, None, None)
            return
        problem = self._problem(error)
        self._finish(problem.status, problem.kind, problem.reply(self.id))
        for one in (error, problem):
            _forget_frames(one)

    def _problem(self, error: BaseException) -> Problem:
        """The problem that corresponds to an error."""
        if isinstance(error, Expired):
            error = Problem.too_late(self.timeout)
        elif isinstance(error, NoWorkerError):
            error = Problem(Kind.UNAVAILABLE, str(error))
        elif isinstance(error, Draining | asyncio.CancelledError):  # cancelled: the server's grace period is over
            error = Problem(Kind.UNAVAILABLE, "The service is stopping.")
        elif isinstance(error, InvalidImage):
            error = from_error(error.error, f"images[{error.index}]")
        elif isinstance(error, OperatingPointError):
            error = from_error(error, error.parameter)
        elif isinstance(error, ExplanationError):
            error = from_error(error, EXPLAIN)
        elif not isinstance(error, Problem):
            _log.error("prediction failed", exc_info=error, extra={"request_id": self.id})
        return from_error(error)

    def cancel(self) -> None:
        """Answer with 503, because the server's grace period is over."""
        self.fail(asyncio.CancelledError())

    def _admit(self, rows: int, decoding: float | None = None) -> bool:
        """Whether the queue can answer `rows` images before the deadline; else the request is refused here.

        `decoding`: predicted seconds until they are decoded in threads or workers; None if they need not be.
        """
        batcher = self._model.batcher
        retry_after = batcher.retry_after(rows, self._started + self.timeout, decoding)
        if retry_after is None:
            return True
        needed = batcher.admission.cost(rows)
        if needed > self.timeout:
            raise Problem.too_little_time(self.timeout, needed)
        self._finish(Kind.OVERLOADED.status, Kind.OVERLOADED, overloaded_reply(retry_after, self.id))
        return False

    def _queue(self, plan: Plan, admitted_rows: int = 0) -> None:
        """Queue images; small ones are decoded when the batcher takes them."""
        if self._finished:
            return
        if self._query is not DEFAULT_QUERY:
            self._model.writer.check(self._query)  # an unsupported query costs no inference
        rows, decoder = len(plan.inputs), self._handler.decoder
        if not plan.is_inline:
            self._decode(plan)
            return
        if rows > admitted_rows and not self._admit(rows):
            return
        self._plan = plan
        decode = partial(decoder.decode_inline, plan, self._model.bundle.manifest.input)
        self._model.batcher.queue(decode, rows, self._started + self.timeout, self._is_disconnected, self._done)

    def _decode(self, plan: Plan) -> None:
        """Decode images in threads or workers, then queue them."""
        self._plan = None
        rows, deadline, decoder = len(plan.inputs), self._started + self.timeout, self._handler.decoder
        if not self._admit(rows, decoder.wait(plan)):
            return

        def decoded(result: Decoded | BaseException) -> None:
            self._channel.release_body()
            try:
                if isinstance(result, BaseException):
                    self.fail(result)
                elif not self._finished and self._admit(rows):
                    images, self._encodings, self._decode_seconds = result
                    batcher = self._model.batcher
                    batcher.queue(lambda: images, rows, deadline, self._is_disconnected, self._done)
            except Exception as error:
                self.fail(error)

        decoder.decode(plan, self._model.bundle.manifest.input, deadline, self._is_disconnected, decoded)

    def _is_disconnected(self) -> bool:
        return self._finished or self._channel.disconnected

    def _done(self, result: Answer | Exception) -> None:
        """Write the reply to a request whose images were run."""
        if self._finished:
            return
        if isinstance(result, Exception):
            self._failed(result)
            return
        decode_seconds = self._decode_seconds + result.decode_seconds
        spec = self._model.bundle.manifest.input
        encodings = self._encodings or [observe(image, spec) for image in (self._plan.inputs if self._plan else ())]
        try:
            body = self._model.writer.write(result, self._query, self.id, encodings)
        except Exception as error:
            self.fail(error)
            return
        timing = (1e3 * result.waited, 1e3 * decode_seconds, 1e3 * result.batch.seconds)
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"x-request-id", self.id.encode()),
            (b"server-timing", b"queue;dur=%.3f, decode;dur=%.3f, inference;dur=%.3f" % timing),
        ]
        self._finish(200, None, Reply(200, headers, body))
        self._model.count_answer(result.waited, decode_seconds, encodings)  # after the reply was sent

    def _failed(self, error: Exception) -> None:
        """Decode files in a worker that the fast decoder has refused; answer any other error."""
        if not isinstance(error, NotInline) or self._plan is None:
            self.fail(error)
            return
        try:
            self._decode(self._handler.decoder.in_workers(self._plan, self._model.bundle.manifest.input))
        except Exception as failure:
            self.fail(failure)

    def _finish(self, status: int, kind: Kind | None, reply: Reply | None) -> None:
        self._finished = True
        self._channel.reply(reply)
        self._handler.count(status, kind, self._started, self.id, self._channel, self._headers)


def _forget_frames(error: BaseException | None) -> None:
    """Drop the tracebacks of an error and its causes.

    Their frames hold the error and the body: a cycle of megabytes that would wait for the garbage collector.
    """
    while error is not None:
        cause = error.error if isinstance(error, InvalidImage) else error.__cause__ or error.__context__
        error.__cause__ = error.__context__ = error.__traceback__ = None
        error = cause
