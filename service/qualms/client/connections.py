"""The connections of `AsyncClient`: one pool of httpx per connection.

With all connections in one pool, httpx checks each of them whenever a request begins and ends, which takes most of the time of
small requests when many are sent at once.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from ssl import SSLContext

import httpx

from qualms.client.protocol import KEEP_ALIVE_SECONDS, MAX_CONNECTIONS


class Connections(httpx.AsyncBaseTransport):
    """A transport with at most `MAX_CONNECTIONS` connections; further requests wait for one."""

    def __init__(self, verify: bool | SSLContext) -> None:
        self._verify = httpx.create_ssl_context(verify)
        self._limits = httpx.Limits(max_connections=1, max_keepalive_connections=1, keepalive_expiry=KEEP_ALIVE_SECONDS)
        self._free: list[httpx.AsyncHTTPTransport] = []
        """the last used one at the end, so that its connection is the most likely to be open still"""
        self._all: list[httpx.AsyncHTTPTransport] = []
        self._slots = asyncio.Semaphore(MAX_CONNECTIONS)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request; its connection is free again when the reply is closed."""
        await self._slots.acquire()
        transport = self._free.pop() if self._free else self._new()
        try:
            response = await transport.handle_async_request(request)
        except BaseException:
            self._release(transport)
            raise
        assert isinstance(response.stream, httpx.AsyncByteStream)
        response.stream = _Reply(response.stream, lambda: self._release(transport))
        return response

    def _new(self) -> httpx.AsyncHTTPTransport:
        transport = httpx.AsyncHTTPTransport(verify=self._verify, limits=self._limits)
        self._all.append(transport)
        return transport

    def _release(self, transport: httpx.AsyncHTTPTransport) -> None:
        self._free.append(transport)
        self._slots.release()

    async def aclose(self) -> None:
        """Close all connections."""
        for transport in self._all:
            await transport.aclose()


class _Reply(httpx.AsyncByteStream):
    """The body of a reply, which calls `release` once, when it is closed."""

    def __init__(self, stream: httpx.AsyncByteStream, release: Callable[[], None]) -> None:
        self._stream = stream
        self._release: Callable[[], None] | None = release

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._stream.__aiter__()

    async def aclose(self) -> None:
        try:
            await self._stream.aclose()
        finally:
            release, self._release = self._release, None
            if release is not None:
                release()
