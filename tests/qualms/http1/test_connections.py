"""Timeouts and the number of connections, without sockets and without real time."""

from tests.qualms.http1.wire import get, is_open, scene, start

from qualms.http1.connection import LINGER_SECONDS

# Timeouts


@scene
async def test_a_connection_that_sends_nothing_is_closed_with_408() -> None:
    _, server, wire = start(head_seconds=10.0)
    await server.advance(9.0)
    assert is_open(wire)
    await server.advance(1.2)
    assert (wire.statuses, server.reasons) == ([408], ["head_timeout"])
    assert wire.eof


@scene
async def test_a_head_that_arrives_slowly_is_408_however_regular_its_bytes_are() -> None:
    app, server, wire = start(head_seconds=10.0)
    wire.send(get())
    app.answer()
    await server.advance(30.0)
    for byte in get("/", "X: " + 200 * "y"):
        if is_open(wire):
            wire.send(bytes([byte]))
            await server.advance(1.0)
    assert (wire.statuses, server.reasons) == ([200, 408], ["head_timeout"])


@scene
async def test_an_idle_connection_is_closed_silently_after_the_keep_alive_time() -> None:
    app, server, wire = start(keep_alive_seconds=75.0)
    wire.send(get())
    app.answer()
    await server.advance(74.0)
    assert is_open(wire)
    await server.advance(1.2)
    assert (wire.closed, wire.aborted, wire.statuses, server.refusals) == (True, False, [200], [])
    assert server.connections.active == set()


@scene
async def test_a_request_in_progress_has_no_timeout_of_the_connection() -> None:
    app, server, wire = start()
    wire.send(get())
    await server.advance(10_000.0)
    app.answer()
    assert wire.statuses == [200]


@scene
async def test_a_client_that_does_not_read_its_reply_is_reset() -> None:
    app, server, wire = start(send_seconds=20.0)
    wire.stop_reading()
    wire.send(get())
    app.answer()
    assert server.connections.busy == 1
    await server.advance(19.0)
    assert not wire.aborted
    await server.advance(1.2)
    assert (wire.aborted, server.closes) == (True, ["send_timeout"])
    assert (server.connections.busy, server.connections.active) == (0, set())


@scene
async def test_a_client_that_reads_its_reply_in_time_may_send_the_next_request() -> None:
    app, server, wire = start(send_seconds=20.0)
    wire.stop_reading()
    wire.send(get())
    app.answer()
    await server.advance(19.0)
    wire.read_all()
    await server.advance(19.0)
    wire.send(get())
    app.answer()
    assert wire.statuses == [200, 200]


@scene
async def test_the_last_reply_of_a_connection_has_the_whole_send_timeout() -> None:
    """After the reply there are two seconds to discard data, but they begin when the client has the reply."""
    app, server, wire = start(send_seconds=20.0)
    wire.stop_reading()
    wire.send(get("/", "Connection: close"))
    app.answer()
    await server.advance(LINGER_SECONDS + 10.0)
    assert not wire.aborted
    wire.read_all()
    await server.advance(LINGER_SECONDS - 1.0)
    assert not wire.aborted
    await server.advance(LINGER_SECONDS)
    assert wire.aborted


@scene
async def test_a_last_reply_that_is_not_read_is_reset_after_the_send_timeout() -> None:
    app, server, wire = start(send_seconds=20.0)
    wire.stop_reading()
    wire.send(get("/", "Connection: close"))
    app.answer()
    await server.advance(20.2)
    assert (wire.aborted, server.closes) == (True, ["send_timeout"])


# Number of connections


@scene
async def test_connections_above_the_limit_are_503_and_closed() -> None:
    app, server, first = start(connections=2)
    second = server.connect()
    for wire in (first, second):
        wire.send(get())
    third = server.connect()
    assert (third.statuses, third.eof, server.reasons) == ([503], True, ["too_many_connections"])
    third.disconnect()
    app.answer()
    app.answer()
    await server.settle()
    assert (first.statuses, second.statuses) == ([200], [200])


@scene
async def test_far_too_many_connections_are_reset() -> None:
    app, server, first = start(connections=1)
    first.send(get())
    others = [server.connect() for _ in range(200)]
    await server.settle()
    refused = [wire for wire in others if wire.eof]
    assert all(wire.aborted for wire in others if wire not in refused)
    assert 100 <= len(refused) < 200
    assert server.reasons == 200 * ["too_many_connections"]
    for wire in refused:
        wire.disconnect()
    app.answer()
    assert first.statuses == [200]
    assert len(server.connections.active) == 1


@scene
async def test_the_connection_that_has_waited_longest_makes_room_for_a_new_one() -> None:
    app, server, first = start(connections=3)
    second, third = server.connect(), server.connect()
    for wire in (first, second, third):
        wire.send(get())
    app.answer()
    await server.advance(0.5)
    app.answer()
    await server.advance(2.0)
    new = server.connect()
    await server.settle()
    assert (first.closed, second.closed, third.closed, new.sent) == (True, False, False, b"")
    assert (server.closes, first.statuses) == (["evicted"], [200])
    new.send(get("/new"))
    assert app.paths == ["/a", "/new"]


@scene
async def test_a_connection_that_never_sent_a_request_is_evicted_with_503() -> None:
    _, server, first = start(connections=1)
    await server.advance(2.0)
    second = server.connect()
    assert (first.statuses, first.eof, server.reasons) == ([503], True, ["evicted"])
    assert second.sent == b""


@scene
async def test_connections_that_have_just_opened_are_not_evicted() -> None:
    _, server, first = start(connections=1)
    await server.advance(0.5)
    second = server.connect()
    assert (first.sent, second.statuses) == (b"", [503])
