"""`qualms.AsyncClient`: the client for programs with an asyncio event loop."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import aclosing
from ssl import SSLContext
from typing import TYPE_CHECKING, Self, TypeVar, Unpack, overload
from urllib.request import getproxies

import httpx

from qualms.client.connections import Connections
from qualms.client.errors import ClientError
from qualms.client.images import Chunk, ImageLike, Images, chunks, encode, is_one_image
from qualms.client.protocol import CONNECTIONS, Call, Protocol
from qualms.client.retries import Attempts
from qualms.decisions.operating_point import Selection
from qualms.replies import AlphaDetail, RequestLimits, Result

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from types import TracebackType

T = TypeVar("T")


class AsyncClient:
    """A client of the service; use it with `async with`, or await `aclose`.

    It keeps connections open, so make one and use it for all calls. All tasks of one event loop may share it, but not
    other threads or loops. Cancelling a task that awaits it closes the connections of its requests and nothing else.
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
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """As `qualms.Client`; `concurrency` is the number of simultaneous requests of one call with an iterable."""
        self._protocol = Protocol(
            url,
            model=model,
            headers=headers,
            api_key=api_key,
            request_timeout=request_timeout,
            retries=retries,
            concurrency=concurrency,
        )
        if transport is None and not getproxies().keys() & {"http", "https", "all"}:
            transport = Connections(verify)  # httpx uses the proxies of the environment only without a transport
        self._http = httpx.AsyncClient(verify=verify, transport=transport, limits=CONNECTIONS)

    @overload
    async def predict(  # type: ignore[overload-overlap]  # a str is an Iterable[str]
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
    async def predict(
        self,
        images: Iterable[ImageLike],
        *,
        model: str | None = None,
        timeout: float | None = None,
        explain: bool = False,
        alpha: AlphaDetail | None = None,
        **operating_point: Unpack[Selection],
    ) -> list[Result]: ...

    async def predict(
        self,
        images: Images,
        *,
        model: str | None = None,
        timeout: float | None = None,  # also sent to the service
        explain: bool = False,
        alpha: AlphaDetail | None = None,
        **operating_point: Unpack[Selection],
    ) -> Result | list[Result]:
        """As `qualms.Client.predict`. Files are read, and an iterable is advanced, in a thread."""
        parameters = {"explain": explain or None, "alpha": alpha, **operating_point}
        call = self._protocol.call(model, timeout, parameters)
        if not is_one_image(images):
            async with aclosing(self._stream(images, call)) as results:  # type: ignore[arg-type]
                return [result async for result in results]
        limits = await self._limits(call)
        if isinstance(images, bytes):
            file = encode(images, 0, limits)
        else:
            file = await asyncio.to_thread(encode, images, 0, limits)  # type: ignore[arg-type]
        return (await self._send(Chunk(0, [file]), call))[0]

    def stream(
        self,
        images: Iterable[ImageLike],
        *,
        model: str | None = None,
        timeout: float | None = None,
        explain: bool = False,
        alpha: AlphaDetail | None = None,
        **operating_point: Unpack[Selection],
    ) -> AsyncIterator[Result]:
        """As `predict` for an iterable, but yields each result in order; close it (`contextlib.aclosing`) to end early."""
        parameters = {"explain": explain or None, "alpha": alpha, **operating_point}
        return self._stream(images, self._protocol.call(model, timeout, parameters))

    async def _stream(self, images: Iterable[ImageLike], call: Call) -> "AsyncGenerator[Result]":
        window: deque[asyncio.Task[list[Result]]] = deque()
        try:
            source = chunks(images, await self._limits(call))
            while (chunk := await asyncio.to_thread(next, source, None)) is not None:
                if len(window) == self._protocol.concurrency:
                    for result in await window.popleft():
                        yield result
                window.append(asyncio.create_task(self._send(chunk, call)))
            while window:
                for result in await window.popleft():
                    yield result
        finally:
            for task in window:
                task.cancel()
            await asyncio.gather(*window, return_exceptions=True)

    async def _limits(self, call: Call) -> RequestLimits:
        protocol = self._protocol
        if protocol.limits is not None:
            return protocol.limits
        return await self._attempt(protocol.attempts(call), protocol.limits_request, protocol.read_limits)

    async def _send(self, chunk: Chunk, call: Call) -> list[Result]:
        """The results of one chunk, which is split if it is too large."""
        content_type, body = chunk.body()
        try:
            return await self._attempt(
                self._protocol.attempts(call),
                lambda seconds: self._protocol.predict_request(call, content_type, body, seconds),
                lambda response, reply: self._protocol.read_results(response, reply, chunk),
            )
        except ClientError as error:
            halves = self._protocol.split(chunk, error)
        return [result for half in halves for result in await self._send(half, call)]

    async def _attempt(
        self,
        attempts: Attempts,
        request: Callable[[float], httpx.Request],
        read: Callable[[httpx.Response, bytes], T],
    ) -> T:
        """Send until there is a result."""
        while True:
            seconds = attempts.remaining()
            try:
                async with asyncio.timeout(seconds):
                    response, body = await self._exchange(request(seconds))
                return read(response, body)
            except httpx.TransportError as problem:
                error = attempts.transport_error(problem, self._protocol.base)
            except ClientError as problem:
                error = problem
            except TimeoutError as problem:
                raise attempts.expired() from problem
            await asyncio.sleep(attempts.wait_before_retry(error))

    async def _exchange(self, request: httpx.Request) -> tuple[httpx.Response, bytes]:
        response = await self._http.send(request, stream=True)
        try:
            parts, size = [], 0
            async for part in response.aiter_bytes():
                parts.append(part)
                size += len(part)
                self._protocol.too_large(size)
        finally:
            await response.aclose()
        return response, b"".join(parts)

    async def aclose(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: "TracebackType | None"
    ) -> None:
        await self.aclose()

    def __repr__(self) -> str:
        return f"<qualms.AsyncClient {self._protocol.base}>"
