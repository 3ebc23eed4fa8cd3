"""Clients of a service that is stopped while they send requests, and the record of what became of each request.

A request is lost if its connection was established and no complete reply arrives. These are not lost: a connection that
is refused or not established in time, a request that was not sent because the server had closed the idle connection or
announced in the previous reply that it closes, and the second request of a pair whose first reply announced it. A service
that stops sends 408 on idle connections before it closes them: that is the reply to a request that was on its way.
"""

import asyncio
import errno
import random
import socket
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import closing
from dataclasses import dataclass, field

import h11
from tests.qualms.fuzz.replies import Reply, ReplyReader

CONNECT_SECONDS = 5.0
"""a dropped SYN packet is sent again after 1 s and 3 s"""
REPLY_SECONDS = 20.0
_RECEIVE_BYTES = 65536


class LostError(Exception):
    """A request without a complete reply."""


@dataclass(frozen=True)
class Lost:
    """A lost request; times are seconds since the signal."""

    client: str
    cause: str
    connected: float
    sent: float
    failed: float
    earlier_replies: int

    def __str__(self) -> str:
        times = f"connected {self.connected:+.3f} s, sent {self.sent:+.3f} s, failed {self.failed:+.3f} s"
        return f"{self.client}: {self.cause} ({times}, {self.earlier_replies} earlier replies)"


@dataclass
class Record:
    """What became of the requests of one run."""

    replies: Counter[tuple[str, int]] = field(default_factory=Counter)
    """number of complete replies by kind of client and status"""
    refused: int = 0
    """connections that were not established"""
    closed_idle: int = 0
    """connections that the server closed before the next request was sent"""
    lost: list[Lost] = field(default_factory=list)


class Signal:
    """When the service gets, or got, the signal, on the clock of the event loop."""

    def __init__(self, at: float) -> None:
        self.at = at

    async def wait(self, offset: float) -> None:
        """Sleep until `offset` seconds after the signal; negative is before it."""
        await asyncio.sleep(self.at + offset - asyncio.get_running_loop().time())

    @property
    def since(self) -> float:
        """Seconds since the signal."""
        return asyncio.get_running_loop().time() - self.at


@dataclass
class Load:
    """What all clients of a run share."""

    address: tuple[str, int]
    images: list[bytes]
    rng: random.Random
    signal: Signal
    end: float
    """seconds after the signal at which clients start no more requests"""
    record: Record = field(default_factory=Record)

    def request(self) -> bytes:
        """A request for a prediction."""
        image = self.rng.choice(self.images)
        head = f"POST /predict HTTP/1.1\r\nhost: x\r\ncontent-type: image/png\r\ncontent-length: {len(image)}\r\n\r\n"
        return head.encode() + image

    async def connect(self, client: str) -> "Connection | None":
        """A new connection, or None if it is refused."""
        raw = socket.socket()
        raw.setblocking(False)
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                await asyncio.get_running_loop().sock_connect(raw, self.address)
        except (ConnectionRefusedError, TimeoutError):
            raw.close()
            self.record.refused += 1
            return None
        return Connection(self, client, raw)


class Connection:
    """An established connection; `exchange` returns whether a further request may be sent on it."""

    def __init__(self, load: Load, client: str, raw: socket.socket) -> None:
        self._load, self._client, self._raw = load, client, raw
        self._connected = load.signal.since
        self._replies = 0
        self._rest = b""

    def close(self) -> None:
        """Close the connection."""
        self._raw.close()

    def is_closed(self) -> bool:
        """Whether the server has closed the connection, or has sent a reply that closes it, without a request."""
        try:
            self._raw.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            pass
        self._load.record.closed_idle += 1
        return True

    async def exchange(self, parts: list[bytes], pauses: float = 0.0, replies: int = 1) -> bool:
        """Send requests in parts, with pauses, and read their replies."""
        load = self._load
        sent = load.signal.since
        try:
            error = await self._send(parts, pauses)
            for _ in range(replies):
                async with asyncio.timeout(REPLY_SECONDS):
                    reply = await self._read(error)
                self._replies += 1
                load.record.replies[self._client, reply.status] += 1
                if reply.closes:
                    return False
        except (LostError, TimeoutError) as lost:
            cause = str(lost) or "timeout"
            load.record.lost.append(Lost(self._client, cause, self._connected, sent, load.signal.since, self._replies))
            return False
        return True

    async def _send(self, parts: list[bytes], pauses: float) -> OSError | None:
        """Send all parts; an error does not end the request, because a reply may have arrived."""
        for index, part in enumerate(parts):
            if index:
                await asyncio.sleep(pauses)
            try:
                await asyncio.get_running_loop().sock_sendall(self._raw, part)
            except OSError as error:
                return error
        return None

    async def _read(self, send_error: OSError | None) -> Reply:
        reader = ReplyReader(b"POST")
        data, self._rest = self._rest, b""
        received = 0
        try:
            reply = reader.feed(data) if data else None
            while reply is None:
                data = await asyncio.get_running_loop().sock_recv(self._raw, _RECEIVE_BYTES)
                received += len(data)
                if not data:
                    after = f"after {received} bytes of the reply" if received else "before the reply"
                    raise LostError(f"{_name(send_error)} while sending" if send_error else f"EOF {after}")
                reply = reader.feed(data)
        except OSError as error:
            raise LostError(f"{_name(send_error or error)} while {'sending' if send_error else 'receiving'}") from error
        except h11.RemoteProtocolError as error:
            raise LostError(f"malformed reply: {error}") from error
        self._rest = reader.rest
        return reply


def _name(error: OSError) -> str:
    return errno.errorcode.get(error.errno or 0, "error")


# One function per kind of client. Each runs until the service refuses connections or the load ends.


async def keep_alive(load: Load) -> None:
    """Sends one request after the other on one connection, and opens a new one when the server closes it."""
    while load.signal.since < load.end and (connection := await load.connect("keep-alive")):
        with closing(connection):
            while load.signal.since < load.end and await connection.exchange([load.request()]):
                await asyncio.sleep(load.rng.uniform(0, 0.02))
                if connection.is_closed():
                    break


async def connection_per_request(load: Load) -> None:
    """Opens a connection for each request."""
    while load.signal.since < load.end and (connection := await load.connect("connection per request")):
        with closing(connection):
            await connection.exchange([load.request()])
        await asyncio.sleep(load.rng.uniform(0, 0.01))


async def slow_upload(load: Load) -> None:
    """Sends each request in parts within 0.2 to 1.5 seconds."""
    while load.signal.since < load.end and (connection := await load.connect("slow upload")):
        with closing(connection):
            request, count = load.request(), load.rng.randint(2, 8)
            size = -(-len(request) // count)
            parts = [request[start : start + size] for start in range(0, len(request), size)]
            await connection.exchange(parts, load.rng.uniform(0.2, 1.5) / count)


async def pipelined_pairs(load: Load) -> None:
    """Sends two requests at once, as one packet or two, and reads both replies."""
    while load.signal.since < load.end and (connection := await load.connect("pipelined pair")):
        with closing(connection):
            again = True
            while again and load.signal.since < load.end:
                requests = [load.request(), load.request()]
                parts = [b"".join(requests)] if load.rng.random() < 0.5 else requests
                again = await connection.exchange(parts, replies=2)
                await asyncio.sleep(load.rng.uniform(0, 0.05))
                again = again and not connection.is_closed()


def idle_then_request(earliest: float, latest: float) -> Callable[[Load], Awaitable[None]]:
    """Sends a request, waits on the open connection, and sends another between these times after the signal."""

    async def run(load: Load) -> None:
        if connection := await load.connect("idle keep-alive"):
            with closing(connection):
                again = await connection.exchange([load.request()])
                await load.signal.wait(load.rng.uniform(earliest, latest))
                if again and not connection.is_closed():
                    await connection.exchange([load.request()])

    return run


def late_request(earliest: float, latest: float, delay: float) -> Callable[[Load], Awaitable[None]]:
    """Connects between these times after the signal, and sends the first request up to `delay` seconds later."""

    async def run(load: Load) -> None:
        await load.signal.wait(load.rng.uniform(earliest, latest))
        if connection := await load.connect("late first request"):
            with closing(connection):
                await asyncio.sleep(load.rng.uniform(0, delay))
                await connection.exchange([load.request()])

    return run
