"""The common prediction, one short image and nothing asked, without a task, coroutines or messages of its own.

These cost as much as all of the rest that is neither decoding nor inference. Whatever is out of the ordinary is left to
the endpoint, which can answer everything.
"""

import asyncio
import time

from qualms.decisions.operating_point import DEFAULT_OPERATING_POINT
from qualms.images.limits import decodes_quickly
from qualms.inference.jobs import Answer, Expired
from qualms.settings import Settings
from qualms.web.bodies import is_raw_image
from qualms.web.predict import INLINE_BYTES, TRIED, PredictEndpoint, write
from qualms.web.problems import Kind, Problem, head_lines, overloaded_reply, problem_headers
from qualms.web.protocol import Exchange
from qualms.web.request_ids import request_id_from
from qualms.web.served_model import ServedModel
from qualms.web.state import ServiceState

_HEADERS = b"content-type: application/json\r\ncontent-length: %d\r\nx-request-id: %b\r\nserver-timing: %b\r\n"


class Shortcut:
    """Offered requests before they become ASGI's; see `qualms.web.protocol`."""

    def __init__(self, settings: Settings, state: ServiceState, endpoint: PredictEndpoint) -> None:
        self._longest = min(INLINE_BYTES, settings.max_body_bytes)
        self._state = state
        self._endpoint = endpoint

    def __call__(self, exchange: Exchange) -> bool:
        """Begin to answer a request, or leave it to the endpoint with False."""
        scope, model, body = exchange.scope, self._state.model, exchange.body
        if scope["path"] != "/predict" or scope["method"] != "POST" or scope["query_string"]:
            return False
        if model is None or self._state.draining or not 0 < len(body) <= self._longest:
            return False
        headers = dict(scope["headers"])
        if not is_raw_image(headers.get(b"content-type", b"")):
            return False
        image = bytes(body)
        if not decodes_quickly(image):
            return False
        _Request(exchange, model, self._state, self._endpoint).begin(headers, image)
        return True


class _Request:
    """One request on the shortcut."""

    __slots__ = ("_endpoint", "_exchange", "_id", "_model", "_started", "_state", "_timeout")

    def __init__(self, exchange: Exchange, model: ServedModel, state: ServiceState, endpoint: PredictEndpoint) -> None:
        self._exchange = exchange
        self._model = model
        self._state = state
        self._endpoint = endpoint
        self._started = time.monotonic()
        self._timeout = 0.0

    def begin(self, headers: dict[bytes, bytes], image: bytes) -> None:
        """Queue the image; `_done` hears what came of it."""
        self._id = request_id_from(headers)
        self._exchange.on_cancel = self._cancelled
        try:
            self._timeout = self._endpoint.timeout(headers)
            deadline, batcher = self._started + self._timeout, self._model.batcher
            retry_after = batcher.refusal(1, deadline)
            if retry_after is not None:
                self._refuse(retry_after, alone=batcher.cost(1))
                return
            # Others of this pass of the loop may not be read yet; if all took themselves for the only one, each would be
            # run by itself.
            alone = batcher.one_by_one and self._state.in_progress() == 1
            decode = self._endpoint.inline([image], self._model)
            batcher.queue(decode, 1, deadline, self._exchange.gone, self._done, alone=alone)
        except Exception as error:
            self._fail(error)

    def _refuse(self, retry_after: int, alone: float) -> None:
        if alone > self._timeout:
            self._fail(Problem.too_little_time(self._timeout, alone))
        else:
            self._send(429, *overloaded_reply(retry_after, self._id))

    def _done(self, result: Answer | Exception) -> None:
        if self._exchange.over:  # it was cancelled
            return
        if isinstance(result, Exception):
            self._fail(result)
            return
        try:
            body, timing = write(result, result.decode_seconds, self._model, DEFAULT_OPERATING_POINT, self._id)
        except Exception as error:
            self._fail(error)
            return
        self._send(200, _HEADERS % (len(body), self._id.encode(), timing), body)
        self._model.count_answer(result, result.decode_seconds)  # once the reply is on its way

    def _fail(self, error: Exception | asyncio.CancelledError) -> None:
        if isinstance(error, Problem) and error.kind is Kind.TOO_LARGE:  # to be decoded on the event loop
            self._exchange.scope["state"][TRIED] = (self._started, self._id)
            self._exchange.pass_on()
            return
        if isinstance(error, Expired):
            error = Problem.too_late(self._timeout)
        code, problem = self._endpoint.failure(error, self._id)
        body = headers = b""
        if problem is not None:
            body = problem.body(self._id)
            headers = head_lines(problem_headers(problem, body, self._id))
        self._send(code, headers, body)

    def _cancelled(self) -> None:
        if not self._exchange.over:
            self._fail(asyncio.CancelledError())

    def _send(self, code: int, headers: bytes, body: bytes) -> None:
        if body:  # else nobody is there to read it
            self._exchange.send(code, headers, body, close=self._state.draining)
        self._exchange.end()
        self._endpoint.count(code, self._started, self._id)
