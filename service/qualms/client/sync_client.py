"""`qualms.Client`: the client for programs without an event loop."""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from math import inf
from ssl import SSLContext
from time import monotonic
from typing import TYPE_CHECKING, Self, TypeVar, Unpack, overload

import httpx

from qualms.client.errors import ClientError, DeadlineError
from qualms.client.images import Chunk, ImageLike, Images, chunks, encode, is_one_image
from qualms.client.protocol import CONNECTIONS, Call, Protocol
from qualms.client.retries import Attempts
from qualms.decisions.operating_point import Selection
from qualms.replies import AlphaDetail, RequestLimits, Result

if TYPE_CHECKING:
    from types import TracebackType

T = TypeVar("T")


class Client:
    """A client of the service; use it as a context manager, or call `close`.

    It keeps connections open, so make one and use it for all calls. Threads may share it. After a fork, make a new one.
    """

    def __init__(
        self,
        url: str = "http://127.0.0.1:8000",
        *,
        api_key: str | None = None,
        model: str | None = None,
        headers: Mapping[str, str] | None = None,
        request_timeout: float = 30.0,
        retries: int | None = None,
        concurrency: int = 4,
        verify: bool | SSLContext = True,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        """Connect to the service at `url` when the first image is sent.

        `api_key` is a key of the service, if it needs one, and goes into the Authorization header unless `headers` has one.
        `model` is one of several served models, by default the service's. `request_timeout` is the seconds that one request
        may take with its `retries`, of which there are as many as fit if that is None. Lists become several requests,
        `concurrency` at a time. `headers` are added to each request; `verify` and `transport` are those of httpx.
        """
        self._protocol = Protocol(
            url,
            model=model,
            headers=headers,
            api_key=api_key,
            request_timeout=request_timeout,
            retries=retries,
            concurrency=concurrency,
        )
        self._http = httpx.Client(verify=verify, transport=transport, limits=CONNECTIONS)
        self._pool = ThreadPoolExecutor(concurrency, thread_name_prefix="qualms-client")
        self._closed = threading.Event()

    @overload
    def predict(  # type: ignore[overload-overlap]  # a str is an Iterable[str]
        self,
        images: ImageLike,
        *,
        model: str | None = None,
        timeout: float | None = None,
        explain: bool = False,
        alpha: AlphaDetail | None = None,
        **operating_point: Unpack[Selection],
    ) -> Result: ...

    @overload
    def predict(
        self,
        images: Iterable[ImageLike],
        *,
        model: str | None = None,
        timeout: float | None = None,
        explain: bool = False,
        alpha: AlphaDetail | None = None,
        **operating_point: Unpack[Selection],
    ) -> list[Result]: ...

    def predict(
        self,
        images: Images,
        *,
        model: str | None = None,
        timeout: float | None = None,
        explain: bool = False,
        alpha: AlphaDetail | None = None,
        **operating_point: Unpack[Selection],
    ) -> Result | list[Result]:
        """One result for one image, or a list of results, in order, for an iterable of images.

        An iterable is read as its images are sent, so that few are in memory. `timeout` is the seconds that the whole call
        may take. All other arguments are those of `qualms.Model.predict`; without `alpha`, the service decides. Raises
        ProblemError, DeadlineError, UnreachableError or ReplyError (all are ClientError), and ImageError if an image
        cannot be sent; the first error ends the call.
        """
        parameters = {"explain": explain or None, "alpha": alpha, **operating_point}
        call = self._protocol.call(model, timeout, parameters)
        if not is_one_image(images):
            return list(self._stream(images, call))  # type: ignore[arg-type]
        limits = self._limits(call, self._closed)
        file = encode(images, 0, limits)  # type: ignore[arg-type]
        return self._send(Chunk(0, [file]), call, self._closed)[0]

    def stream(
        self,
        images: Iterable[ImageLike],
        *,
        model: str | None = None,
        timeout: float | None = None,
        explain: bool = False,
        alpha: AlphaDetail | None = None,
        **operating_point: Unpack[Selection],
    ) -> Iterator[Result]:
        """As `predict` for an iterable, but yields each result in order, so that neither images nor results accumulate."""
        parameters = {"explain": explain or None, "alpha": alpha, **operating_point}
        return self._stream(images, self._protocol.call(model, timeout, parameters))

    def _stream(self, images: Iterable[ImageLike], call: Call) -> Iterator[Result]:
        ended = threading.Event()
        window: deque[Future[list[Result]]] = deque()
        try:
            for chunk in chunks(images, self._limits(call, ended)):
                if len(window) == self._protocol.concurrency:
                    yield from self._wait(window.popleft(), call)
                window.append(self._pool.submit(self._send, chunk, call, ended))
            while window:
                yield from self._wait(window.popleft(), call)
        finally:
            ended.set()
            for future in window:
                future.cancel()

    def _wait(self, future: Future[list[Result]], call: Call) -> list[Result]:
        try:
            return future.result(None if call.deadline == inf else max(0.0, call.deadline - monotonic()))
        except TimeoutError as error:
            if isinstance(error, ClientError):
                raise
            raise DeadlineError(f"There was no result within {call.seconds:.3g} s.") from error

    def _limits(self, call: Call, ended: threading.Event) -> RequestLimits:
        protocol = self._protocol
        if protocol.limits is not None:
            return protocol.limits
        return self._attempt(protocol.attempts(call), protocol.limits_request, protocol.read_limits, ended)

    def _send(self, chunk: Chunk, call: Call, ended: threading.Event) -> list[Result]:
        """The results of one chunk, which is split if it is too large."""
        content_type, body = chunk.body()
        try:
            return self._attempt(
                self._protocol.attempts(call),
                lambda seconds: self._protocol.predict_request(call, content_type, body, seconds),
                lambda response, reply: self._protocol.read_results(response, reply, chunk),
                ended,
            )
        except ClientError as error:
            halves = self._protocol.split(chunk, error)
        return [result for half in halves for result in self._send(half, call, ended)]

    def _attempt(
        self,
        attempts: Attempts,
        request: Callable[[float], httpx.Request],
        read: Callable[[httpx.Response, bytes], T],
        ended: threading.Event,
    ) -> T:
        """Send until there is a result; `ended` interrupts the wait between attempts."""
        while True:
            try:
                response, body = self._exchange(request(attempts.remaining()), attempts)
                return read(response, body)
            except httpx.TransportError as problem:
                error = attempts.transport_error(problem, self._protocol.base)
            except ClientError as problem:
                error = problem
            if ended.wait(attempts.wait_before_retry(error)):
                raise error

    def _exchange(self, request: httpx.Request, attempts: Attempts) -> tuple[httpx.Response, bytes]:
        """Reply and body. httpx limits the time of each read and write, so the deadline is checked between reads."""
        response = self._http.send(request, stream=True)
        try:
            parts, size = [], 0
            for part in response.iter_bytes():
                parts.append(part)
                size += len(part)
                self._protocol.too_large(size)
                attempts.remaining()
        finally:
            response.close()
        return response, b"".join(parts)

    def close(self) -> None:
        """Close all connections; calls in progress in other threads fail."""
        self._closed.set()
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: "TracebackType | None"
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<qualms.Client {self._protocol.base}>"
