"""Bodies on one connection, without sockets: pieces, limits, 100 Continue, unread bodies and memory."""

import pytest
from tests.qualms.http1.wire import chunked, get, is_open, post, reply, scene, start

from qualms.http1.body import FREE_BYTES

# Bodies


@pytest.mark.parametrize("step", [1, 3, 1000])
@pytest.mark.parametrize("request_", [post(b"hello"), chunked(b"he", b"llo", b"")[:-2] + b"\r\n"])
@scene
async def test_a_body_is_read_in_pieces_and_the_next_request_follows(step: int, request_: bytes) -> None:
    app, server, wire = start()
    stream = request_ + get("/next")
    pieces = [stream[begin : begin + step] for begin in range(0, len(stream), step)]
    wire.send(pieces[0])
    read = 0
    for piece in [*pieces[1:], b""]:
        if app.waiting and not read:
            app.read(app.waiting[0])
            read = 1
        if piece:
            wire.send(piece)
    if not read:
        app.read(app.waiting[0])
    await server.settle()
    assert (app.bodies, app.failures) == ([b"hello"], [])
    app.answer()
    await server.settle()
    assert app.paths == ["/next"]


@scene
async def test_a_request_whose_body_is_arriving_is_not_in_progress() -> None:
    app, server, wire = start()
    wire.send(post(b"he", length=5))
    app.read(app.waiting[0])
    assert server.connections.in_progress == 0
    assert server.connections.busy == 1
    wire.send(b"llo")
    assert (app.bodies, server.connections.in_progress) == ([b"hello"], 1)
    app.answer()
    assert server.connections.in_progress == 0


@scene
async def test_a_body_above_the_limit_is_refused_before_it_is_read() -> None:
    app, _, wire = start()
    wire.send(post(b"", length=101))
    app.read(app.waiting[0], max_bytes=100)
    (refusal,) = app.failures
    assert refusal is not None
    assert (refusal.status, refusal.accepted) == (413, "at most 100 bytes")
    app.answer()
    assert wire.eof


@scene
async def test_a_chunked_body_above_the_limit_is_refused_when_it_exceeds_it() -> None:
    app, server, wire = start()
    wire.send(chunked(100 * b"x"))
    app.read(app.waiting[0], max_bytes=100)
    assert app.failures == []
    wire.send(b"1\r\nx\r\n")
    (refusal,) = app.failures
    assert refusal is not None
    assert refusal.status == 413
    app.answer()
    assert wire.eof
    assert server.connections.in_progress == 0


@scene
async def test_data_after_a_chunked_body_does_not_count_as_its_size() -> None:
    app, _, wire = start()
    wire.send(chunked(90 * b"x") + b"0\r\n\r\n" + 5 * get("/next"))
    app.read(app.waiting[0], max_bytes=100)
    assert app.bodies == [90 * b"x"]


@scene
async def test_a_body_of_many_small_chunks_is_decoded_over_several_iterations() -> None:
    app, server, wire = start()
    stream = chunked(*(2000 * [10 * b"x"])) + b"0\r\n\r\n" + get("/next")
    wire.send(stream)
    app.read(app.waiting[0], max_bytes=20_000)
    assert app.bodies == []
    assert not wire.reading
    await server.settle()
    assert app.bodies == [20_000 * b"x"]
    app.answer()
    await server.settle()
    assert app.paths == ["/next"]


@scene
async def test_malformed_chunks_are_400() -> None:
    app, _, wire = start()
    wire.send(chunked(b"hello"))
    app.read(app.waiting[0])
    wire.send(b"?\r\n")
    (refusal,) = app.failures
    assert refusal is not None
    assert (refusal.status, refusal.reason) == (400, "malformed")


@scene
async def test_a_body_that_does_not_arrive_in_time_is_408() -> None:
    app, server, wire = start()
    wire.send(post(b"he", length=5))
    app.read(app.waiting[0], seconds=3.0)
    for _ in range(20):
        await server.advance(0.1)
    assert app.failures == []
    for _ in range(15):
        await server.advance(0.1)
    (refusal,) = app.failures
    assert refusal is not None
    assert refusal.status == 408
    assert str(refusal) == "The body did not arrive within the request's 3 s."
    app.waiting.pop().reply(reply("late", 408, close=True))
    assert (wire.statuses, server.connections.in_progress) == ([408], 0)


@scene
async def test_100_continue_is_sent_when_the_body_is_read_and_only_then() -> None:
    app, _, wire = start()
    wire.send(post(b"", "Expect: 100-continue", length=5))
    assert wire.sent == b""
    app.read(app.waiting[0])
    assert wire.sent == b"HTTP/1.1 100 Continue\r\n\r\n"
    wire.send(b"hello")
    app.answer()
    assert wire.sent.count(b"100 Continue") == 1
    assert wire.statuses == [200]
    assert is_open(wire)


@pytest.mark.parametrize(
    "request_",
    [
        post(b"hello", "Expect: 100-continue"),
        post(b"h", "Expect: 100-continue", length=5),
        get("/a", "Content-Length: 5", "Expect: 100-continue", version="1.0", method="POST"),
        get("/a", "Expect: 100-continue"),
        post(b"", "Expect: 200-maybe", length=5),
    ],
)
@scene
async def test_100_continue_is_not_sent_if_it_is_not_needed(request_: bytes) -> None:
    app, _, wire = start()
    wire.send(request_)
    app.read(app.waiting[0])
    assert wire.sent == b""


@scene
async def test_a_request_that_expects_continue_and_is_refused_closes_the_connection() -> None:
    app, _, wire = start()
    wire.send(post(b"", "Expect: 100-continue", length=5))
    app.answer()
    assert b"100 Continue" not in wire.sent
    assert wire.eof


@scene
async def test_an_unread_body_that_has_arrived_is_skipped() -> None:
    app, server, wire = start()
    wire.send(post(get("/inner")) + get("/next"))
    app.answer()
    await server.settle()
    assert app.paths == ["/next"]
    assert is_open(wire)


@pytest.mark.parametrize("request_", [post(b"he", length=5), chunked(b"hello") + b"0\r\n\r\n"])
@scene
async def test_an_unread_body_that_may_not_have_arrived_closes_the_connection(request_: bytes) -> None:
    app, server, wire = start()
    wire.send(request_)
    app.answer()
    wire.send(get("/llo"))
    await server.settle()
    assert (app.paths, wire.eof) == ([], True)


@scene
async def test_a_reply_before_the_body_has_arrived_closes_the_connection() -> None:
    app, server, wire = start()
    wire.send(post(b"he", length=5))
    app.read(app.waiting[0])
    app.answer()
    assert (wire.statuses, wire.eof) == ([200], True)
    wire.send(b"llo")
    assert (app.bodies, app.failures) == ([], [])
    assert server.connections.in_progress == server.connections.memory.used == 0


# Memory of bodies


@scene
async def test_the_first_bytes_of_bodies_do_not_count_as_memory() -> None:
    app, server, wire = start()
    wire.send(post(bytes(FREE_BYTES)))
    app.read(app.waiting[0])
    assert (len(app.bodies), server.connections.memory.used) == (1, 0)


@pytest.mark.parametrize("pieces", [1, 7])
@scene
async def test_bodies_that_exceed_the_memory_are_429_and_others_go_on(pieces: int) -> None:
    app, server, first = start(memory=300_000)
    body = bytes(300_000)
    first.send(post(body)[:200_000])
    app.read(app.waiting[0])
    assert 0 < server.connections.memory.used <= 200_000
    second = server.connect()
    request = post(body)
    step = -(-len(request) // pieces)
    second.send(request[:step])
    app.read(app.waiting[1])
    for begin in range(step, len(request), step):
        second.send(request[begin : begin + step])
    (refusal,) = app.failures
    assert refusal is not None
    assert (refusal.status, refusal.reason) == (429, "body_memory")
    app.waiting.pop().reply(reply("full", 429, close=True))
    await server.settle()
    first.send(post(body)[200_000:])
    assert app.bodies == [body]
    app.waiting[0].release_body()
    assert server.connections.memory.used == 0
    app.answer()
    assert server.connections.memory.used == server.connections.in_progress == 0


@scene
async def test_memory_of_a_body_is_released_by_the_reply_or_the_disconnect() -> None:
    app, server, wire = start()
    wire.send(post(bytes(300_000)))
    app.read(app.waiting[0])
    assert server.connections.memory.used == 300_000 - FREE_BYTES
    app.answer()
    assert server.connections.memory.used == 0
    await server.settle()
    wire.send(post(bytes(300_000))[:250_000])
    app.read(app.waiting[0])
    assert server.connections.memory.used > 0
    wire.disconnect()
    app.waiting.pop().reply(None)
    assert (server.connections.memory.used, server.connections.in_progress) == (0, 0)


@scene
async def test_data_that_waits_behind_a_request_counts_as_memory_and_resets_if_it_is_too_much() -> None:
    app, server, first = start(memory=300_000)
    first.send(get("/1") + post(bytes(240_000)))
    assert 0 < server.connections.memory.used <= 240_000
    second = server.connect()
    second.send(get("/2") + post(bytes(240_000)))
    await server.settle()
    assert (second.aborted, server.closes) == (True, ["body_memory"])
    app.waiting.pop().reply(None)
    app.answer()
    await server.settle()
    app.read(app.waiting[0])
    assert [len(body) for body in app.bodies] == [240_000]
    app.answer()
    await server.settle()
    assert (server.connections.memory.used, server.connections.in_progress) == (0, 0)


@scene
async def test_memory_of_data_behind_a_request_is_released_when_the_data_is_read() -> None:
    app, server, wire = start()
    wire.send(get("/1") + post(bytes(240_000), path="/2"))
    app.answer()
    await server.settle()
    app.read(app.waiting[0])
    app.waiting[0].release_body()
    await server.settle()
    assert server.connections.memory.used == 0
