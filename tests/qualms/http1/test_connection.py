"""One connection, without sockets: requests, pipelines, heads, keep-alive and disconnects."""

import pytest
from tests.qualms.http1.wire import Application, Server, get, is_open, post, reply, scene, start

from qualms.http1.connection import LINGER_SECONDS
from qualms.http1.exchange import Exchange
from qualms.http1.head import MAX_HEADERS

# Requests and replies


@scene
async def test_a_request_is_answered_and_the_connection_stays_open() -> None:
    app, server, wire = start()
    wire.send(get("/path?query"))
    assert app.paths == ["/path"]
    assert server.connections.in_progress == 1
    app.answer("hello")
    assert wire.writes == [b"HTTP/1.1 200 OK\r\ncontent-length: 7\r\n\r\n<hello>"]
    assert server.connections.in_progress == 0
    assert is_open(wire)
    wire.send(get("/next"))
    assert app.paths == ["/next"]


@scene
async def test_a_head_in_pieces_of_one_byte_is_parsed_when_it_is_complete() -> None:
    app, _, wire = start()
    request = get("/slow", "X-A: b")
    for position, byte in enumerate(request):
        assert app.paths == [], position
        wire.send(bytes([byte]))
    assert app.paths == ["/slow"]


@scene
async def test_the_default_headers_are_in_replies_and_refusals() -> None:
    app, server, wire = start()
    server.connections.default_headers = b"date: today\r\n"
    wire.send(get())
    app.answer()
    wire.send(b"?\r\n\r\n")
    assert wire.sent.count(b"\r\ndate: today\r\n") == 2


@scene
async def test_empty_lines_before_a_request_are_skipped_in_any_pieces() -> None:
    for pieces in ([b"\r\n\r\n"], [b"\r\n", b"\r\n"], [b"\r", b"\n\r", b"\n"]):
        app, _, wire = start()
        wire.send(*pieces, get())
        assert app.paths == ["/a"]


@pytest.mark.parametrize("first", [b"\n", b"\r", b"\r\n\n", b"\r\n\r", b"\r\n \r\n", b"\r\n\r\n\n"])
@scene
async def test_bare_line_ends_before_a_request_are_400(first: bytes) -> None:
    app, server, wire = start()
    wire.send(first + get())
    assert (app.paths, server.reasons, wire.statuses) == ([], ["malformed"], [400])


@scene
async def test_endless_empty_lines_do_not_extend_the_time_for_a_head() -> None:
    _, server, wire = start(head_seconds=3.0)
    for _ in range(40):
        if is_open(wire):
            wire.send(b"\r\n")
        await server.advance(0.1)
    assert not is_open(wire)


# Pipelines


@scene
async def test_pipelined_requests_are_started_one_at_a_time_in_order() -> None:
    app, server, wire = start()
    wire.send(b"".join(get(f"/{number}") for number in range(5)))
    for number in range(5):
        assert app.paths == [f"/{number}"]
        assert server.connections.in_progress == 1
        app.answer()
        assert app.paths == [], "at most one request per iteration of the loop"
        await server.settle()
    assert wire.bodies == [b"/%d" % number for number in range(5)]
    assert server.connections.in_progress == 0


@scene
async def test_reading_stops_while_pipelined_requests_wait_and_goes_on_afterwards() -> None:
    app, server, wire = start()
    wire.send(get("/0"), get("/1"), get("/2"))
    assert (wire.reading, wire.unread) == (False, 1)
    app.answer()
    await server.settle()
    assert (app.paths, wire.unread) == (["/1"], 0)
    app.answer()
    await server.settle()
    app.answer()
    await server.settle()
    assert wire.reading
    assert wire.bodies == [b"/0", b"/1", b"/2"]


@scene
async def test_an_invalid_pipelined_request_is_refused_after_the_replies_before_it() -> None:
    app, server, wire = start()
    wire.send(get("/0") + b"no request\r\n\r\n" + get("/2"))
    assert server.refusals == []
    app.answer()
    await server.settle()
    assert wire.statuses == [200, 400]
    assert wire.eof
    assert app.paths == []


@scene
async def test_a_disconnect_is_noticed_while_the_last_of_several_requests_is_in_progress() -> None:
    """A transport that does not read reports no disconnect."""
    app, server, wire = start()
    wire.send(get("/0") + get("/1"))
    app.answer()
    await server.settle()
    assert app.paths == ["/1"]
    assert wire.reading


class Immediate(Application):
    """Answers each request when it starts."""

    count = 0

    def direct(self, exchange: Exchange) -> bool:
        self.count += 1
        exchange.reply(reply(exchange.head.path))
        return True


@scene
async def test_thousands_of_pipelined_requests_are_answered_without_recursion() -> None:
    server = Server(app := Immediate())
    wire = server.connect()
    wire.send(3000 * get())
    await server.settle(3001)
    assert app.count == len(wire.bodies) == 3000
    assert wire.reading


@scene
async def test_pipelines_alternate_one_request_per_iteration_of_the_loop() -> None:
    server = Server(app := Immediate())
    wires = [server.connect() for _ in range(3)]
    for wire in wires:
        wire.send(100 * get())
    for _ in range(90):
        before = app.count
        await server.settle(1)
        assert app.count - before <= len(wires)
    counts = [len(wire.bodies) for wire in wires]
    assert max(counts) - min(counts) <= 1


@scene
async def test_a_pipeline_that_is_answered_at_once_is_not_read_faster_than_it_is_answered() -> None:
    server = Server(Immediate())
    wire = server.connect()
    wire.send(*(1000 * [10 * get()]))
    assert wire.unread > 990
    await server.settle(11 * 1000)
    assert len(wire.bodies) == 10_000


@scene
async def test_a_pipeline_whose_client_does_not_read_is_not_answered_further() -> None:
    server = Server(Immediate())
    wire = server.connect()
    wire.stop_reading()
    wire.send(100 * get())
    await server.settle(100)
    assert len(wire.bodies) == 1
    wire.send(get(), get())
    assert wire.unread > 0
    wire.read_all()
    await server.settle(200)
    assert len(wire.bodies) == 102


@scene
async def test_replies_of_one_iteration_are_sent_together_in_the_next() -> None:
    app, server, first = start()
    second = server.connect()
    first.send(get("/1"))
    second.send(get("/2"))
    app.answer()
    assert first.writes == [], "another reply is due"
    app.answer()
    await server.settle()
    assert (first.bodies, second.bodies) == ([b"/1"], [b"/2"])
    assert [len(wire.writes) for wire in (first, second)] == [1, 1]


@scene
async def test_a_held_reply_is_sent_before_the_connection_closes() -> None:
    app, server, first = start()
    server.connect().send(get("/other"))
    first.send(get("/1", "Connection: close"))
    app.waiting.reverse()
    app.answer()
    assert (first.bodies, first.eof) == ([b"/1"], True)
    second = server.connect()
    second.send(get("/2"))
    app.waiting.reverse()
    app.answer()
    assert second.writes == []
    second.protocol.close()
    assert (second.bodies, second.closed) == ([b"/2"], True)


# Limits on heads


@pytest.mark.parametrize("step", [1000, 10**6])
@pytest.mark.parametrize(
    ("request_", "status", "reason"),
    [
        (b"GET /" + 3000 * b"a", 414, "url_too_long"),
        (b"GET / HTTP/1.1\r\nX-A: " + 3000 * b"a", 431, "head_too_large"),
        (b"GET / HTTP/1.1\r\nHost: x\r\n" + 500 * b"a:b\r\n" + b"\r\n", 431, "head_too_large"),
        (get("/", "X-A: " + 3000 * "a"), 431, "head_too_large"),
    ],
)
@scene
async def test_a_head_above_the_limit_is_refused_and_the_connection_closes(
    step: int, request_: bytes, status: int, reason: str
) -> None:
    app, server, wire = start(head_bytes=2048)
    for begin in range(0, len(request_), step):
        wire.send(request_[begin : begin + step])
    assert (wire.statuses, server.reasons, wire.eof) == ([status], [reason], True)
    assert app.paths == []


@scene
async def test_a_head_of_the_maximum_size_is_accepted_also_before_other_data() -> None:
    for rest in (b"", 10_000 * b"x"):
        app, _, wire = start(head_bytes=2048)
        head = get("/", "X-A: ")
        wire.send(head[:-4] + (2048 - len(head)) * b"a" + head[-4:] + rest)
        assert app.paths == ["/"]


@scene
async def test_a_head_one_byte_above_the_maximum_size_is_431() -> None:
    app, _, wire = start(head_bytes=2048)
    head = get("/", "X-A: ")
    wire.send(head[:-4] + (2049 - len(head)) * b"a" + head[-4:])
    assert (app.paths, wire.statuses) == ([], [431])


@scene
async def test_too_many_headers_are_431() -> None:
    for count, status in ((MAX_HEADERS - 1, []), (MAX_HEADERS, [431])):
        _, _, wire = start()
        wire.send(get("/", *(count * ["a: b"])))
        assert wire.statuses == status


# Keep-alive


@pytest.mark.parametrize(
    ("version", "header", "kept"),
    [
        ("1.1", None, True),
        ("1.1", "close", False),
        ("1.1", "x, CLOSE", False),
        ("1.0", None, False),
        ("1.0", "keep-alive", True),
        ("1.0", "Keep-Alive, close", False),
    ],
)
@scene
async def test_connections_are_kept_as_the_client_asks(version: str, header: str | None, kept: bool) -> None:
    app, _, wire = start()
    wire.send(get("/", *([f"Connection: {header}"] if header else []), version=version))
    app.answer()
    assert is_open(wire) == kept
    assert (b"connection: close\r\n" in wire.sent) == (not kept)
    assert (b"connection: keep-alive\r\n" in wire.sent) == (kept and version == "1.0")


@scene
async def test_a_reply_may_close_the_connection() -> None:
    app, _, wire = start()
    wire.send(get())
    app.answer(close=True)
    assert b"connection: close\r\n" in wire.sent
    assert (wire.eof, wire.closed) == (True, False)


@scene
async def test_bytes_after_a_request_that_closes_are_ignored() -> None:
    app, server, wire = start()
    wire.send(get("/1", "Connection: close") + get("/2"), get("/3"))
    app.answer()
    await server.settle()
    wire.send(get("/4"))
    await server.settle()
    assert (app.paths, wire.bodies, wire.eof) == ([], [b"/1"], True)
    assert server.connections.memory.used == 0


@scene
async def test_a_closing_connection_is_reset_after_a_moment_or_too_much_data() -> None:
    app, server, wire = start()
    wire.send(get("/", "Connection: close"))
    app.answer()
    await server.advance(LINGER_SECONDS / 2)
    assert not wire.aborted
    await server.advance(LINGER_SECONDS)
    assert wire.aborted
    wire = server.connect()
    wire.send(get("/", "Connection: close"))
    app.answer()
    wire.send(*(70 * [bytes(2**20)]))
    await server.settle(300)
    assert wire.aborted
    assert server.connections.active == set()


@scene
async def test_while_draining_every_reply_closes_its_connection() -> None:
    app, server, wire = start()
    wire.send(get())
    server.connections.draining = True
    app.answer()
    assert b"connection: close\r\n" in wire.sent
    assert wire.eof


@scene
async def test_shutdown_closes_only_connections_on_which_no_request_has_begun() -> None:
    app, server, busy = start()
    idle, begun = server.connect(), server.connect()
    busy.send(get())
    begun.send(get()[:5])
    for wire in (busy, idle, begun):
        wire.protocol.shutdown()
    await server.settle()
    assert [is_open(wire) for wire in (busy, idle, begun)] == [True, False, True]
    assert (idle.statuses, server.reasons) == ([408], ["stopping"])
    begun.send(get()[5:])
    app.answer()
    app.answer()
    await server.settle()
    assert busy.statuses == begun.statuses == [200]


# Disconnects


@scene
async def test_a_disconnect_during_an_upload_is_reported_once() -> None:
    app, server, wire = start()
    wire.send(post(b"he", length=5))
    exchange = app.waiting[0]
    app.read(exchange)
    wire.disconnect()
    assert (app.failures, exchange.disconnected) == ([None], True)
    exchange.reply(None)
    await server.advance(100.0)
    assert app.failures == [None]
    assert (server.connections.in_progress, server.connections.active) == (0, set())


@scene
async def test_a_disconnect_while_a_request_waits_is_visible_and_its_late_reply_is_dropped() -> None:
    app, server, wire = start()
    wire.send(post(b"hello") + get("/never"))
    app.read(app.waiting[0])
    wire.disconnect()
    assert app.waiting[0].disconnected
    app.answer()
    await server.settle()
    assert (wire.sent, app.paths) == (b"", [])
    assert server.connections.in_progress == 0


@scene
async def test_a_body_that_is_read_after_the_disconnect_fails() -> None:
    app, server, wire = start()
    wire.send(post(b"he", length=5))
    wire.disconnect()
    app.read(app.waiting[0])
    assert (app.bodies, app.failures) == ([], [None])
    app.waiting.pop().reply(None)
    assert server.connections.in_progress == 0


@scene
async def test_a_disconnect_between_a_held_reply_and_its_sending_is_harmless() -> None:
    app, server, wire = start()
    server.connect().send(get())
    wire.send(get())
    app.waiting.pop().reply(reply("held"))
    assert wire.sent == b""
    wire.disconnect()
    await server.settle()
    assert wire.sent == b""
    app.answer()
    assert server.connections.in_progress == 0


@scene
async def test_a_second_reply_to_a_request_is_ignored() -> None:
    app, server, wire = start()
    wire.send(get("/1"))
    exchange = app.waiting[0]
    app.answer()
    exchange.reply(reply("again"))
    wire.send(get("/2"))
    exchange.reply(reply("again"))
    assert server.connections.in_progress == 1
    app.answer()
    await server.settle()
    assert (wire.bodies, server.connections.in_progress) == ([b"/1", b"/2"], 0)


@scene
async def test_cancel_is_passed_to_the_request_in_progress_only() -> None:
    app, server, wire = start()
    idle = server.connect()
    wire.send(get())
    app.waiting[0].on_cancel = lambda: app.answer("cancelled", close=True)
    server.connections.cancel()
    assert (wire.bodies, idle.sent) == ([b"cancelled"], b"")
    server.connections.cancel()


@scene
async def test_an_application_that_fails_at_once_is_500_and_the_connection_closes() -> None:
    class Failing(Application):
        def direct(self, exchange: Exchange) -> bool:
            raise ValueError("internal")

    server = Server(Failing())
    wire = server.connect()
    wire.send(get())
    assert (wire.statuses, wire.eof, server.connections.in_progress) == ([500], True, 0)
    assert b"internal" not in wire.sent
