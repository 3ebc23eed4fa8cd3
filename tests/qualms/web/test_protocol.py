"""Replies leave together, whole, and in order; nothing is held for longer than a pass of the loop."""

import asyncio
import re
from collections.abc import Callable, Coroutine
from typing import Any, cast

import pytest
import uvicorn
from uvicorn.server import ServerState

from qualms.web.protocol import JoiningTransport, QualmsProtocol, WriteQueue


class Wire:
    """A transport that notes what it is told."""

    def __init__(self) -> None:
        self.told: list[bytes | str] = []

    def write(self, data: bytes) -> None:
        self.told.append(data)

    def close(self) -> None:
        self.told.append("close")

    def is_closing(self) -> bool:
        return "close" in self.told

    def get_extra_info(self, _: str, default: Any = None) -> Any:
        return default

    def __getattr__(self, _: str) -> Callable[..., None]:
        return lambda *_, **__: None  # flow control


def play(scene: Callable[[Callable[[Wire], JoiningTransport], set[Any]], Coroutine[Any, Any, None]]) -> None:
    """Run a scene with a maker of transports and the set of requests that are in progress."""

    async def whole() -> None:
        tasks = set[Any]()
        outbox = WriteQueue.of(asyncio.get_running_loop())
        await scene(lambda wire: JoiningTransport(cast(asyncio.Transport, wire), outbox, tasks), tasks)

    asyncio.run(whole())


def test_head_and_body_of_a_lone_reply_are_one_write_at_once() -> None:
    async def scene(make: Callable[[Wire], JoiningTransport], tasks: set[Any]) -> None:
        wire = Wire()
        transport = make(wire)
        tasks.add(1)
        transport.write(b"head")
        transport.write(b"body")
        assert wire.told == [b"headbody"]
        await asyncio.sleep(0)
        assert wire.told == [b"headbody"]

    play(scene)


def test_replies_of_one_pass_leave_together_in_the_next() -> None:
    async def scene(make: Callable[[Wire], JoiningTransport], tasks: set[Any]) -> None:
        wires = [Wire(), Wire()]
        tasks.update(range(2))
        for wire in wires:
            transport = make(wire)
            transport.write(b"head")
            transport.write(b"body")
            transport.write(b"more")
        assert [wire.told for wire in wires] == [[], []]
        await asyncio.sleep(0)
        assert [wire.told for wire in wires] == [[b"headbodymore"]] * 2

    play(scene)


def test_a_head_without_a_body_is_not_held_beyond_the_pass() -> None:
    async def scene(make: Callable[[Wire], JoiningTransport], _: set[Any]) -> None:
        wire = Wire()
        transport = make(wire)
        transport.write(b"head")
        await asyncio.sleep(0)
        assert wire.told == [b"head"]
        transport.write(b"body")
        await asyncio.sleep(0)
        assert wire.told == [b"head", b"body"]

    play(scene)


def test_what_was_written_is_sent_before_the_end() -> None:
    async def scene(make: Callable[[Wire], JoiningTransport], tasks: set[Any]) -> None:
        wire = Wire()
        transport = make(wire)
        tasks.update(range(2))
        transport.write(b"head")
        transport.close()
        assert wire.told == [b"head", "close"]
        assert transport.is_closing()
        await asyncio.sleep(0)
        assert wire.told == [b"head", "close"]

    play(scene)


def test_each_loop_has_an_outbox_of_its_own() -> None:
    async def mine() -> WriteQueue:
        loop = asyncio.get_running_loop()
        assert WriteQueue.of(loop) is WriteQueue.of(loop)
        return WriteQueue.of(loop)

    assert asyncio.run(mine()) is not asyncio.run(mine())


# Offers to change the protocol

OFFER = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
PLAIN = b"GET /after HTTP/1.1\r\n\r\n"


async def tells(scope: Any, receive: Any, send: Any) -> None:
    """An application that replies with what it was asked."""
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    text = f"<{scope['method']} {scope['path']} {body.decode()}>".encode()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(text))]})
    await send({"type": "http.response.body", "body": text})


def talk(*pieces: bytes) -> tuple[list[str], list[str]]:
    """What the application was asked on one connection, and what else was replied."""

    async def whole() -> bytes:
        config = uvicorn.Config(tells, http=QualmsProtocol, ws="none", log_config=None, lifespan="off")
        config.load()
        protocol, wire = QualmsProtocol(config, ServerState(), {}), Wire()
        protocol.connection_made(cast(asyncio.Transport, wire))
        for piece in pieces:
            protocol.data_received(piece)
            for _ in range(20):
                await asyncio.sleep(0)
        return b"".join(told for told in wire.told if isinstance(told, bytes))

    sent = asyncio.run(whole()).decode()
    return re.findall("<(.*?)>", sent), re.findall(r"HTTP/1\.1 (?!200)(\d+)", sent)


SIZED = b"POST /a HTTP/1.1\r\n" + OFFER + b"Content-Length: 5\r\n\r\nhello"
CHUNKED = b"POST /a HTTP/1.1\r\nTransfer-Encoding: chunked\r\n" + OFFER + b"\r\n2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n"


@pytest.mark.parametrize("request_", [SIZED, CHUNKED], ids=["sized", "chunked"])
@pytest.mark.parametrize("step", [1, 7, 150, 1000])
def test_a_body_that_comes_with_an_offer_of_another_protocol_is_read(request_: bytes, step: int) -> None:
    """However it is cut, and what follows it on the connection is read, too, with and without such an offer."""
    everything = request_ + PLAIN + request_ + PLAIN
    pieces = [everything[start : start + step] for start in range(0, len(everything), step)]
    assert talk(*pieces) == (["POST /a hello", "GET /after ", "POST /a hello", "GET /after "], [])


def test_an_offer_without_a_body_is_answered_at_once() -> None:
    asked = b"GET /ws HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
    assert talk(asked, PLAIN) == (["GET /ws ", "GET /after "], [])


def test_thousands_of_offers_at_once_are_answered_one_by_one() -> None:
    asked, refused = talk(2000 * (b"GET /a HTTP/1.1\r\n" + OFFER + b"\r\n"), *(10_000 * [b""]))
    assert (len(asked), refused) == (2000, [])


def test_a_length_that_is_said_twice_is_refused_with_an_offer_as_without() -> None:
    both = b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n"
    for offer in (b"", OFFER):
        asked, refused = talk(b"POST /a HTTP/1.1\r\n" + offer + both + b"\r\n0\r\n\r\n" + PLAIN)
        assert (asked, refused) == ([], ["400"])
