"""A server without sockets and without real time: connections with recording transports, on a loop whose time is set by tests."""

import asyncio
import re
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, cast

from qualms.http1.body import BodyMemory
from qualms.http1.connection import Connection
from qualms.http1.connections import SWEEP_SECONDS, Connections, Limits
from qualms.http1.exchange import Exchange
from qualms.http1.messages import Refusal, Reply

STEPS = 12
"""iterations of the loop in which everything that is due has happened"""


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time passes only in `Server.advance`."""

    now = 1000.0

    def time(self) -> float:
        return self.now


class Wire:
    """The transport of one connection, and the client at its other end."""

    def __init__(self) -> None:
        self.protocol: Connection
        self.sent = b""
        self.writes: list[bytes] = []
        self.reading = True
        self.eof = self.closed = self.aborted = self.lost = False
        self._waiting: list[bytes] = []
        self._stuck = self._paused = False

    # Called by the connection

    def write(self, data: bytes) -> None:
        assert not self.lost, "written after the connection was lost"
        if self.eof:
            raise RuntimeError("Cannot call write() after write_eof()")
        if not self.closed:
            self.writes.append(data)
            self.sent += data
            if self._stuck and not self._paused:
                self._paused = True
                self.protocol.pause_writing()

    def write_eof(self) -> None:
        self.eof = True

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            if not self._paused:
                asyncio.get_running_loop().call_soon(self._lose)

    def abort(self) -> None:
        self.aborted = self.closed = True
        asyncio.get_running_loop().call_soon(self._lose)

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._deliver)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def get_extra_info(self, _: str, default: Any = None) -> Any:
        return default

    # Called by tests

    def send(self, *pieces: bytes) -> None:
        """Send data as the client; the server gets each piece when it reads."""
        self._waiting += pieces
        self._deliver()

    def stop_reading(self) -> None:
        """The client reads nothing from now on."""
        self._stuck = True

    def read_all(self) -> None:
        """The client reads everything, and goes on reading."""
        self._stuck = False
        if self._paused:
            self._paused = False
            if self.closed:
                self._lose()
            else:
                self.protocol.resume_writing()

    def disconnect(self) -> None:
        """The client closes the connection."""
        self.closed = True
        self._lose()

    @property
    def statuses(self) -> list[int]:
        """The statuses of the replies, without 100 Continue."""
        return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d+) ", self.sent) if status != b"100"]

    @property
    def bodies(self) -> list[bytes]:
        """What tests mark with angle brackets in the bodies of replies."""
        return re.findall(rb"<(.*?)>", self.sent, re.DOTALL)

    @property
    def unread(self) -> int:
        """Number of pieces that the server has not read."""
        return len(self._waiting)

    def _deliver(self) -> None:
        while self._waiting and self.reading and not self.closed:
            self.protocol.data_received(self._waiting.pop(0))

    def _lose(self) -> None:
        if not self.lost:
            self.lost = True
            self.protocol.connection_lost(None)
            del self.protocol


class Application:
    """Keeps the requests that arrive until a test answers them."""

    def __init__(self) -> None:
        self.waiting: list[Exchange] = []
        self.bodies: list[bytes] = []
        self.failures: list[Refusal | None] = []

    def direct(self, exchange: Exchange) -> bool:
        self.waiting.append(exchange)
        return True

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError("not called")

    def read(self, exchange: Exchange, max_bytes: int = 2**20, seconds: float = 5.0) -> None:
        """Read the body; it is then in `bodies`, or the reason why it cannot be read is in `failures`."""
        exchange.read_body(max_bytes, seconds, self.bodies.append, self.failures.append)

    @property
    def paths(self) -> list[str]:
        return [exchange.head.path for exchange in self.waiting]

    def answer(self, text: str | None = None, *, close: bool = False) -> None:
        """Answer the request that has waited longest, by default with its path."""
        exchange = self.waiting.pop(0)
        exchange.reply(reply(exchange.head.path if text is None else text, close=close))


def reply(text: str, status: int = 200, *, close: bool = False) -> Reply:
    """A reply whose body is the text in angle brackets."""
    body = f"<{text}>".encode()
    return Reply(status, [(b"content-length", b"%d" % len(body))], body, close)


class Server:
    """Connections of an application."""

    def __init__(self, app: Any, memory: int = 2**20, **limits: Any) -> None:
        self.loop = cast(VirtualLoop, asyncio.get_running_loop())
        self.refusals: list[Refusal] = []
        self.closes: list[str] = []
        self.connections = Connections(
            app, self._refuse, self.closes.append, Limits(**limits), BodyMemory(memory), self.loop.time
        )
        self.connections.start()

    def _refuse(self, refusal: Refusal) -> Reply:
        self.refusals.append(refusal)
        return reply(refusal.reason, refusal.status)

    @property
    def reasons(self) -> list[str]:
        return [refusal.reason for refusal in self.refusals]

    def connect(self) -> Wire:
        wire = Wire()
        wire.protocol = Connection(self.connections, {})
        wire.protocol.connection_made(cast(asyncio.Transport, wire))
        return wire

    async def settle(self, steps: int = STEPS) -> None:
        """Let the loop run everything that is due."""
        for _ in range(steps):
            await asyncio.sleep(0)

    async def advance(self, seconds: float) -> None:
        """Let time pass, with a check of all timeouts at the end."""
        self.loop.now += max(seconds, SWEEP_SECONDS)
        await self.settle()


def play(scene: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a scene on a loop with virtual time; errors in callbacks fail it."""
    errors: list[dict[str, Any]] = []

    async def whole() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
        await scene()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(whole())
    assert not errors, errors


Scene = Callable[..., Coroutine[Any, Any, None]]


def scene(test: Scene) -> Callable[..., None]:
    """Run a test on a loop with virtual time."""

    @wraps(test)
    def run(*args: Any, **options: Any) -> None:
        play(lambda: test(*args, **options))

    return run


def get(path: str = "/a", *headers: str, version: str = "1.1", method: str = "GET") -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/{version}", "Host: x", *headers, "", ""]).encode()


def post(body: bytes, *headers: str, path: str = "/a", length: int | None = None) -> bytes:
    size = len(body) if length is None else length
    return get(path, f"Content-Length: {size}", *headers, method="POST") + body


def chunked(*chunks: bytes) -> bytes:
    body = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)
    return get("/a", "Transfer-Encoding: chunked", method="POST") + body


def is_open(wire: Wire) -> bool:
    return not (wire.eof or wire.closed)


def start(**options: Any) -> tuple[Application, Server, Wire]:
    """An application that keeps its requests, its server, and one connection."""
    app = Application()
    server = Server(app, **options)
    return app, server, server.connect()
