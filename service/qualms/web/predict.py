"""POST /predict as a raw ASGI endpoint: no framework object is made between the socket and the model.

Small images are decoded on the event loop, a pass's worth at a time, which costs less than handing them to a thread;
whatever could take longer goes to the bounded pool.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qualms.decisions.operating_point import DEFAULT_OPERATING_POINT, OperatingPoint
from qualms.errors import ImageError, OperatingPointError
from qualms.images.input_spec import InputSpec
from qualms.images.limits import decodes_quickly
from qualms.images.preprocess import preprocess, preprocess_array
from qualms.inference.jobs import Answer, Decode, Draining, Expired, Left, Overloaded
from qualms.settings import Settings
from qualms.telemetry.logs import Rarely, access
from qualms.telemetry.metrics import REASONS, ServiceMetrics
from qualms.web.bodies import ClientDisconnected, ImageInput, Limits, parse_images, read_body
from qualms.web.parameters import parse_query
from qualms.web.problems import Kind, Problem, from_error, send_problem
from qualms.web.request_ids import request_id_from
from qualms.web.served_model import ServedModel
from qualms.web.state import ServiceState

INLINE_BYTES = 32 * 1024
INLINE_PIXELS = 96 * 96
"""what is decoded on the event loop, if nothing in it may take longer than that: at most about a quarter of a millisecond"""
PARSED_AT_ONCE = 256 * 1024
"""bytes of a body that is parsed on the event loop"""

TRIED = "qualms.tried"
"""in a scope's state: since when a request is here, and its id, if its image proved too large for the event loop"""

_SECONDS_A_LINE = 1.0
"""under overload, refusals are logged together: a line for each would cost more than the refusal"""

_TIMING = b"queue;dur=%.3f, decode;dur=%.3f, inference;dur=%.3f"

_log = logging.getLogger("qualms.predict")


class PredictEndpoint:
    """Answers predictions for the default model."""

    def __init__(self, settings: Settings, state: ServiceState, metrics: ServiceMetrics, pool: Executor) -> None:
        self._settings = settings
        self._state = state
        self._metrics = metrics
        self._pool = pool
        self._refusals = Rarely(_SECONDS_A_LINE)
        self._limits = Limits(settings.max_body_bytes, settings.max_images, settings.max_json_depth)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Handle one HTTP request."""
        headers = dict(scope["headers"])
        tried = scope.get("state", {}).get(TRIED)
        started, request_id = tried or (time.monotonic(), request_id_from(headers))
        try:
            body, timing = await self._answer(scope, headers, request_id, started, receive, inline=not tried)
        except (Exception, asyncio.CancelledError) as error:
            code, problem = self.failure(error, request_id)
            if problem is not None:
                await send_problem(send, problem, request_id, self._state.closing_headers)
        else:
            code = 200
            head = [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(body)).encode()),
                (b"x-request-id", request_id.encode()),
                (b"server-timing", timing),
                *self._state.closing_headers,
            ]
            await send({"type": "http.response.start", "status": 200, "headers": head})
            await send({"type": "http.response.body", "body": body})
        self.count(code, started, request_id)

    def failure(self, error: Exception | asyncio.CancelledError, request_id: str) -> tuple[int, Problem | None]:
        """Status and reply, if anybody is there to read it, to whatever went wrong."""
        if isinstance(error, ClientDisconnected | Left):
            return 499, None
        if isinstance(error, Overloaded):
            error = Problem.overloaded(error.retry_after)
        elif isinstance(error, Draining | asyncio.CancelledError):  # or the server's grace period is over
            error = Problem.unavailable("The service is stopping.")
        elif not isinstance(error, Problem):
            _log.error("prediction failed", exc_info=error, extra={"request_id": request_id})
            error = from_error(error)
        return error.status, _without_frames(error)

    def count(self, code: int, started: float, request_id: str) -> None:
        """Count and, where that says something, log a request that is over."""
        seconds = time.monotonic() - started
        self._metrics.answered("predict", code, seconds)
        if code == 200 and not _log.isEnabledFor(logging.DEBUG):  # good answers are counted; lines are for debugging
            return
        if code != 200:
            self._reject(code)
        if code == 429:
            if refused := self._refusals.due(started + seconds):
                _log.warning("overloaded", extra={"refused": refused, "request_id": request_id})
        else:
            access(_log, request_id=request_id, method="POST", route="predict", status=code, duration_ms=1e3 * seconds)

    async def _answer(
        self,
        scope: Any,
        headers: dict[bytes, bytes],
        request_id: str,
        started: float,
        receive: Any,
        *,
        inline: bool,
    ) -> tuple[bytes, bytes]:
        """The body of a good reply, and its Server-Timing."""
        model = self._ready_model()
        asked = parse_query(scope["query_string"])
        timeout = self.timeout(headers)
        deadline = started + timeout
        try:
            if self._state.in_progress() > 1:
                model.batcher.admit(1, deadline)  # what is refused should cost as little as can be
            body = await self._read(headers, receive, timeout)
            inputs = await self._parse(headers.get(b"content-type", b""), body)
            if asked is not DEFAULT_OPERATING_POINT:
                model.decider.rule(asked)  # an operating point that cannot be supported costs no inference
            inline = inline and sum(map(_bytes, inputs)) <= INLINE_BYTES and all(map(_is_quick, inputs))
            answer, decoded = await self._ask(inputs, model, deadline, _leaving(receive), inline=inline)
        except OperatingPointError as error:
            raise from_error(error, model.decider.blamed(asked)) from error
        except Expired as error:
            raise Problem.too_late(timeout) from error
        except Overloaded as error:
            if error.alone > timeout:
                raise Problem.too_little_time(timeout, error.alone) from error
            raise
        model.count_answer(answer, decoded)
        return write(answer, decoded, model, asked, request_id)

    def _ready_model(self) -> ServedModel:
        if self._state.model is None:
            raise Problem.unavailable(self._state.why_not_ready or "The model is still loading.")
        return self._state.model

    def timeout(self, headers: dict[bytes, bytes]) -> float:
        """Seconds this request may take, by its own word or by the setting."""
        text = headers.get(b"x-request-timeout")
        if text is None:
            return self._settings.request_timeout_seconds
        try:
            seconds = float(text)
        except ValueError:
            seconds = math.nan
        most = self._settings.max_request_timeout_seconds
        if not 0 < seconds <= most:
            raise Problem.invalid(
                "X-Request-Timeout", text.decode("latin-1"), f"seconds, more than 0 and at most {most:g}"
            )
        return seconds

    async def _read(self, headers: dict[bytes, bytes], receive: Any, timeout: float) -> bytes:
        """The body, which has as long to arrive as the whole request has; mostly it is there already."""
        if getattr(_cycle(receive), "more_body", True) is False:
            return await read_body(headers, receive, self._limits.body_bytes)
        try:
            async with asyncio.timeout(timeout):
                with self._state.uploads.one(self._settings.max_upload_bytes) as take:
                    return await read_body(headers, receive, self._limits.body_bytes, take)
        except TimeoutError:
            raise Problem.too_slow(timeout) from None

    async def _parse(self, content_type: bytes, body: bytes) -> list[ImageInput]:
        """The images of a body; a large one, which may be JSON that takes long to read, is parsed by the pool."""
        if len(body) <= PARSED_AT_ONCE:
            return parse_images(content_type, body, self._limits)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, parse_images, content_type, body, self._limits)

    async def _ask(
        self, inputs: list[ImageInput], model: ServedModel, deadline: float, gone: Callable[[], bool], *, inline: bool
    ) -> tuple[Answer, float]:
        """The model's answer, and how long decoding took."""
        spec, most, batcher = model.bundle.manifest.input, self._settings.max_pixels, model.batcher
        if inline:
            try:
                answer = await batcher.submit(
                    self.inline(inputs, model), len(inputs), deadline, gone, alone=self._state.in_progress() == 1
                )
            except Problem as problem:
                if problem.kind is not Kind.TOO_LARGE:
                    raise
            else:
                return answer, answer.decode_seconds
        batcher.admit(len(inputs), deadline)
        with batcher.decoding(len(inputs)):
            loop = asyncio.get_running_loop()
            images, seconds = await loop.run_in_executor(self._pool, _timed_conform, inputs, spec, most, deadline)
        batcher.decoded(len(inputs), seconds)
        return await batcher.submit(lambda: images, len(inputs), deadline, gone), seconds

    def inline(self, inputs: list[ImageInput], model: ServedModel) -> Decode:
        """Decoding on the event loop; what has too many pixels for that is a Problem, TOO_LARGE."""
        most = min(INLINE_PIXELS, self._settings.max_pixels)
        return partial(_conform, inputs, model.bundle.manifest.input, most)

    def _reject(self, code: int) -> None:
        reason = REASONS.get(code)
        if code == 503:
            reason = "draining" if self._state.draining else "loading"
        if reason is not None:
            self._metrics.rejected(reason)


def write(
    answer: Answer, decoded: float, model: ServedModel, asked: OperatingPoint, request_id: str
) -> tuple[bytes, bytes]:
    """The body of a good reply, and its Server-Timing."""
    timing = _TIMING % (1e3 * answer.waited, 1e3 * decoded, 1e3 * answer.batch.seconds)
    return model.writer.write(answer, asked, request_id), timing


def _without_frames(problem: Problem) -> Problem:
    """Cut the frames off, which hold the problem that holds them: thousands of refusals would wait for the collector."""
    problem.__cause__ = problem.__context__ = None
    return problem.with_traceback(None)


def _is_quick(given: ImageInput) -> bool:
    return not isinstance(given, bytes) or decodes_quickly(given)


def _bytes(given: ImageInput) -> int:
    return len(given) if isinstance(given, bytes) else given.nbytes


def _conform(
    inputs: list[ImageInput], spec: InputSpec, max_pixels: int, deadline: float = math.inf
) -> list[NDArray[np.uint8]]:
    """Every input as the model takes it; a Problem names the image by its place."""
    images = []
    for place, given in enumerate(inputs):
        if time.monotonic() > deadline:  # it waited too long for its turn to be decoded
            raise Expired
        try:
            if isinstance(given, bytes):
                images.append(preprocess(given, spec, max_pixels=max_pixels))
            else:
                _check_pixels(given, max_pixels)
                images.append(preprocess_array(given, spec))
        except ImageError as error:
            raise from_error(error, f"images[{place}]") from error
    return images


def _timed_conform(
    inputs: list[ImageInput], spec: InputSpec, max_pixels: int, deadline: float
) -> tuple[list[NDArray[np.uint8]], float]:
    start = time.monotonic()
    return _conform(inputs, spec, max_pixels, deadline), time.monotonic() - start


def _check_pixels(pixels: NDArray[np.uint8], max_pixels: int) -> None:
    height, width = pixels.shape[:2]
    if height * width > max_pixels:
        raise ImageError(
            f"The image has {width:,} × {height:,} pixels; at most {max_pixels:,} are accepted.", reason="too_large"
        )


def _cycle(receive: Any) -> Any:
    """What uvicorn knows of a request: its `receive` is a method of that. Asking by ASGI would cost a task or a timer."""
    return getattr(receive, "__self__", None)


def _leaving(receive: Any) -> Any:
    """Whether the client has left, as far as the server says so."""
    cycle = _cycle(receive)
    return lambda: getattr(cycle, "disconnected", False) is True
