"""Sends a case on a connection and reads everything that the service answers."""

import asyncio
import socket
import struct
from dataclasses import dataclass, field
from typing import cast

import h11
from tests.qualms.fuzz.case import Case, sentinel
from tests.qualms.fuzz.oracle import Stream, read_requests
from tests.qualms.fuzz.replies import Reply, ReplyReader

_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


@dataclass
class Outcome:
    """The replies to a case, and how the connection ended."""

    stream: Stream
    """the requests that h11 reads from the case and the sentinel"""
    replies: list[Reply] = field(default_factory=list)
    surplus: bytes = b""
    """bytes after the last reply"""
    malformed: str = ""
    """h11's reason to refuse a reply"""
    closed: bool = False
    """whether the service closed the connection"""
    reset: bool = False
    overdue: bool = False
    """whether the service neither answered nor closed the connection in time"""
    half_closed: bool = False
    """whether the client closed its side before all replies were there"""
    abandoned: bool = False
    """whether the client closed the whole connection without reading replies"""


class Connection(asyncio.Protocol):
    """The client's side of a connection; the bytes received are in `buffer`."""

    def __init__(self) -> None:
        self.buffer = b""
        self.ended = False
        self.reset = False
        self.overdue = False
        self.deadline = 0.0
        self._change: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        self.wake()

    def eof_received(self) -> bool:
        self.ended = True
        self.wake()
        return True

    def connection_lost(self, error: Exception | None) -> None:
        self.ended = True
        self.reset = self.reset or error is not None
        self.wake()

    def wake(self) -> None:
        """Continue `changed`."""
        if self._change is not None and not self._change.done():
            self._change.set_result(None)

    async def changed(self) -> None:
        """Wait for more bytes, the end of the connection, or the deadline."""
        if not self.ended and not self.overdue:
            self._change = asyncio.get_running_loop().create_future()
            await self._change

    def take(self) -> bytes:
        """The bytes received since the last call."""
        data, self.buffer = self.buffer, b""
        return data

    def write(self, data: bytes) -> None:
        """Send bytes, unless the connection has ended."""
        if data and not self.ended and not self.transport.is_closing():
            self.transport.write(data)

    def half_close(self) -> None:
        """Close the client's side."""
        if not self.ended and not self.transport.is_closing():
            self.transport.write_eof()

    def close(self, *, reset: bool = False) -> None:
        """Close both sides."""
        if reset and (connection := self.transport.get_extra_info("socket")) is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
            self.transport.abort()
        else:
            self.transport.close()


async def exchange(connection: Connection, case: Case) -> Outcome:
    """Send a case and read all replies to it; afterwards the connection is open only if it is in sync."""
    follows = sentinel(case.number) if case.ending == "sentinel" else b""
    outcome = Outcome(read_requests(case.data + follows))
    *pieces, last = case.pieces()
    for piece in pieces:
        connection.write(piece)
        await asyncio.sleep(case.pause)
    connection.write(last + follows)
    if case.ending in ("close", "reset"):
        await asyncio.sleep(0)
        outcome.abandoned = True
        connection.close(reset=case.ending == "reset")
        return outcome
    if case.ending == "half-close":
        outcome.half_closed = True
        connection.half_close()
    try:
        await _read_replies(connection, outcome)
    except h11.RemoteProtocolError as error:
        outcome.malformed = str(error)
    outcome.closed, outcome.reset, outcome.overdue = connection.ended, connection.reset, connection.overdue
    if outcome.closed or outcome.overdue or outcome.malformed or outcome.half_closed:
        connection.close()
    return outcome


async def _read_replies(connection: Connection, outcome: Outcome) -> None:
    """Read replies until the connection is idle or ends.

    If the stream does not end with a complete request, the client closes its side as soon as the complete ones are answered.
    """
    stream, sent_end = outcome.stream, outcome.half_closed
    while True:
        closing = bool(outcome.replies) and outcome.replies[-1].closes
        if len(outcome.replies) >= stream.complete and not closing:
            if stream.end == "idle" and not outcome.half_closed:
                outcome.surplus = connection.take()
                return
            if stream.end in ("incomplete", "refused") and not sent_end:
                sent_end = True
                connection.half_close()
        rest = await _read_reply(connection, outcome)
        if rest is None:
            return
        connection.buffer = rest + connection.buffer


async def _read_reply(connection: Connection, outcome: Outcome) -> bytes | None:
    """Read one reply and return the bytes after it; None if there is no other reply."""
    messages, number = outcome.stream.messages, len(outcome.replies)
    rest = outcome.stream.rest
    method = messages[number].method if number < len(messages) else rest.lstrip()[:5].rstrip()
    reader, received = ReplyReader(method), b""
    while True:
        data = connection.take()
        if data:
            received += data
            reply = reader.feed(data)
        elif connection.ended:
            reply = reader.feed(b"") if received else None
            if reply is None:
                return None
        elif connection.overdue:
            outcome.surplus = received
            return None
        else:
            await connection.changed()
            continue
        if reply is not None:
            outcome.replies.append(reply)
            return _body_after_head(method, reply, reader.rest)


def _body_after_head(method: bytes, reply: Reply, rest: bytes) -> bytes:
    """Move the body of an error reply to HEAD into the reply; a request that cannot be parsed has no method."""
    length = int(reply.headers.get(b"content-length", b"0"))
    if method == b"HEAD" and reply.closes and reply.status >= 400 and len(rest) == length:
        reply.body = rest
        return b""
    return rest
