"""POST /predict as a raw ASGI endpoint: no framework object is made between the socket and the model.

Small images are decoded where they arrive, on the event loop, which costs less than handing them to a thread;
whatever could take longer goes to the bounded pool.
"""

import asyncio
import logging
import math
import time
from concurrent.futures import Executor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from service.batcher import Draining, Expired, Left, Overloaded
from service.bodies import ClientDisconnected, ImageInput, Limits, parse_images, read_body
from service.bundle.errors import ImageError, OperatingPointError
from service.bundle.input_spec import InputSpec
from service.bundle.preprocess import preprocess, preprocess_array
from service.logs import access
from service.metrics import REASONS, ServiceMetrics
from service.model import ServedModel
from service.problems import Kind, Problem, from_error, send_problem
from service.query import parse_query
from service.request_ids import request_id_from
from service.settings import Settings
from service.state import ServiceState

INLINE_BYTES = 32 * 1024
INLINE_PIXELS = 96 * 96
"""what is decoded on the event loop: at most about a quarter of a millisecond"""
PARSED_AT_ONCE = 256 * 1024
"""bytes of a body that is parsed on the event loop"""

_log = logging.getLogger("qualms.predict")


class PredictEndpoint:
    """Answers predictions for the default model."""

    def __init__(self, settings: Settings, state: ServiceState, metrics: ServiceMetrics, pool: Executor) -> None:
        self._settings = settings
        self._state = state
        self._metrics = metrics
        self._pool = pool
        self._limits = Limits(settings.max_body_bytes, settings.max_images, settings.max_json_depth)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Handle one HTTP request."""
        started = time.monotonic()
        headers = dict(scope["headers"])
        request_id = request_id_from(headers)
        problem: Problem | None = None
        try:
            await self._answer(scope, headers, request_id, started, receive, send)
            code = 200
        except (ClientDisconnected, Left):
            code = 499
        except Problem as found:
            code, problem = found.status, found
        except asyncio.CancelledError:  # the server's grace period is over
            code, problem = 503, Problem.unavailable("The service is stopping.")
        except Exception as error:
            code, problem = 500, from_error(error)
            _log.exception("prediction failed", extra={"request_id": request_id})
        if code != 200:
            self._reject(code)
        if problem is not None:
            await send_problem(send, problem, request_id, self._state.closing_headers)
        seconds = time.monotonic() - started
        self._metrics.answered("predict", code, seconds)
        if code != 200 or _log.isEnabledFor(
            logging.DEBUG
        ):  # good answers are counted; a line for each is for debugging
            access(_log, request_id=request_id, method="POST", route="predict", status=code, duration_ms=1e3 * seconds)

    async def _answer(
        self, scope: Any, headers: dict[bytes, bytes], request_id: str, started: float, receive: Any, send: Any
    ) -> None:
        model = self._ready_model()
        asked = parse_query(scope["query_string"])
        deadline = started + self._timeout(headers)
        body = await read_body(scope["headers"], receive, self._limits.body_bytes)
        inputs = await self._parse(headers.get(b"content-type", b""), body)
        try:
            model.decider.rule(asked)  # an operating point that cannot be supported costs no inference
            model.batcher.admit(len(inputs), deadline)
            decode_start = time.monotonic()
            images = await self._decode(inputs, model, deadline)
            decoded = time.monotonic() - decode_start
            answer = await model.batcher.submit(images, deadline, _leaving(receive))
        except OperatingPointError as error:
            raise from_error(error, model.decider.blamed(asked)) from error
        except Overloaded as error:
            raise Problem.overloaded(error.retry_after) from error
        except Draining as error:
            raise Problem.unavailable("The service is stopping.") from error
        except Expired as error:
            raise Problem.too_late(deadline - started) from error
        model.count_answer(answer, decoded)
        body = model.writer.write(answer, asked, request_id)
        timing = (
            f"queue;dur={1e3 * answer.waited:.3f}, decode;dur={1e3 * decoded:.3f}, "
            f"inference;dur={1e3 * answer.batch.seconds:.3f}"
        )
        await send(
            {
                "type": "http.response.start",
                "status": 200,
                "headers": [
                    (b"content-type", b"application/json"),
                    (b"content-length", str(len(body)).encode()),
                    (b"x-request-id", request_id.encode()),
                    (b"server-timing", timing.encode()),
                    *self._state.closing_headers,
                ],
            }
        )
        await send({"type": "http.response.body", "body": body})

    def _ready_model(self) -> ServedModel:
        if self._state.model is None:
            raise Problem.unavailable(self._state.why_not_ready or "The model is still loading.")
        return self._state.model

    def _timeout(self, headers: dict[bytes, bytes]) -> float:
        """Seconds this request may take, by its own word or by the setting."""
        text = headers.get(b"x-request-timeout")
        if text is None:
            return self._settings.request_timeout_seconds
        try:
            seconds = float(text)
        except ValueError:
            seconds = math.nan
        if not 0 < seconds < math.inf:
            raise Problem.invalid("X-Request-Timeout", text.decode("latin-1"), "a positive number of seconds")
        return seconds

    async def _parse(self, content_type: bytes, body: bytes) -> list[ImageInput]:
        """The images of a body; a large one, which may be JSON that takes long to read, is parsed by the pool."""
        if len(body) <= PARSED_AT_ONCE:
            return parse_images(content_type, body, self._limits)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, parse_images, content_type, body, self._limits)

    async def _decode(self, inputs: list[ImageInput], model: ServedModel, deadline: float) -> list[NDArray[np.uint8]]:
        spec = model.bundle.manifest.input
        if sum(map(_bytes, inputs)) <= INLINE_BYTES:
            try:
                return _conform(inputs, spec, min(INLINE_PIXELS, self._settings.max_pixels))
            except Problem as problem:
                if problem.kind is not Kind.TOO_LARGE:
                    raise
        with model.batcher.decoding(len(inputs)):
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._pool, _conform, inputs, spec, self._settings.max_pixels, deadline)

    def _reject(self, code: int) -> None:
        reason = REASONS.get(code)
        if code == 503:
            reason = "draining" if self._state.draining else "loading"
        if reason is not None:
            self._metrics.rejected(reason)


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
        except Exception as error:  # Pillow raises nearly anything on hostile images, after decoding too
            _log.warning("an image could not be converted", exc_info=error)
            damaged = ImageError(f"The image is damaged: its pixels cannot be converted ({type(error).__name__}).")
            raise from_error(damaged, f"images[{place}]") from error
    return images


def _check_pixels(pixels: NDArray[np.uint8], max_pixels: int) -> None:
    height, width = pixels.shape[:2]
    if height * width > max_pixels:
        raise ImageError(
            f"The image has {width:,} × {height:,} pixels; at most {max_pixels:,} are accepted.", reason="too_large"
        )


def _leaving(receive: Any) -> Any:
    """Whether the client has left, as far as the server says so.

    Asking ASGI would cost a task a request; uvicorn's `receive` is a method of the cycle that knows.
    """
    cycle = getattr(receive, "__self__", None)
    return lambda: getattr(cycle, "disconnected", False) is True
