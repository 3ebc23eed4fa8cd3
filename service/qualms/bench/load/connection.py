"""HTTP requests and connections of the built-in load generators."""

import asyncio
from collections.abc import Iterator
from itertools import cycle
from typing import cast
from urllib.parse import urlsplit

import httptools

_JPEG_START = b"\xff\xd8"


def content_type(body: bytes) -> str:
    """The media type of a JPEG or PNG file."""
    return "image/jpeg" if body.startswith(_JPEG_START) else "image/png"


def post_requests(url: str, bodies: list[bytes], deadline: float | None = None) -> Iterator[bytes]:
    """Endless HTTP requests that POST the bodies, which are PNG or JPEG files, in rotation."""
    parts = urlsplit(url)
    start = f"POST {parts.path} HTTP/1.1\r\nHost: {parts.netloc}\r\n"
    if deadline is not None:
        start += f"X-Request-Timeout: {deadline:g}\r\n"
    return cycle([_head(start, body) + body for body in bodies])


def _head(start: str, body: bytes) -> bytes:
    return f"{start}Content-Type: {content_type(body)}\r\nContent-Length: {len(body)}\r\n\r\n".encode()


class Connection(asyncio.Protocol):
    """One HTTP connection with one request at a time; subclasses define how a reply is handled."""

    _transport: asyncio.Transport

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._headers: dict[bytes, bytes] = {}
        self.is_open = False

    async def open(self, url: str) -> None:
        """Connect; raises OSError if the server does not accept the connection."""
        parts = urlsplit(url)
        loop = asyncio.get_running_loop()
        await loop.create_connection(lambda: self, parts.hostname or "", parts.port or 80)

    def send(self, request: bytes) -> None:
        """Send a request; the reply to the previous one must be complete."""
        self._headers = {}
        self._transport.write(request)

    def close(self) -> None:
        """Close the connection; a pending reply is not reported."""
        if self.is_open:
            self.is_open = False
            self._transport.abort()

    @property
    def keep_alive(self) -> bool:
        """Whether the server keeps the connection open after the reply just read."""
        return bool(self._parser.should_keep_alive())

    def reply_received(self, status: int, headers: dict[bytes, bytes]) -> None:
        """Called when a reply is complete; header names are in lower case."""
        raise NotImplementedError

    def connection_broken(self) -> None:
        """Called when the server has closed the connection or sent invalid HTTP; the connection is closed."""
        raise NotImplementedError

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio callback: the connection is open."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's transports do not inherit from it
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        """asyncio callback: data has arrived."""
        if not self.is_open:
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._break()

    def connection_lost(self, error: Exception | None) -> None:
        """asyncio callback: the connection was closed by either side."""
        if self.is_open:
            self._break()

    def on_header(self, name: bytes, value: bytes) -> None:
        """httptools callback: one header was read."""
        self._headers[name.lower()] = value

    def on_message_complete(self) -> None:
        """httptools callback: the reply is complete."""
        self.reply_received(self._parser.get_status_code(), self._headers)

    def _break(self) -> None:
        self.close()
        self.connection_broken()
