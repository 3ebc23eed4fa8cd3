"""A load generator of our own, for where there is no wrk and for what wrk does not tell: the Server-Timing of replies.

It keeps each connection busy with one request at a time. A connection that breaks is an error and stays closed.
"""

import asyncio
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import cycle
from typing import cast
from urllib.parse import urlsplit

import httptools
import uvloop

from qualms.bench.processes import BenchError

_TIMING = re.compile(rb"(\w+);dur=([0-9.]+)")


@dataclass
class Replies:
    """What came back from a server that was kept busy for a while."""

    latencies: list[float] = field(default_factory=list)
    """seconds, of good replies"""
    timings: list[bytes] = field(default_factory=list)
    """their Server-Timing headers, empty where there was none"""
    errors: int = 0
    seconds: float = 0.0

    def timing(self, index: int) -> dict[str, float]:
        """Seconds by stage of one reply."""
        return {name.decode(): float(value) / 1e3 for name, value in _TIMING.findall(self.timings[index])}


def drive(url: str, bodies: list[bytes], seconds: float, concurrency: int, deadline: float | None = None) -> Replies:
    """POST the bodies in turn for `seconds`, always `concurrency` at a time; BenchError without a good reply.

    With a `deadline`, each request asks to be answered within so many seconds.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        replies = runner.run(_drive(url, post(url, bodies, deadline), seconds, concurrency))
    if not replies.latencies:
        raise BenchError(f"{url} gave no good reply within {seconds:g} seconds.")
    return replies


async def _drive(url: str, requests: Iterator[bytes], seconds: float, concurrency: int) -> Replies:
    replies = Replies()
    start = time.perf_counter()
    connections = []
    for _ in range(concurrency):
        connection = _Busy(requests, replies)
        try:
            await connection.open(url)
            connections.append(connection)
        except OSError:
            replies.errors += 1
    if connections:
        await asyncio.sleep(seconds)
    for connection in connections:
        connection.close()
    replies.seconds = time.perf_counter() - start
    return replies


def post(url: str, bodies: list[bytes], deadline: float | None = None) -> Iterator[bytes]:
    """Requests that POST the bodies, PNG files, in turn and for ever."""
    parts = urlsplit(url)
    head = f"POST {parts.path} HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: image/png\r\n"
    if deadline is not None:
        head += f"X-Request-Timeout: {deadline:g}\r\n"
    return cycle([f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body for body in bodies])


class Connection(asyncio.Protocol):
    """One connection, for one request at a time; what follows a reply is for who inherits this to say."""

    _transport: asyncio.Transport

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._headers: dict[bytes, bytes] = {}
        self.is_open = False

    async def open(self, url: str) -> None:
        """Connect; OSError where nobody listens."""
        parts = urlsplit(url)
        loop = asyncio.get_running_loop()
        await loop.create_connection(lambda: self, parts.hostname or "", parts.port or 80)

    def send(self, request: bytes) -> None:
        """Send the next request, once the last one is answered."""
        self._headers = {}
        self._transport.write(request)

    def close(self) -> None:
        """Leave; what is still on its way does not count."""
        if self.is_open:
            self.is_open = False
            self._transport.abort()

    @property
    def is_kept(self) -> bool:
        """Whether the reply just read leaves the connection open."""
        return bool(self._parser.should_keep_alive())

    def answered(self, status: int, headers: dict[bytes, bytes]) -> None:
        """A reply is complete; the names of its headers are in lower case."""
        raise NotImplementedError

    def broken(self) -> None:
        """The other side left, or does not speak HTTP; the connection is closed."""
        raise NotImplementedError

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio: there is a connection."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's do not say that they are
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        """asyncio: part of a reply, or of several."""
        if not self.is_open:
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._break()

    def connection_lost(self, error: Exception | None) -> None:
        """asyncio: the end, whoever wanted it."""
        if self.is_open:
            self._break()

    def on_header(self, name: bytes, value: bytes) -> None:
        """httptools: one header."""
        self._headers[name.lower()] = value

    def on_message_complete(self) -> None:
        """httptools: the last byte."""
        self.answered(self._parser.get_status_code(), self._headers)

    def _break(self) -> None:
        self.close()
        self.broken()


class _Busy(Connection):
    """Whenever a reply is complete, the next request goes out."""

    def __init__(self, requests: Iterator[bytes], replies: Replies) -> None:
        super().__init__()
        self._requests, self._replies = requests, replies
        self._sent = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._next()

    def answered(self, status: int, headers: dict[bytes, bytes]) -> None:
        if status == 200:
            self._replies.latencies.append(time.perf_counter() - self._sent)
            self._replies.timings.append(headers.get(b"server-timing", b""))
        else:
            self._replies.errors += 1
        self._next()

    def broken(self) -> None:
        self._replies.errors += 1

    def _next(self) -> None:
        self._sent = time.perf_counter()
        self.send(next(self._requests))
