"""All code that depends on uvicorn's internals: the HTTP protocol, and a server that drains before it stops.

uvicorn writes the head and the body of a reply separately, and uvloop sends each write at once. Here a reply is one system
call, and the replies of a batch are sent in one burst, so that the client's core does not sleep in between.

An application may have a method `direct`. It is called with every request that was read completely and may answer it
without a task or ASGI messages; all other requests go through ASGI.

A request that offers to change the protocol (`Upgrade: h2c`, as the JDK's client sends) is answered in HTTP/1.1: uvicorn
would drop its body.
"""

import asyncio
import logging
import signal
import socket
import time
from collections.abc import Callable
from itertools import chain
from types import FrameType
from typing import Any, cast
from weakref import WeakKeyDictionary

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from qualms.errors import QualmsError
from qualms.web.listener import accept_pending, drop_new_connections
from qualms.web.reply import Reply
from qualms.web.state import CLOSE, ServiceState

LINGER_SECONDS = 1.0
"""time that the last connections have to send the request they were opened for"""
_log = logging.getLogger("qualms.server")


def check_uvicorn() -> None:
    """Check that the installed uvicorn has the methods that this module overrides or calls."""
    hooks: dict[type, tuple[str, ...]] = {
        HttpToolsProtocol: (
            *("_start_asgi_task", "connection_made", "data_received", "on_message_begin", "on_url", "on_header"),
            *("on_headers_complete", "on_body", "on_message_complete"),
        ),
        RequestResponseCycle: ("receive", "send"),
        uvicorn.Server: ("handle_exit", "on_tick", "shutdown"),
    }
    for owner, names in hooks.items():
        for name in names:
            if not hasattr(owner, name):
                raise QualmsError(
                    f"uvicorn {uvicorn.__version__} has no {owner.__name__}.{name}; "
                    "install a version that qualms supports: pip install --upgrade qualms."
                )


def body_is_complete(receive: Any) -> bool:
    """Whether the whole body has arrived; False if the server is not uvicorn. ASGI has no check that does not wait."""
    return getattr(_cycle(receive), "more_body", True) is False


def client_disconnected(receive: Any) -> Callable[[], bool]:
    """A function that returns whether the client has disconnected, as far as the server reports it."""
    cycle = _cycle(receive)
    return lambda: getattr(cycle, "disconnected", False) is True


def _cycle(receive: Any) -> Any:
    """uvicorn's RequestResponseCycle, of which `receive` is a method."""
    return getattr(receive, "__self__", None)


class QualmsProtocol(HttpToolsProtocol):
    """uvicorn's httptools protocol with joined writes and the application's `direct` entrance."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.parser = _new_parser(self, self)
        self._direct: Callable[[Exchange], bool] | None = getattr(self.app, "direct", None)
        self._parsing = False
        self._parsed: tuple[RequestResponseCycle, Any] | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wrap the transport of a new connection."""
        # uvloop delays small writes to the end of the loop iteration, unless they exceed the high-water mark.
        transport.set_write_buffer_limits(high=0)
        joining = JoiningTransport(transport, WriteQueue.of(self.loop), self.tasks)
        super().connection_made(cast(asyncio.Transport, joining))

    def data_received(self, data: bytes) -> None:
        """Parse, then start the request whose head was in `data`: only now is it known whether its body was, too."""
        self._parsing = True
        try:
            super().data_received(data)
        finally:
            self._parsing = False
            if self._parsed is not None:
                parsed, self._parsed = self._parsed, None
                self._start(*parsed)

    def decline_upgrade(self) -> None:
        """Continue in HTTP/1.1 with a new parser: the present one treats the rest as another protocol."""
        framing = [header for header in self.headers if header[0] in (b"content-length", b"transfer-encoding")]
        self.parser = _new_parser(self, _SkipFirstHead(self))
        self.cycle.more_body = True
        self.parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n" % b"".join(b"%b: %b\r\n" % header for header in framing))

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        if self._parsing:
            self._parsed = cycle, app
        else:  # a pipelined request, after the reply to the one before it
            super()._start_asgi_task(cycle, app)

    def _start(self, cycle: RequestResponseCycle, app: Any) -> None:
        if self._direct is not None and app is self.app and _is_complete(cycle):
            exchange = Exchange(self, cycle)
            self.tasks.add(cast("asyncio.Task[None]", exchange))  # the server waits for it and may cancel it
            if self._direct(exchange):
                return
            exchange.end()
        super()._start_asgi_task(cycle, app)


class _Parser(httptools.HttpRequestParser):
    """A parser that continues after an offer to change the protocol."""

    protocol: QualmsProtocol

    def feed_data(self, data: Any) -> None:
        """Parse bytes that may hold any number of offers, without recursion."""
        rest = self.parse(data)
        while rest is not None:
            self.protocol.decline_upgrade()
            rest = cast(_Parser, self.protocol.parser).parse(rest)

    def parse(self, data: Any) -> memoryview | None:
        """Parse bytes up to the first offer; return the bytes after it, or None if there is none."""
        try:
            super().feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            return memoryview(data)[offer.args[0] :]
        return None


def _new_parser(protocol: QualmsProtocol, callbacks: Any) -> _Parser:
    parser = _Parser(callbacks)
    parser.protocol = protocol
    parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as in uvicorn
    return parser


class _SkipFirstHead:
    """Passes a parser's callbacks on, except for those of the first head, which was parsed before."""

    def __init__(self, protocol: QualmsProtocol) -> None:
        self._protocol = protocol
        self._in_first_head = True
        self.on_body, self.on_message_complete = protocol.on_body, protocol.on_message_complete

    def on_message_begin(self) -> None:
        if not self._in_first_head:
            self._protocol.on_message_begin()

    def on_url(self, url: bytes) -> None:
        if not self._in_first_head:
            self._protocol.on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_first_head:
            self._protocol.on_header(name, value)

    def on_headers_complete(self) -> None:
        if not self._in_first_head:
            self._protocol.on_headers_complete()
        self._in_first_head = False


def _is_complete(cycle: RequestResponseCycle) -> bool:
    """Whether the whole request has arrived and its reply can be written without waiting."""
    waits = cycle.more_body or cycle.waiting_for_100_continue or cycle.flow.write_paused
    return not waits and not cycle.transport.is_closing()


class Exchange:
    """A request that was read completely, and its reply. The server treats it as a task."""

    __slots__ = ("_cycle", "_protocol", "on_cancel", "over", "scope")

    def __init__(self, protocol: QualmsProtocol, cycle: RequestResponseCycle) -> None:
        self._protocol = protocol
        self._cycle = cycle
        self.scope: Any = cycle.scope
        self.on_cancel: Callable[[], None] = _nothing
        """called when the server's grace period is over"""
        self.over = False

    def take_body(self) -> bytes:
        """The request's body; call it once.

        As in uvicorn's `receive`, the connection no longer holds the body, and reading goes on, without which a
        disconnect would not be noticed. While pipelined requests wait, reading stays paused.
        """
        body, self._cycle.body = bytes(self._cycle.body), bytearray()
        if not self._protocol.pipeline:
            self._protocol.flow.resume_reading()
        return body

    def disconnected(self) -> bool:
        """Whether the client has disconnected."""
        return self._cycle.disconnected

    def reply(self, reply: Reply | None) -> None:
        """Send the whole reply, as uvicorn would; None if the client has disconnected."""
        cycle = self._cycle
        if reply is not None and not cycle.disconnected:
            if CLOSE in reply.headers:
                cycle.keep_alive = False
            elif not cycle.keep_alive:
                reply.headers.append(CLOSE)
            cycle.response_started = cycle.response_complete = True
            parts = [STATUS_LINE[reply.status]]
            for name, value in chain(cycle.default_headers, reply.headers):
                parts += (name, b": ", value, b"\r\n")
            parts += (b"\r\n", reply.body)
            cast(JoiningTransport, cycle.transport).write_whole(b"".join(parts))
            if not cycle.keep_alive:
                cycle.transport.close()
            cycle.on_response()
            cycle.on_response = _nothing
        self.end()

    def end(self) -> None:
        """Remove it from the server's tasks."""
        self.over = True
        self.on_cancel = _nothing  # breaks a reference cycle
        self._protocol.tasks.discard(cast("asyncio.Task[None]", self))

    def cancel(self, msg: str | None = None) -> bool:
        """Called by the server like `Task.cancel`: takes effect in the loop's next iteration."""
        self._protocol.loop.call_soon(self.on_cancel)
        return not self.over


def _nothing() -> None:
    pass


class WriteQueue:
    """Collects the writes of one iteration of an event loop and sends them in the next."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._call_soon = loop.call_soon
        self._waiting: list[JoiningTransport] = []

    @classmethod
    def of(cls, loop: asyncio.AbstractEventLoop) -> "WriteQueue":
        """The queue of a loop."""
        return _write_queues.setdefault(loop, cls(loop))

    def add(self, transport: "JoiningTransport") -> None:
        """Flush a transport in the next iteration."""
        if not self._waiting:
            self._call_soon(self._flush)
        self._waiting.append(transport)

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        for transport in waiting:
            transport.flush()


_write_queues: "WeakKeyDictionary[asyncio.AbstractEventLoop, WriteQueue]" = WeakKeyDictionary()


class JoiningTransport:
    """Delays writes to the end of the loop's iteration, or only to the second write if no other reply is due."""

    def __init__(self, transport: asyncio.Transport, queue: WriteQueue, tasks: set[Any]) -> None:
        self._transport = transport
        self._queue = queue
        self._tasks = tasks
        """requests that are not answered yet"""
        self._held = b""

    def write(self, data: bytes) -> None:
        """Send at the end of the iteration."""
        if not self._held:
            self._held = data
            self._queue.add(self)
            return
        self._held += data
        if len(self._tasks) <= 1:
            self.flush()

    def write_whole(self, data: bytes) -> None:
        """Send a complete reply, at once if no other is due."""
        if self._held or len(self._tasks) > 1:
            self.write(data)
        else:
            self._transport.write(data)

    def flush(self) -> None:
        """Send delayed writes."""
        if self._held:
            held, self._held = self._held, b""
            self._transport.write(held)

    def close(self) -> None:
        """Send delayed writes, then close."""
        self.flush()
        self._transport.close()

    def is_closing(self) -> bool:
        """Defined here because it is called twice per request and `__getattr__` is slow."""
        return self._transport.is_closing()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class DrainingServer(uvicorn.Server):
    """A server that drains on the first signal and stops at once on the second.

    uvicorn closes its listener on the first signal, before load balancers notice. Here the first signal only turns
    readiness to 503; requests are accepted for `drain_seconds` after SIGTERM (not at all after SIGINT), then the listener
    closes, admitted requests are finished, and the process exits with 0.
    """

    def __init__(self, config: uvicorn.Config, state: ServiceState, drain_seconds: float) -> None:
        super().__init__(config)
        self._state = state
        self._drain_seconds = drain_seconds
        self._close_at: float | None = None
        self._logged = False
        self.failure: Exception | None = None
        state.tasks = lambda: len(self.server_state.tasks)
        state.connections = lambda: len(self.server_state.connections)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The signal handler. uvicorn's own would raise the signal again after a clean stop."""
        if self._state.draining or sig not in (signal.SIGTERM, signal.SIGINT):
            self.force_exit = self.should_exit = True
            return
        self._state.draining = True
        self._close_at = time.monotonic() + (self._drain_seconds if sig == signal.SIGTERM else 0.0)

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second; True closes the listener."""
        if self._close_at is not None:
            if not self._logged:  # not in the signal handler, which may interrupt the writing of a log line
                self._logged = True
                _log.info("draining", extra={"seconds": round(self._close_at - time.monotonic(), 1)})
            if time.monotonic() >= self._close_at:
                return True
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Answer the connections that were opened before the listener closed, then stop as uvicorn does.

        uvicorn would close connections whose request has not arrived yet. While draining, every reply closes its
        connection, so a connection that is still open after LINGER_SECONDS is idle.
        """
        if self._state.draining:
            await self._close_listeners(sockets or [])
            give_up = time.monotonic() + LINGER_SECONDS
            while self.server_state.connections and time.monotonic() < give_up and not self.force_exit:
                await asyncio.sleep(0.01)
        await super().shutdown(sockets)

    async def _close_listeners(self, sockets: list[socket.socket]) -> None:
        """Close the listeners and serve the connections that wait to be accepted: the kernel would reset them."""
        duplicates = [listener.dup() for listener in sockets]
        for listener in duplicates:
            drop_new_connections(listener)
        for server in self.servers:
            server.close()
        pending = []
        for listener in duplicates:
            with listener:
                pending += accept_pending(listener)
        for connection in pending:
            await asyncio.get_running_loop().connect_accepted_socket(self._new_protocol, connection)

    def _new_protocol(self) -> asyncio.Protocol:
        return self.config.http_protocol_class(  # type: ignore[call-arg]
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )

    def fail(self, error: Exception) -> None:
        """Stop because the model cannot be loaded."""
        self.failure = error
        self.should_exit = True
