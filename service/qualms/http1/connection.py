"""One connection: reads requests one at a time, passes them to the application and sends the replies in order.

While a request waits for its reply, at most one more read from the socket is buffered, unparsed; then reading pauses. A
reply that closes the connection is followed by FIN, and what the client still sends is discarded for a moment: closing at
once would reset the connection, and the client might lose the reply.
"""

import asyncio
import logging
import math
import os
from collections.abc import Callable
from functools import partial
from typing import Any, cast

from qualms.http1.asgi import AsgiCycle
from qualms.http1.body import FREE_BYTES, BodyReader, Reservation, memory_used_up, too_large
from qualms.http1.connections import Connections
from qualms.http1.exchange import Exchange, Failed
from qualms.http1.head import head_too_large, parse_head, skip_empty_lines
from qualms.http1.messages import (
    BODY_MEMORY,
    CONTINUE,
    EVICTED,
    HEAD_TIMEOUT,
    SEND_TIMEOUT,
    STOPPING,
    Head,
    Refusal,
    Reply,
    encode_reply,
)

_log = logging.getLogger("qualms.http1")
LINGER_SECONDS = 2.0
"""time in which the client's remaining data is discarded after the last reply"""
_LARGE_READ = 128 * 1024
"""a read of at least this size is followed by others before the next read of this connection"""
_LINGER_BYTES = 64 * 2**20
"""data that is discarded in that time, at most"""


class Connection(asyncio.Protocol):
    """The protocol of one connection."""

    __slots__ = (
        "_app_state",
        "_asgi",
        "_body",
        "_buffer",
        "_connections",
        "_descriptor",
        "_exchange",
        "_held",
        "_lingered",
        "_lingering",
        "_paused",
        "_reading",
        "_reservation",
        "_searched",
        "_throttled",
        "_transport",
        "_used",
        "_write_paused",
        "deadline",
        "peer",
        "since",
    )

    def __init__(self, connections: Connections, app_state: dict[str, Any] | None = None) -> None:
        self._connections = connections
        self._app_state = app_state or {}
        self._buffer = b""
        """received and not parsed"""
        self._searched = 0
        """number of bytes at the start of the buffer in which no head ends"""
        self._exchange: Exchange | None = None
        self._body: BodyReader | None = None
        """reads the body of the current request, if it has not arrived"""
        self._asgi: AsgiCycle | None = None
        self._reservation: Reservation | None = None
        """memory of the buffer while a request is in progress"""
        self._descriptor = -1
        """of the socket; -1 if there is none"""
        self._held = b""
        """to be sent at the end of the loop's iteration"""
        self._paused = self._write_paused = self._lingering = self._used = self._throttled = False
        self._reading = True
        self._lingered = 0
        self.deadline = math.inf
        """when the current wait ends"""
        self.peer = ""
        """the address at the other end; empty if it is unknown"""
        self.since = 0.0
        """when it began"""

    # Called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to wait for the first request."""
        self._transport = cast(asyncio.Transport, transport)
        if name := transport.get_extra_info("peername"):  # uvloop raises an error once the connection is closed
            self.peer = str(name[0])
        opened = transport.get_extra_info("socket")
        self._descriptor = -1 if opened is None else opened.fileno()
        # uvloop delays small writes to the end of the loop iteration, unless they exceed the high-water mark.
        self._transport.set_write_buffer_limits(high=0)
        refusal = self._connections.opened(self)
        if refusal is None:
            self._wait(self._connections.limits.head_seconds)
        else:
            self.refuse(refusal)

    def data_received(self, data: bytes) -> None:
        """Parse a request, continue its body, or keep the data until the current request is answered."""
        if len(data) >= _LARGE_READ and not self._throttled:
            self._throttled = True
            self._update_reading()
            self._connections.throttle(self)
        if self._lingering:
            self._lingered += len(data)
            if self._lingered > _LINGER_BYTES:
                self.abort()
        elif self._body is not None:
            self._receive_body(data)
        elif self._exchange is not None or self._write_paused:
            self._buffer += data
            self._pause_reading()
        else:
            self._buffer = self._buffer + data if self._buffer else data
            self._next_request()

    def connection_lost(self, error: Exception | None) -> None:
        """Report the disconnect to the request in progress."""
        self._connections.active.discard(self)
        self.deadline = math.inf
        self._descriptor = -1
        self._lingering = True  # ignores what is still delivered
        self._buffer = self._held = b""
        self._release()
        exchange, self._exchange = self._exchange, None
        asgi, self._asgi = self._asgi, None
        if exchange is not None:
            exchange.disconnected = True
            if self._body is not None:
                self._take_body().failed(None)
            if asgi is not None:
                asgi.wake()

    def pause_writing(self) -> None:
        """The client does not read: stop until it does, within a time limit."""
        self._write_paused = True
        if not self._lingering:
            self.deadline = self._connections.now + self._connections.limits.send_seconds

    def resume_writing(self) -> None:
        """The client has read: continue."""
        self._write_paused = False
        if self._lingering:
            self.deadline = self._connections.now + LINGER_SECONDS
            return
        if self._exchange is None:
            self._wait(self._connections.limits.keep_alive_seconds)
            self._continue()
        else:
            self.deadline = math.inf if self._body is None else self._body.deadline
            if self._asgi is not None:
                self._asgi.wake()

    # Called by `Connections` and the server

    @property
    def is_waiting(self) -> bool:
        """Whether no request is in progress."""
        return self._exchange is None and not self._lingering

    @property
    def is_busy(self) -> bool:
        """Whether a request has begun to arrive or is in progress, or a reply is not sent."""
        return self._exchange is not None or self._write_paused or bool(self._held) or bool(self._buffer)

    def expire(self) -> None:
        """The deadline has passed."""
        self.deadline = math.inf
        if self._write_paused:
            self._connections.on_close(SEND_TIMEOUT)
            self.abort()
        elif self._lingering:
            self.abort()
        elif self._body is not None:
            self._take_body().expire()
        elif self._buffer or not self._used:
            seconds = self._connections.limits.head_seconds
            detail = f"The head of the request did not arrive within {seconds:g} s."
            self.refuse(Refusal(408, HEAD_TIMEOUT, detail))
        else:
            self._transport.close()

    def evict(self) -> None:
        """Close the connection, which waits for a request, to make room for another."""
        if self._used and not self._buffer:
            self._connections.on_close(EVICTED)
            self._transport.close()
        else:
            detail = "The service has too many open connections, and this one has waited longest for its request."
            self.refuse(Refusal(503, EVICTED, detail))

    def shutdown(self) -> None:
        """Close the connection if no request has begun to arrive; uvicorn calls this when the server stops.

        A request may be on its way, and the client must learn that it was not processed; see RFC 9110, section 15.5.9.
        """
        if self.is_waiting and not self._buffer:
            self.refuse(Refusal(408, STOPPING, "The service is stopping, and no request had arrived."))

    def cancel(self) -> None:
        """End the request in progress: the server's grace period is over."""
        if self._exchange is not None:
            self._exchange.on_cancel()
        elif self._buffer:
            self.refuse(Refusal(408, STOPPING, "The service is stopping, and the request had not arrived."))

    def flush(self) -> None:
        """Send what was held until the end of the loop's iteration."""
        if self._held:
            held, self._held = self._held, b""
            self._send(held)

    def close(self) -> None:
        """Close the connection after what was written is sent."""
        self.flush()
        self._transport.close()

    def abort(self) -> None:
        """Reset the connection."""
        self._transport.abort()

    # Requests

    def _next_request(self) -> None:
        """Parse the head at the start of the buffer and start its request, or wait for the rest of the head."""
        buffer = self._buffer
        if buffer.startswith(b"\r\n"):
            try:
                buffer = self._buffer = skip_empty_lines(buffer)
            except Refusal as refusal:
                self.refuse(refusal)
                return
        end = buffer.find(b"\r\n\r\n", self._searched) + 4
        max_bytes = self._connections.limits.head_bytes
        if end < 4 or end > max_bytes:
            if len(buffer) > max_bytes:
                self.refuse(head_too_large(buffer, max_bytes))
                return
            if buffer and not self._searched:  # the head has begun
                self._wait(self._connections.limits.head_seconds)
            self._searched = max(0, len(buffer) - 3)
            self._resume_reading()
            return
        try:
            head = parse_head(buffer[:end])
        except Refusal as refusal:
            self.refuse(refusal)
            return
        self._buffer, self._searched, self._used = buffer[end:], 0, True
        self._start(head)
        if self._exchange is not None:
            self._pause_or_resume()

    def _start(self, head: Head) -> None:
        connections = self._connections
        self.deadline = math.inf
        exchange = self._exchange = Exchange(self, head)
        connections.in_progress += 1
        try:
            answered = connections.direct is not None and connections.direct(exchange)
        except Exception:
            _log.exception("the application failed", extra={"path": head.path})
            exchange.reply(Reply(500, [(b"content-length", b"0")], b"", close=True))
            return
        if not answered:
            self._asgi = AsgiCycle(self, exchange, connections, self._app_state)
            connections.run_asgi(partial(self._asgi.start, self._transport))

    def _continue(self) -> None:
        """Start the next request if it has arrived, else go on reading."""
        if self._exchange is None and not self._lingering and not self._write_paused:
            if self._buffer:
                self._next_request()
            else:
                self._resume_reading()

    # Bodies

    def read_body(
        self, exchange: Exchange, max_bytes: int, seconds: float, then: Callable[[bytes], None], failed: Failed
    ) -> None:
        """Call `then` with the body, at once if it has arrived, or `failed` if it is refused or takes too long."""
        if exchange.disconnected:
            failed(None)
            return
        if self._paused:
            self._release()  # the body has a reservation of its own
        length, data = exchange.head.length, self._buffer
        if length is not None:
            if length > max_bytes:
                failed(too_large(max_bytes))
                return
            if len(data) >= length:
                if length > FREE_BYTES and not exchange.reservation(self._connections.memory).grow(length):
                    failed(memory_used_up())
                    return
                exchange.body_unread = False
                self._buffer = data[length:]
                if self._paused:
                    self._pause_or_resume()
                then(data[:length])
                return
        reservation = exchange.reservation(self._connections.memory)
        self.deadline = self._connections.clock() + seconds
        self._body = BodyReader(length, max_bytes, self.deadline, seconds, reservation, then, failed)
        self._connections.in_progress -= 1  # it does not occupy the queue
        self._buffer = b""
        if data:
            self._receive_body(data)
            return
        if exchange.head.expects_continue:
            self.write(CONTINUE)
        self._resume_reading()

    def _receive_body(self, data: bytes) -> None:
        assert self._body is not None
        try:
            self._buffer, again, complete = self._body.feed(data)
        except Refusal as refusal:
            self._take_body().failed(refusal)
            return
        if complete is not None:
            self._take_body()
            if self._exchange is not None:
                self._exchange.body_unread = False
            complete()
            if self._exchange is not None:
                self._pause_or_resume()
        elif again:
            self._pause_reading()
            asyncio.get_running_loop().call_soon(self._more_body)
        else:
            self._resume_reading()

    def _more_body(self) -> None:
        if self._body is not None:
            self._receive_body(b"")

    def _take_body(self) -> BodyReader:
        """Stop reading the body."""
        assert self._body is not None
        body, self._body = self._body, None
        self.deadline = math.inf
        self._connections.in_progress += 1
        return body

    # Replies

    def reply(self, exchange: Exchange, reply: Reply | None) -> None:
        """Send the whole reply to a request, and end its exchange."""
        if reply is None or exchange.disconnected:
            self.finish(exchange, close=True)
            return
        if exchange.head.method == "HEAD":
            reply = reply._replace(body=b"")
        close = self.closes(exchange, close=reply.close)
        data = encode_reply(reply, self._connections.default_headers, exchange.head.version, close=close)
        self._connections.in_progress -= 1
        self.write(data)
        self._connections.in_progress += 1
        self.finish(exchange, close=close)

    def closes(self, exchange: Exchange, *, close: bool) -> bool:
        """Whether the connection is closed after the reply: `close` is the application's wish."""
        if close or self._connections.draining or not exchange.head.keep_alive:
            return True
        if exchange.body_unread:  # the rest of the body may take any time to arrive, unless it is here already
            length = exchange.head.length
            return length is None or self._body is not None or len(self._buffer) < length
        return False

    @property
    def write_paused(self) -> bool:
        """Whether the client has not read what was sent to it."""
        return self._write_paused

    def finish(self, exchange: Exchange, *, close: bool) -> None:
        """End an exchange whose reply was sent."""
        if self._body is not None and self._exchange is exchange:
            self._take_body()
        self._connections.in_progress -= 1
        exchange.end()
        if self._exchange is not exchange:
            return
        self._exchange = self._asgi = None
        if close:
            self._linger()
            return
        if exchange.body_unread:  # it has arrived: see `closes`
            self._buffer = self._buffer[exchange.head.length :]
        if not self._write_paused:
            self._wait(self._connections.limits.keep_alive_seconds)
            if self._buffer:
                # One request of a connection per iteration of the loop, so that pipelines do not delay others.
                self._pause_reading()
                asyncio.get_running_loop().call_soon(self._continue)
            elif self._paused:
                self._resume_reading()

    def write(self, data: bytes) -> None:
        """Send at once, or at the end of the loop's iteration if other replies are due."""
        if self._held:
            self._held += data
        elif self._connections.in_progress > 0:
            self._held = data
            self._connections.hold(self)
        else:
            self._send(data)

    def _send(self, data: bytes) -> None:
        """Write to the socket directly; what it does not take goes to the transport, which is slower."""
        if not self._write_paused and self._descriptor >= 0 and not self._transport.is_closing():
            try:
                sent = os.write(self._descriptor, data)
            except OSError:  # the socket takes nothing now, or the connection is broken: the transport finds out
                sent = 0
            if sent == len(data):
                return
            data = data[sent:]
        self._transport.write(data)

    def refuse(self, refusal: Refusal) -> None:
        """Answer with an error and close the connection."""
        data = encode_reply(self._connections.refuse(refusal), self._connections.default_headers, "1.1", close=True)
        self._transport.write(self._held + data)
        self._held = b""
        self._linger()

    def _linger(self) -> None:
        """Send what is left and FIN, then discard what the client sends until it closes the connection, too."""
        self.flush()
        self._lingering = True
        self._buffer = b""
        self._release()
        seconds = self._connections.limits.send_seconds if self._write_paused else LINGER_SECONDS
        self.deadline = self._connections.now + seconds
        if self._transport.is_closing():
            return
        self._paused = False
        self._update_reading()
        try:
            self._transport.write_eof()
        except (OSError, RuntimeError):  # the client has closed the connection already
            self._transport.close()

    # Waiting

    def _wait(self, seconds: float) -> None:
        self.since = self._connections.now
        self.deadline = self.since + seconds

    def _pause_reading(self) -> None:
        """Read no more until the current request is answered; what was read counts as memory of bodies."""
        if self._reservation is None:
            self._reservation = Reservation(self._connections.memory)
        if not self._reservation.grow(len(self._buffer)):
            self._connections.on_close(BODY_MEMORY)
            self.abort()
            return
        self._paused = True
        self._update_reading()

    def _pause_or_resume(self) -> None:
        """While a request is in progress, read on unless data waits behind it: only then is a disconnect noticed."""
        if self._buffer:
            self._pause_reading()
        elif self._paused:
            self._resume_reading()

    def _resume_reading(self) -> None:
        if self._paused:
            self._paused = False
            self._release()
            self._update_reading()

    def unthrottle(self) -> None:
        """Read on after a large read."""
        self._throttled = False
        self._update_reading()

    def _update_reading(self) -> None:
        reading = not self._paused and not self._throttled
        if reading != self._reading and not self._transport.is_closing():
            self._reading = reading
            if reading:
                self._transport.resume_reading()
            else:
                self._transport.pause_reading()

    def _release(self) -> None:
        if self._reservation is not None:
            self._reservation.release()
