"""uvicorn's HTTP protocol, with replies sent together: head and body in one system call, and a batch's in one burst.

uvicorn writes the head and the body of a reply one after the other, and uvloop sends each write at once. A system call
for each is dear, and between two replies the client's core falls asleep, so that each write also has to wake it.

An application may have a method `shortcut`, which is offered every request that was read whole at once: what it takes
costs neither a task nor messages. All else, and what it leaves, goes the way of ASGI.

Who offers to change the protocol, as the JDK's client does with its first request, is answered in HTTP/1.1: uvicorn would
take such a request for one without a body.
"""

import asyncio
from collections.abc import Callable
from typing import Any, cast
from weakref import WeakKeyDictionary

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle


class JoiningProtocol(HttpToolsProtocol):
    """httptools as uvicorn runs it, on a transport that joins writes, with the application's shortcut."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.parser = _new_parser(self, self)
        self._shortcut: Callable[[Exchange], bool] | None = getattr(self.app, "shortcut", None)
        self._parsing = False
        self._begun: tuple[RequestResponseCycle, Any] | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A connection begins."""
        # uvloop sends small writes only after all that is due in the loop's pass, unless they exceed the high-water mark.
        transport.set_write_buffer_limits(high=0)
        joining = JoiningTransport(transport, Outbox.of(self.loop), self.tasks)
        super().connection_made(cast(asyncio.Transport, joining))

    def data_received(self, data: bytes) -> None:
        """Parse; a request whose head is in `data` is started after that, when it is known whether its body is, too."""
        self._parsing = True
        try:
            super().data_received(data)
        finally:
            self._parsing = False
            if self._begun is not None:
                begun, self._begun = self._begun, None
                self._start(*begun)

    def decline_upgrade(self) -> None:
        """Read on in HTTP/1.1 with another parser: this one has read a head, and taken it for a whole request."""
        framing = [header for header in self.headers if header[0] in (b"content-length", b"transfer-encoding")]
        self.parser = _new_parser(self, _BodyOf(self))
        self.cycle.more_body = True
        self.parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n" % b"".join(b"%b: %b\r\n" % header for header in framing))

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        if self._parsing:
            self._begun = cycle, app
        else:  # it waited for the one before it to be answered
            super()._start_asgi_task(cycle, app)

    def _start(self, cycle: RequestResponseCycle, app: Any) -> None:
        if self._shortcut is not None and app is self.app and _is_simple(cycle):
            exchange = Exchange(self, cycle)
            self.tasks.add(cast("asyncio.Task[None]", exchange))  # the server waits for it, and may cancel it
            if self._shortcut(exchange):
                return
            exchange.end()
        super()._start_asgi_task(cycle, app)


class _Parser(httptools.HttpRequestParser):
    """A parser that goes on where a request offers to change the protocol."""

    protocol: JoiningProtocol

    def feed_data(self, data: Any) -> None:
        """Parse bytes; however many offers they hold, not each within the one before it."""
        rest = self.leaves(data)
        while rest is not None:
            self.protocol.decline_upgrade()
            rest = cast(_Parser, self.protocol.parser).leaves(rest)

    def leaves(self, data: Any) -> memoryview | None:
        """Parse bytes up to an offer; what follows it, or None if there is none."""
        try:
            super().feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            return memoryview(data)[offer.args[0] :]
        return None


def _new_parser(protocol: JoiningProtocol, callbacks: Any) -> _Parser:
    parser = _Parser(callbacks)
    parser.protocol = protocol
    parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's
    return parser


class _BodyOf:
    """Tells a protocol of everything but the first head, which it knows."""

    def __init__(self, protocol: JoiningProtocol) -> None:
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


def _is_simple(cycle: RequestResponseCycle) -> bool:
    """Whether all of a request is here, and its reply can be written without waiting."""
    waits = cycle.more_body or cycle.waiting_for_100_continue or cycle.flow.write_paused
    return not waits and not cycle.transport.is_closing()


class Exchange:
    """A request that was read whole, and the one reply to it; to the server it is a task."""

    __slots__ = ("_cycle", "_protocol", "on_cancel", "over", "scope")

    def __init__(self, protocol: JoiningProtocol, cycle: RequestResponseCycle) -> None:
        self._protocol = protocol
        self._cycle = cycle
        self.scope: Any = cycle.scope
        self.on_cancel: Callable[[], None] = _nothing
        """called when the server will wait no longer"""
        self.over = False
        """whether it was answered or given up"""

    @property
    def body(self) -> bytearray:
        """The request's."""
        return self._cycle.body

    def gone(self) -> bool:
        """Whether nobody waits for a reply any more."""
        return self.over or self._cycle.disconnected

    def send(self, status: int, headers: bytes, body: bytes, *, close: bool = False) -> None:
        """Send the whole reply, as uvicorn would; `headers` are lines, and `close` ends the connection after it."""
        cycle = self._cycle
        if cycle.disconnected:
            return
        if close:
            cycle.keep_alive = False
        cycle.response_started = cycle.response_complete = True
        head = [STATUS_LINE[status]]
        for name, value in cycle.default_headers:
            head += (name, b": ", value, b"\r\n")
        head += (headers, b"\r\n" if cycle.keep_alive else b"connection: close\r\n\r\n", body)
        cast(JoiningTransport, cycle.transport).write_whole(b"".join(head))
        if not cycle.keep_alive:
            cycle.transport.close()
        cycle.on_response()
        cycle.on_response = _nothing

    def end(self) -> None:
        """It was answered, or nobody is there to answer."""
        self.over = True
        self.on_cancel = _nothing  # what it calls may hold this
        self._protocol.tasks.discard(cast("asyncio.Task[None]", self))

    def pass_on(self) -> None:
        """Let ASGI answer it after all."""
        self.end()
        self._protocol._start_asgi_task(self._cycle, self._protocol.app)

    def cancel(self, msg: str | None = None) -> bool:
        """What the server does to tasks that take too long; as theirs, it takes effect in the loop's next pass."""
        self._protocol.loop.call_soon(self.on_cancel)
        return not self.over


def _nothing() -> None:
    pass


class Outbox:
    """What one pass of an event loop writes, sent in the next one."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._call_soon = loop.call_soon
        self._holding: list[JoiningTransport] = []

    @classmethod
    def of(cls, loop: asyncio.AbstractEventLoop) -> "Outbox":
        """The only one of a loop."""
        return _outboxes.setdefault(loop, cls(loop))

    def add(self, transport: "JoiningTransport") -> None:
        """Have a transport flushed."""
        if not self._holding:
            self._call_soon(self._flush)
        self._holding.append(transport)

    def _flush(self) -> None:
        holding, self._holding = self._holding, []
        for transport in holding:
            transport.flush()


_outboxes: "WeakKeyDictionary[asyncio.AbstractEventLoop, Outbox]" = WeakKeyDictionary()


class JoiningTransport:
    """Holds writes back until the end of the loop's pass, or only until the second one if no other reply is due."""

    def __init__(self, transport: asyncio.Transport, outbox: Outbox, tasks: set[Any]) -> None:
        self._transport = transport
        self._outbox = outbox
        self._tasks = tasks
        """the requests that the server is about to answer"""
        self._held = b""

    def write(self, data: bytes) -> None:
        """Send soon, after what was written before."""
        if not self._held:
            self._held = data
            self._outbox.add(self)
            return
        self._held += data
        if len(self._tasks) <= 1:
            self.flush()

    def write_whole(self, data: bytes) -> None:
        """Send a reply that nothing will be added to: at once, if no other is due."""
        if self._held or len(self._tasks) > 1:
            self.write(data)
        else:
            self._transport.write(data)

    def flush(self) -> None:
        """Send what was held back."""
        if self._held:
            held, self._held = self._held, b""
            self._transport.write(held)

    def close(self) -> None:
        """Close once all is sent."""
        self.flush()
        self._transport.close()

    def is_closing(self) -> bool:
        """Asked twice a request, which by `__getattr__` would be slow."""
        return self._transport.is_closing()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)
