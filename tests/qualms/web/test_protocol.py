"""Joined writes, requests that offer to change the protocol, and the check of uvicorn's internals."""

import asyncio
import re
from collections.abc import Callable, Coroutine
from typing import Any, cast

import pytest
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from qualms.errors import QualmsError
from qualms.web.protocol import JoiningTransport, QualmsProtocol, WriteQueue, check_uvicorn, client_disconnected


class Wire:
    """A transport that records its calls."""

    def __init__(self) -> None:
        self.calls: list[bytes | str] = []

    def write(self, data: bytes) -> None:
        self.calls.append(data)

    def close(self) -> None:
        self.calls.append("close")

    def is_closing(self) -> bool:
        return "close" in self.calls

    def get_extra_info(self, _: str, default: Any = None) -> Any:
        return default

    def __getattr__(self, _: str) -> Callable[..., None]:
        return lambda *_, **__: None  # flow control


# Joined writes


def play(scene: Callable[[Callable[[Wire], JoiningTransport], set[Any]], Coroutine[Any, Any, None]]) -> None:
    """Run a scene with a function that wraps a transport, and with the set of requests in progress."""

    async def whole() -> None:
        tasks = set[Any]()
        queue = WriteQueue.of(asyncio.get_running_loop())
        await scene(lambda wire: JoiningTransport(cast(asyncio.Transport, wire), queue, tasks), tasks)

    asyncio.run(whole())


def test_head_and_body_of_a_lone_reply_are_one_immediate_write() -> None:
    async def scene(wrap: Callable[[Wire], JoiningTransport], tasks: set[Any]) -> None:
        wire = Wire()
        transport = wrap(wire)
        tasks.add(1)
        transport.write(b"head")
        transport.write(b"body")
        assert wire.calls == [b"headbody"]
        await asyncio.sleep(0)
        assert wire.calls == [b"headbody"]

    play(scene)


def test_replies_of_one_loop_iteration_are_sent_together_in_the_next() -> None:
    async def scene(wrap: Callable[[Wire], JoiningTransport], tasks: set[Any]) -> None:
        wires = [Wire(), Wire()]
        tasks.update(range(2))
        for wire in wires:
            transport = wrap(wire)
            transport.write(b"head")
            transport.write(b"body")
            transport.write(b"more")
        assert [wire.calls for wire in wires] == [[], []]
        await asyncio.sleep(0)
        assert [wire.calls for wire in wires] == [[b"headbodymore"]] * 2

    play(scene)


def test_a_head_without_a_body_is_sent_in_the_next_loop_iteration() -> None:
    async def scene(wrap: Callable[[Wire], JoiningTransport], _: set[Any]) -> None:
        wire = Wire()
        transport = wrap(wire)
        transport.write(b"head")
        await asyncio.sleep(0)
        assert wire.calls == [b"head"]
        transport.write(b"body")
        await asyncio.sleep(0)
        assert wire.calls == [b"head", b"body"]

    play(scene)


def test_delayed_writes_are_sent_before_the_connection_closes() -> None:
    async def scene(wrap: Callable[[Wire], JoiningTransport], tasks: set[Any]) -> None:
        wire = Wire()
        transport = wrap(wire)
        tasks.update(range(2))
        transport.write(b"head")
        transport.close()
        assert wire.calls == [b"head", "close"]
        assert transport.is_closing()
        await asyncio.sleep(0)
        assert wire.calls == [b"head", "close"]

    play(scene)


def test_each_event_loop_has_its_own_write_queue() -> None:
    async def queue() -> WriteQueue:
        loop = asyncio.get_running_loop()
        assert WriteQueue.of(loop) is WriteQueue.of(loop)
        return WriteQueue.of(loop)

    assert asyncio.run(queue()) is not asyncio.run(queue())


# Offers to change the protocol

OFFER = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
NEXT = b"GET /after HTTP/1.1\r\n\r\n"


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """An application whose reply contains the request."""
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    text = f"<{scope['method']} {scope['path']} {body.decode()}>".encode()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(text))]})
    await send({"type": "http.response.body", "body": text})


def exchange(*pieces: bytes) -> tuple[list[str], list[str]]:
    """Send pieces on one connection; the requests that the application received, and the statuses of other replies."""

    async def whole() -> bytes:
        config = uvicorn.Config(echo, http=QualmsProtocol, ws="none", log_config=None, lifespan="off")
        config.load()
        protocol, wire = QualmsProtocol(config, ServerState(), {}), Wire()
        protocol.connection_made(cast(asyncio.Transport, wire))
        for piece in pieces:
            protocol.data_received(piece)
            for _ in range(20):
                await asyncio.sleep(0)
        return b"".join(call for call in wire.calls if isinstance(call, bytes))

    sent = asyncio.run(whole()).decode()
    return re.findall("<(.*?)>", sent), re.findall(r"HTTP/1\.1 (?!200)(\d+)", sent)


SIZED = b"POST /a HTTP/1.1\r\n" + OFFER + b"Content-Length: 5\r\n\r\nhello"
CHUNKED = b"POST /a HTTP/1.1\r\nTransfer-Encoding: chunked\r\n" + OFFER + b"\r\n2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n"


@pytest.mark.parametrize("request_", [SIZED, CHUNKED], ids=["sized", "chunked"])
@pytest.mark.parametrize("step", [1, 7, 150, 1000])
def test_the_body_of_a_request_that_offers_an_upgrade_is_read(request_: bytes, step: int) -> None:
    """In pieces of any size, and so are the requests after it, with and without an offer."""
    stream = request_ + NEXT + request_ + NEXT
    pieces = [stream[start : start + step] for start in range(0, len(stream), step)]
    assert exchange(*pieces) == (["POST /a hello", "GET /after ", "POST /a hello", "GET /after "], [])


def test_an_upgrade_offer_without_a_body_is_answered() -> None:
    request = b"GET /ws HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
    assert exchange(request, NEXT) == (["GET /ws ", "GET /after "], [])


@pytest.mark.slow
def test_thousands_of_upgrade_offers_in_one_piece_are_answered_without_recursion() -> None:
    requests, other = exchange(2000 * (b"GET /a HTTP/1.1\r\n" + OFFER + b"\r\n"), *(10_000 * [b""]))
    assert (len(requests), other) == (2000, [])


def test_two_body_lengths_are_400_with_and_without_an_upgrade_offer() -> None:
    both = b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n"
    for offer in (b"", OFFER):
        requests, other = exchange(b"POST /a HTTP/1.1\r\n" + offer + both + b"\r\n0\r\n\r\n" + NEXT)
        assert (requests, other) == ([], ["400"])


# uvicorn's internals


def test_the_installed_uvicorn_is_supported() -> None:
    check_uvicorn()


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (HttpToolsProtocol, "_start_asgi_task"),
        (HttpToolsProtocol, "on_message_complete"),
        (RequestResponseCycle, "receive"),
        (uvicorn.Server, "on_tick"),
        (uvicorn.Server, "shutdown"),
    ],
)
def test_a_uvicorn_without_a_needed_method_is_an_error_that_names_it(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str
) -> None:
    monkeypatch.delattr(owner, name)
    with pytest.raises(QualmsError, match=rf"^uvicorn {uvicorn.__version__} has no {owner.__name__}\.{name}; install"):
        check_uvicorn()


def test_uvicorns_cycle_reports_a_disconnect() -> None:
    cycle = RequestResponseCycle.__new__(RequestResponseCycle)
    cycle.disconnected = False
    disconnected = client_disconnected(cycle.receive)
    assert not disconnected()
    cycle.disconnected = True
    assert disconnected()
