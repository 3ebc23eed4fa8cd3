"""ASGI applications behind a connection: messages, framing of replies, back-pressure, errors and disconnects."""

import asyncio
import gc
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import h11
import pytest
from tests.qualms.http1.wire import Server, Wire, get, is_open, post, scene

Handler = Callable[[Any, Any, Any], Awaitable[None]]


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Answers with the request."""
    message = await receive()
    text = f"<{scope['method']} {scope['path']} {message['body'].decode()}>".encode()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(text))]})
    await send({"type": "http.response.body", "body": text})


def begin(*headers: tuple[bytes, bytes], status: int = 200) -> dict[str, Any]:
    return {"type": "http.response.start", "status": status, "headers": list(headers)}


def part(body: bytes, *, more: bool = False) -> dict[str, Any]:
    return {"type": "http.response.body", "body": body, "more_body": more}


def replying(*messages: dict[str, Any]) -> Handler:
    """An application that sends these messages."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        for message in messages:
            await send(message)

    return app


async def exchange(app: Handler, *pieces: bytes) -> tuple[Server, Wire]:
    """Send pieces on one connection and let the application answer."""
    server = Server(app)
    wire = server.connect()
    for piece in pieces:
        wire.send(piece)
        await server.settle()
    return server, wire


def read_reply(data: bytes, method: bytes = b"GET") -> tuple[h11.Response, bytes, bool]:
    """The only reply in `data` as h11 reads it: head, body, and whether the connection stays open."""
    client = h11.Connection(h11.CLIENT)
    client.send(h11.Request(method=method, target="/", headers=[("host", "x")]))
    client.send(h11.EndOfMessage())
    client.receive_data(data)
    head, body = client.next_event(), b""
    assert isinstance(head, h11.Response)
    while isinstance(event := client.next_event(), h11.Data):
        body += bytes(event.data)
    if event is h11.NEED_DATA:
        client.receive_data(b"")
        event = client.next_event()
    assert isinstance(event, h11.EndOfMessage)
    assert not client.trailing_data[0]
    return head, body, client.states[h11.SERVER] is h11.DONE


# Requests


@scene
async def test_the_scope_has_all_parts_of_the_request() -> None:
    scopes: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        scopes.append(scope)

    await exchange(app, get("/a%20b/%C3%A9?c=%20d", "X-Upper: Value"))
    (scope,) = scopes
    assert (scope["type"], scope["http_version"], scope["method"]) == ("http", "1.1", "GET")
    assert (scope["path"], scope["raw_path"], scope["query_string"]) == ("/a b/é", b"/a%20b/%C3%A9", b"c=%20d")
    assert scope["headers"] == [(b"host", b"x"), (b"x-upper", b"Value")]
    assert (scope["scheme"], scope["root_path"], scope["state"]) == ("http", "", {"caller": None})


OFFER = ["Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABk"]
SIZED = post(b"hello", *OFFER)
CHUNKED = get("/a", "Transfer-Encoding: chunked", *OFFER, method="POST") + b"2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n"


@pytest.mark.parametrize("request_", [SIZED, CHUNKED], ids=["sized", "chunked"])
@pytest.mark.parametrize("step", [1, 7, 150, 1000])
@scene
async def test_the_body_of_a_request_that_offers_an_upgrade_is_read(request_: bytes, step: int) -> None:
    """In pieces of any size, and so are the requests after it, with and without an offer."""
    stream = 2 * (request_ + get("/after"))
    _, wire = await exchange(echo, *(stream[begin : begin + step] for begin in range(0, len(stream), step)))
    assert wire.bodies == 2 * [b"POST /a hello", b"GET /after "]
    assert is_open(wire)


@scene
async def test_an_upgrade_offer_without_a_body_is_answered() -> None:
    _, wire = await exchange(echo, get("/ws", "Connection: Upgrade", "Upgrade: websocket"), get("/after"))
    assert wire.bodies == [b"GET /ws ", b"GET /after "]


@scene
async def test_thousands_of_upgrade_offers_in_one_piece_are_answered_without_recursion() -> None:
    server, wire = await exchange(echo, 2000 * get("/a", *OFFER))
    while len(wire.bodies) < 2000 and wire.statuses:
        await server.settle(1000)
    assert wire.bodies == 2000 * [b"GET /a "]
    assert (server.connections.in_progress, server.connections.tasks) == (0, set())


@pytest.mark.parametrize("offer", [[], OFFER])
@scene
async def test_two_body_lengths_are_400_with_and_without_an_upgrade_offer(offer: list[str]) -> None:
    both = ["Content-Length: 5", "Transfer-Encoding: chunked"]
    _, wire = await exchange(echo, get("/a", *offer, *both, method="POST") + b"0\r\n\r\n" + get("/b"))
    assert (wire.statuses, wire.bodies) == ([400], [b"malformed"])


@scene
async def test_a_body_is_not_read_before_the_application_asks_for_it() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(0)
        await echo(scope, receive, send)

    server = Server(app)
    wire = server.connect()
    wire.send(post(b"", "Expect: 100-continue", length=5))
    assert wire.sent == b""
    await server.settle()
    assert wire.sent == b"HTTP/1.1 100 Continue\r\n\r\n"
    wire.send(b"hello")
    await server.settle()
    assert wire.bodies == [b"POST /a hello"]


@scene
async def test_a_body_above_the_limit_is_413_and_a_disconnect_for_the_application() -> None:
    messages: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        messages.append(await receive())
        await send(begin())
        await send(part(b"<too late>"))

    server = Server(app, body_bytes=4)
    wire = server.connect()
    wire.send(post(b"hello"))
    await server.settle()
    assert messages == [{"type": "http.disconnect"}]
    assert (wire.statuses, wire.bodies, wire.eof) == ([413], [b"body_too_large"], True)
    assert (server.connections.in_progress, server.connections.tasks) == (0, set())


@scene
async def test_a_body_that_does_not_arrive_in_time_is_408() -> None:
    server = Server(echo, body_seconds=5.0)
    wire = server.connect()
    wire.send(post(b"he", length=5))
    await server.settle()
    await server.advance(5.2)
    assert (wire.statuses, wire.eof) == ([408], True)
    assert (server.connections.in_progress, server.connections.tasks) == (0, set())


@scene
async def test_memory_is_not_counted_twice_for_a_body_that_arrived_with_its_head() -> None:
    server = Server(echo, memory=300_000)
    wire = server.connect()
    wire.send(post(300_000 * b"x"))
    await server.settle()
    assert wire.statuses == [200]
    assert server.connections.memory.used == 0


# Framing of replies


@scene
async def test_a_reply_with_a_length_is_one_write_and_keeps_the_connection() -> None:
    _, wire = await exchange(replying(begin((b"content-length", b"5")), part(b"hello")), get())
    assert wire.writes == [b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello"]
    assert is_open(wire)


@scene
async def test_a_reply_without_a_length_is_chunked() -> None:
    messages = [begin(), part(b"he", more=True), part(b"", more=True), part(b"llo")]
    _, wire = await exchange(replying(*messages), get())
    head, body, kept = read_reply(wire.sent)
    assert (dict(head.headers)[b"transfer-encoding"], body, kept) == (b"chunked", b"hello", True)
    assert is_open(wire)


@scene
async def test_a_reply_without_a_length_ends_with_the_connection_in_http_1_0() -> None:
    app = replying(begin(), part(b"he", more=True), part(b"llo"))
    _, wire = await exchange(app, get("/", "Connection: keep-alive", version="1.0"))
    assert wire.sent == b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\nhello"
    assert wire.eof


@scene
async def test_http_1_0_with_keep_alive_keeps_the_connection_if_the_length_is_known() -> None:
    app = replying(begin((b"content-length", b"5")), part(b"hello"))
    _, wire = await exchange(app, get("/", "Connection: keep-alive", version="1.0"))
    assert b"connection: keep-alive\r\n" in wire.sent
    assert is_open(wire)


@pytest.mark.parametrize(("method", "status"), [("HEAD", 200), ("GET", 204), ("GET", 304)])
@pytest.mark.parametrize("headers", [[], [(b"content-length", b"5")]])
@scene
async def test_replies_that_have_no_body_send_none(
    method: str, status: int, headers: list[tuple[bytes, bytes]]
) -> None:
    app = replying(begin(*headers, status=status), part(b"he", more=True), part(b"llo"))
    _, wire = await exchange(app, get(method=method))
    assert wire.sent.endswith(b"\r\n\r\n")
    assert b"transfer-encoding" not in wire.sent
    assert read_reply(wire.sent, method.encode())[1:] == (b"", True)
    assert is_open(wire)


@scene
async def test_the_application_may_close_the_connection() -> None:
    app = replying(begin((b"Connection", b"Close"), (b"content-length", b"0")), part(b""))
    _, wire = await exchange(app, get())
    assert wire.sent.lower().count(b"connection: close") == 1
    assert wire.eof


@scene
async def test_a_transfer_encoding_of_the_application_is_not_sent_twice() -> None:
    app = replying(begin((b"Transfer-Encoding", b"chunked")), part(b"hello"))
    _, wire = await exchange(app, get())
    assert wire.sent.lower().count(b"transfer-encoding") == 1
    assert read_reply(wire.sent)[1] == b"hello"


@scene
async def test_an_unusual_status_is_sent() -> None:
    _, wire = await exchange(replying(begin((b"content-length", b"0"), status=299), part(b"")), get())
    assert wire.statuses == [299]


# Errors of the application


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.ERROR, "qualms.http1")
    return caplog


FIVE = (b"content-length", b"5")
BEFORE = {
    "no reply": [],
    "body first": [part(b"hello")],
    "only a start": [begin(FIVE)],
    "two starts": [begin(FIVE), begin(FIVE)],
    "too short": [begin(FIVE), part(b"hell")],
    "too long": [begin(FIVE), part(b"hello!")],
    "line end in a header": [begin((b"x-a", b"b\r\nx-c: d")), part(b"")],
    "name with a space": [begin((b"x a", b"b")), part(b"")],
}
AFTER = {
    "no end": [begin(FIVE), part(b"hello", more=True)],
    "too short": [begin(FIVE), part(b"he", more=True), part(b"ll")],
    "too long": [begin(FIVE), part(b"he", more=True), part(b"llo!")],
    "a second start": [begin(FIVE), part(b"he", more=True), begin(FIVE)],
}


@pytest.mark.parametrize("messages", BEFORE.values(), ids=BEFORE)
@scene
async def test_an_error_before_anything_was_sent_is_500(
    messages: list[dict[str, Any]], log: pytest.LogCaptureFixture
) -> None:
    server, wire = await exchange(replying(*messages), get() + get())
    assert (wire.statuses, wire.eof) == ([500], True)
    assert read_reply(wire.sent)[1:] == (b"", False)
    assert len(log.records) == 1
    assert (server.connections.in_progress, server.connections.tasks) == (0, set())


@pytest.mark.parametrize("messages", AFTER.values(), ids=AFTER)
@scene
async def test_an_error_after_a_part_of_the_reply_resets_the_connection(
    messages: list[dict[str, Any]], log: pytest.LogCaptureFixture
) -> None:
    server, wire = await exchange(replying(*messages), get() + get())
    assert (wire.statuses, wire.aborted) == ([200], True)
    assert len(log.records) == 1
    assert (server.connections.in_progress, server.connections.tasks) == (0, set())


@scene
async def test_an_exception_is_logged_and_not_sent(log: pytest.LogCaptureFixture) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise ValueError("internal")

    server, wire = await exchange(app, get())
    assert wire.statuses == [500]
    assert b"internal" not in wire.sent
    assert "ValueError: internal" in log.text
    assert server.connections.in_progress == 0


@pytest.mark.parametrize("steps", [0, 3])
@scene
async def test_a_cancelled_request_ends_with_500(steps: int) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.Event().wait()

    server = Server(app)
    wire = server.connect()
    wire.send(get())
    await server.settle(steps)
    server.connections.cancel()
    await server.settle()
    assert (wire.statuses, wire.eof) == ([500], True)
    assert (server.connections.in_progress, server.connections.tasks) == (0, set())


@scene
async def test_messages_after_the_end_of_the_reply_are_ignored() -> None:
    messages = [begin(FIVE), part(b"hello"), part(b"more"), begin(FIVE), part(b"again")]
    _, wire = await exchange(replying(*messages), get())
    assert wire.sent.endswith(b"\r\n\r\nhello")
    assert is_open(wire)


# Order of reading and replying


@scene
async def test_a_body_may_be_read_after_the_reply_has_begun() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(begin())
        message = await receive()
        await send(part(b"<" + message.get("body", b"none") + b">"))

    server, wire = await exchange(app, post(get("/inner")) + get("/next"))
    await server.settle()
    assert wire.bodies == [get("/inner"), b""]


@scene
async def test_a_receive_after_the_reply_takes_nothing_from_the_next_request() -> None:
    received: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await replying(begin(FIVE), part(b"hello"))(scope, receive, send)
        received.append(await receive())

    server, wire = await exchange(app, post(b"12345"), post(b"67890", path="/next"))
    assert received == 2 * [{"type": "http.disconnect"}]
    assert wire.statuses == [200, 200]
    assert server.connections.in_progress == 0


# Back-pressure and disconnects


@scene
async def test_a_streaming_reply_waits_while_the_client_does_not_read() -> None:
    sent: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(begin())
        for number in range(100):
            await send(part(bytes(1000), more=True))
            sent.append(number)
        await send(part(b""))

    server = Server(app)
    wire = server.connect()
    wire.stop_reading()
    wire.send(get())
    await server.settle(300)
    assert len(sent) <= 2
    assert server.connections.busy == 1
    wire.read_all()
    await server.settle(300)
    assert len(sent) == 100
    assert len(read_reply(wire.sent)[1]) == 100_000
    assert server.connections.busy == 0


@scene
async def test_a_streaming_reply_ends_if_the_client_disconnects_or_reads_too_slowly() -> None:
    ended: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(begin())
        for _ in range(1000):
            await send(part(bytes(1000), more=True))
            ended.append(scope["path"])

    server = Server(app, send_seconds=20.0)
    wires = [server.connect(), server.connect()]
    for wire in wires:
        wire.stop_reading()
        wire.send(get())
    await server.settle()
    assert len(ended) <= 4
    wires[0].disconnect()
    await server.advance(21.0)
    assert wires[1].aborted
    assert server.closes == ["send_timeout"]
    await server.settle(3000)
    assert (server.connections.in_progress, server.connections.tasks) == (0, set())


@scene
async def test_receive_reports_a_disconnect_while_the_application_waits() -> None:
    received: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        received.append(await receive())
        received.append(await receive())

    server = Server(app)
    wire = server.connect()
    wire.send(post(b"hello"))
    await server.settle()
    assert [message["type"] for message in received] == ["http.request"]
    wire.disconnect()
    await server.settle()
    assert received[1:] == [{"type": "http.disconnect"}]
    assert server.connections.in_progress == 0


@pytest.mark.parametrize("request_", [get(), post(b"hello"), post(b"he", length=5)])
@scene
async def test_receive_after_a_disconnect_does_not_wait(request_: bytes) -> None:
    received: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        received.append(await receive())
        await echo({**scope}, receive, send) if received[0]["type"] == "http.request" else None

    server = Server(app)
    wire = server.connect()
    wire.send(request_)
    wire.disconnect()
    await server.settle()
    assert len(received) == 1
    assert (server.connections.in_progress, server.connections.tasks) == (0, set())


@scene
async def test_a_disconnect_during_an_upload_also_wakes_a_waiting_reply() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(begin())
        async with asyncio.TaskGroup() as group:
            group.create_task(receive())
            group.create_task(send(part(bytes(1000), more=True)))

    server = Server(app)
    wire = server.connect()
    wire.stop_reading()
    wire.send(post(b"he", length=5))
    await server.settle()
    wire.disconnect()
    await server.settle()
    assert (server.connections.in_progress, server.connections.tasks) == (0, set())


@pytest.mark.parametrize("end", ["reply", "disconnect", "upload", "error"])
@scene
async def test_requests_leave_no_reference_cycles(end: str) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        if end == "disconnect":
            await receive()
        elif end != "error":
            await replying(begin(FIVE), part(b"hello"))(scope, receive, send)

    server = Server(app)

    async def one() -> None:
        wire = server.connect()
        wire.send(post(b"he", length=5) if end == "upload" else post(b"hello"))
        await server.settle()
        wire.disconnect()
        await server.settle()
        assert (server.connections.in_progress, server.connections.tasks) == (0, set())

    await one()
    gc.collect()
    gc.disable()
    try:
        for _ in range(20):
            await one()
        assert gc.collect() < 20
    finally:
        gc.enable()
