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

from service.bench.processes import BenchError

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


def drive(url: str, bodies: list[bytes], seconds: float, concurrency: int) -> Replies:
    """POST the bodies in turn for `seconds`, always `concurrency` at a time; BenchError without a good reply."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        replies = runner.run(_drive(url, bodies, seconds, concurrency))
    if not replies.latencies:
        raise BenchError(f"{url} gave no good reply within {seconds:g} seconds.")
    return replies


async def _drive(url: str, bodies: list[bytes], seconds: float, concurrency: int) -> Replies:
    parts = urlsplit(url)
    requests = cycle([_request(parts.netloc, parts.path, body) for body in bodies])
    replies = Replies()
    loop = asyncio.get_running_loop()
    start = time.perf_counter()
    connections = []
    for _ in range(concurrency):
        try:
            _, connection = await loop.create_connection(
                lambda: _Connection(requests, replies), parts.hostname or "", parts.port or 80
            )
            connections.append(connection)
        except OSError:
            replies.errors += 1
    if connections:
        await asyncio.sleep(seconds)
    for connection in connections:
        connection.close()
    replies.seconds = time.perf_counter() - start
    return replies


def _request(host: str, path: str, body: bytes) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: image/png\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


class _Connection(asyncio.Protocol):
    """One connection: whenever a reply is complete, the next request goes out."""

    _transport: asyncio.Transport

    def __init__(self, requests: Iterator[bytes], replies: Replies) -> None:
        self._requests, self._replies = requests, replies
        self._parser = httptools.HttpResponseParser(self)
        self._open = True
        self._sent = 0.0
        self._timing = b""

    def close(self) -> None:
        """The time is over; what is still on its way does not count."""
        self._open = False
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's do not say that they are
        self._send()

    def data_received(self, data: bytes) -> None:
        if not self._open:
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._fail()

    def connection_lost(self, error: Exception | None) -> None:
        if self._open:
            self._fail()

    # The parser's callbacks.

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"server-timing":
            self._timing = value

    def on_message_complete(self) -> None:
        if self._parser.get_status_code() == 200:
            self._replies.latencies.append(time.perf_counter() - self._sent)
            self._replies.timings.append(self._timing)
        else:
            self._replies.errors += 1
        self._send()

    def _send(self) -> None:
        self._timing = b""
        self._sent = time.perf_counter()
        self._transport.write(next(self._requests))

    def _fail(self) -> None:
        self._replies.errors += 1
        self.close()
