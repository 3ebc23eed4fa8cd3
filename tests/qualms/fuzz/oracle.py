"""The requests that h11 reads from a stream of bytes: the reference for what the bytes mean.

Each request is read by a new h11 connection, so that no replies are needed. In two places h11 refuses what RFC 9112 lets a
server accept: empty lines before a request (2.2) are skipped here, and trailers named Content-Length or Transfer-Encoding (7.1.2)
may have any value.
"""

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import h11

_MAX_EVENT = 2**22
_SHORT = 100
_EMPTY_LINES = re.compile(rb"(?:\r\n)*")
_TRAILERS = re.compile(rb"(?:\r\n)?0+[ \t]*(?:;[^\n]*)?\r\n.*?\n\r?\n", re.DOTALL)
_FRAMING_ERROR = re.compile("Content-Length|Transfer-Encoding")

End = Literal["idle", "closed", "incomplete", "refused"]


@dataclass
class Message:
    """One request whose head h11 accepts."""

    method: bytes
    target: bytes
    version: bytes
    headers: list[tuple[bytes, bytes]]
    """names in lower case"""
    head: bytes
    """raw bytes up to and including the empty line"""
    empty_lines: int
    """number of empty lines before it"""
    framing: bytes = b""
    """raw bytes of the body that are not content: chunk lines and trailers"""
    complete: bool = False
    """whether the whole body is there and valid"""
    persistent: bool = True
    """False if the client asked to close the connection after the reply"""
    may_close: bool = False
    """whether the server may close the connection nevertheless: HTTP/1.0 with keep-alive"""

    @property
    def has_body(self) -> bool:
        """Whether the request has a body, even if it is empty."""
        return bool(self.values(b"transfer-encoding") or self.values(b"content-length"))

    def values(self, name: bytes) -> list[bytes]:
        """All values of a header field."""
        return [value for other, value in self.headers if other == name]


@dataclass
class Stream:
    """The requests of one direction of a connection, and why there are no more of them."""

    messages: list[Message]
    end: End
    """idle: all bytes are complete requests. closed: the last request asked to close, and the rest is not read"""
    rest: bytes
    """bytes that are not part of a complete request"""
    error: str = ""
    """h11's reason to refuse the rest"""

    @property
    def complete(self) -> int:
        """Number of complete requests."""
        return sum(message.complete for message in self.messages)


def read_requests(data: bytes) -> Stream:
    """Read all requests."""
    messages: list[Message] = []
    offset = 0
    while True:
        start = offset
        empty = _EMPTY_LINES.match(data, offset)
        assert empty is not None
        offset = empty.end()
        if offset == len(data):
            return Stream(messages, "idle", b"")
        rest = data[offset:]
        read = _read_short if len(rest) <= _SHORT else _read_one
        message, end, length, error = read(rest, (offset - start) // 2)
        if message is not None:
            messages.append(message)
        if end != "idle":
            return Stream(messages, end, data[start:], error)
        offset += length


def _read_one(data: bytes, empty_lines: int) -> tuple[Message | None, End, int, str]:
    """Read one request: the request if its head is complete, how it ends, its length, and h11's error."""
    connection = h11.Connection(h11.SERVER, max_incomplete_event_size=_MAX_EVENT)
    connection.receive_data(data)
    message: Message | None = None
    framing: list[bytes] = []
    position = 0
    while True:
        try:
            event = connection.next_event()
        except h11.RemoteProtocolError as error:
            if message is None:
                return None, "refused", position, str(error)
            trailers = _TRAILERS.match(data, position) if _FRAMING_ERROR.search(str(error)) else None
            if trailers is None:
                message.framing = b"".join(framing) + data[position:]
                return message, "refused", position, str(error)
            message.framing, message.complete = b"".join(framing) + trailers[0], True
            return message, ("idle" if message.persistent else "closed"), trailers.end(), ""
        if event is h11.NEED_DATA:
            if message is not None:
                message.framing = b"".join(framing)
            return message, "incomplete", position, ""
        after = len(data) - len(connection.trailing_data[0])
        if isinstance(event, h11.Request):
            message = _message(event, data[:after], empty_lines)
        elif isinstance(event, h11.Data):
            framing.append(data[position : after - len(event.data)])
        elif isinstance(event, h11.EndOfMessage):
            assert message is not None
            framing.append(data[position:after])
            message.framing, message.complete = b"".join(framing), True
            return message, ("idle" if message.persistent else "closed"), after, ""
        position = after


_read_short = lru_cache(4096)(_read_one)
"""most streams end with the same few sentinels"""


def _message(event: h11.Request, head: bytes, empty_lines: int) -> Message:
    headers = list(event.headers)
    options = {
        option.strip().lower() for name, value in headers if name == b"connection" for option in value.split(b",")
    }
    keeps_alive = event.http_version >= b"1.1" or b"keep-alive" in options
    return Message(
        event.method,
        event.target,
        event.http_version,
        headers,
        head,
        empty_lines,
        persistent=keeps_alive and b"close" not in options,
        may_close=event.http_version < b"1.1",
    )
