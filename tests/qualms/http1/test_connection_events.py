"""Random sequences of events on a few connections: counters and memory return to zero, and nothing is left behind."""

import asyncio
import gc
import logging
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.qualms.http1.wire import Application, Server, Wire, chunked, get, play, post, reply, scene

from qualms.http1.exchange import Exchange

MEMORY = 100_000
PIECES = st.sampled_from(
    [
        get(),
        get("/b", "Connection: close"),
        get("/c", version="1.0"),
        post(b"hello"),
        post(bytes(70_000)),
        post(bytes(300), length=100_000),
        post(b"", "Expect: 100-continue", length=5),
        b"hello",
        chunked(b"hello"),
        chunked(*(600 * [b"x"])),
        b"5\r\nhello\r\n0\r\n\r\n",
        b"0\r\n\r\n",
        b"\r\n",
        b"GET / HT",
        b"TP/1.1\r\nHost: x\r\n\r\n",
        b"nonsense\r\n\r\n",
        bytes(80_000),
    ]
)
EVENTS = st.one_of(
    st.tuples(st.just("send"), PIECES),
    st.tuples(st.just("send"), PIECES),
    st.tuples(st.sampled_from(["reply", "reply", "read", "again", "release"]), st.integers(0, 3)),
    st.tuples(st.sampled_from(["connect", "disconnect", "stop reading", "read all", "settle", "close"]), st.none()),
    st.tuples(st.just("advance"), st.sampled_from([0.1, 1.0, 6.0, 100.0])),
)


class Events:
    """A server, its clients and its application; each method is an event."""

    def __init__(self) -> None:
        self.app = Application()
        self.server = Server(self.app, memory=MEMORY, connections=3)
        self.wires = [self.server.connect()]
        self._read: set[Exchange] = set()
        self._answered: list[Exchange] = []

    async def happen(self, event: str, number: int, value: Any, most: int = 0) -> None:
        """`most`: requests that may be in progress and are not in `app.waiting`."""
        wire = self.wires[number % len(self.wires)]
        if event == "settle":
            await self.server.settle()
        elif event == "advance":
            await self.server.advance(value)
        elif event in ("reply", "read", "release"):
            if self.app.waiting:
                getattr(self, event)(self.app.waiting[value % len(self.app.waiting)])
        else:
            getattr(self, event.replace(" ", "_"))(wire, value)
        connections = self.server.connections
        assert 0 <= connections.in_progress <= len(self.app.waiting) + most
        assert 0 <= connections.memory.used <= MEMORY

    def connect(self, _wire: Wire, _: None) -> None:
        if len(self.wires) < 6:
            self.wires.append(self.server.connect())

    def send(self, wire: Wire, data: bytes) -> None:
        if not wire.closed:
            wire.send(data)

    def disconnect(self, wire: Wire, _: None) -> None:
        if not wire.lost:
            wire.disconnect()

    def stop_reading(self, wire: Wire, _: None) -> None:
        wire.stop_reading()

    def read_all(self, wire: Wire, _: None) -> None:
        wire.read_all()

    def close(self, wire: Wire, _: None) -> None:
        if not wire.lost:
            wire.protocol.shutdown()

    def again(self, _wire: Wire, _: int) -> None:
        if self._answered:
            self._answered[-1].reply(reply("again"))

    def read(self, exchange: Exchange) -> None:
        if exchange not in self._read:
            self._read.add(exchange)
            self.app.read(exchange, max_bytes=90_000)

    def release(self, exchange: Exchange) -> None:
        exchange.release_body()

    def reply(self, exchange: Exchange) -> None:
        self.app.waiting.remove(exchange)
        self._answered.append(exchange)
        exchange.reply(None if exchange.disconnected else reply("done"))

    async def end(self) -> None:
        """All clients disconnect, and all requests end."""
        for wire in self.wires:
            wire.read_all()
            self.disconnect(wire, None)
        while self.app.waiting:
            self.reply(self.app.waiting[0])
            await self.server.settle()


@settings(max_examples=400, deadline=None)
@given(events=st.lists(st.tuples(st.integers(0, 2), EVENTS), min_size=10, max_size=40), draining=st.booleans())
def test_counters_and_memory_return_to_zero_whatever_happens(
    events: list[tuple[int, tuple[str, Any]]], draining: bool
) -> None:
    async def whole() -> None:
        happening = Events()
        connections = happening.server.connections
        connections.draining = draining
        for number, (event, value) in events:
            await happening.happen(event, number, value)
        await happening.end()
        assert (connections.in_progress, connections.memory.used, connections.active) == (0, 0, set())
        assert not any(b"again" in wire.sent for wire in happening.wires)

    play(whole)


@pytest.mark.parametrize("end", ["reply", "close", "disconnect", "upload", "refused", "timeout"])
@scene
async def test_connections_leave_no_reference_cycles(end: str) -> None:
    app = Application()
    server = Server(app)

    async def one() -> None:
        wire = server.connect()
        if end == "refused":
            wire.send(b"nonsense\r\n\r\n")
        elif end == "timeout":
            await server.advance(11.0)
        elif end == "upload":
            wire.send(post(b"he", length=5))
            app.read(app.waiting[0])
        else:
            wire.send(post(b"hello", *(["Connection: close"] if end == "close" else [])))
            app.read(app.waiting[0])
            app.waiting[0].on_cancel = app.waiting[0].release_body  # refers to the exchange
        if end in ("reply", "close"):
            app.answer()
        wire.disconnect()
        if app.waiting:
            app.waiting.pop().reply(None)
        app.bodies.clear()
        app.failures.clear()
        server.refusals.clear()
        await server.settle()

    await one()
    gc.collect()
    gc.disable()
    try:
        for _ in range(20):
            await one()
        assert gc.collect() < 20
    finally:
        gc.enable()


# The same through ASGI

ACTIONS = st.lists(
    st.sampled_from(["receive", "receive", "start", "part", "part", "last", "fail", "wait", "sleep", "sized"]),
    max_size=6,
)


async def act(actions: list[str], receive: Any, send: Any) -> None:
    """An application that may do everything in any order."""
    for action in actions:
        if action == "receive":
            await receive()
        elif action == "fail":
            raise ValueError("as expected")
        elif action == "wait":
            await asyncio.Event().wait()
        elif action == "sleep":
            await asyncio.sleep(0.5)
        elif action in ("start", "sized"):
            headers = [(b"content-length", b"6")] if action == "sized" else []
            await send({"type": "http.response.start", "status": 200, "headers": headers})
        else:
            await send({"type": "http.response.body", "body": b"<done>", "more_body": action == "part"})


ASGI_EVENTS = st.one_of(
    st.tuples(st.just("send"), PIECES),
    st.tuples(st.just("send"), PIECES),
    st.tuples(st.sampled_from(["connect", "disconnect", "stop reading", "read all", "settle", "settle"]), st.none()),
    st.tuples(st.just("advance"), st.sampled_from([0.1, 1.0, 6.0, 100.0])),
)


@settings(max_examples=300, deadline=None)
@given(
    events=st.lists(st.tuples(st.integers(0, 2), ASGI_EVENTS), min_size=5, max_size=30),
    actions=st.lists(ACTIONS, min_size=1, max_size=4),
)
def test_counters_tasks_and_memory_return_to_zero_whatever_an_asgi_application_does(
    events: list[tuple[int, tuple[str, Any]]], actions: list[list[str]]
) -> None:
    started = 0

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal started
        started += 1
        await act(actions[started % len(actions)], receive, send)

    async def whole() -> None:
        happening = Events()
        connections = happening.server.connections
        connections.app, connections.direct = app, None
        for number, (event, value) in events:
            await happening.happen(event, number, value, most=started + 100)
            assert connections.in_progress <= len(connections.tasks) + len(connections.active)
        connections.cancel()
        await happening.server.settle()
        await happening.end()
        await happening.server.settle()
        assert (connections.in_progress, connections.memory.used) == (0, 0)
        assert (connections.active, connections.tasks) == (set(), set())

    logging.getLogger("qualms.http1").disabled = True  # the application fails on purpose
    try:
        play(whole)
    finally:
        logging.getLogger("qualms.http1").disabled = False
