"""The server on a real socket, with a small application: start, drain, stop, and the check of uvicorn."""

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn

from qualms.errors import QualmsError
from qualms.http1.connections import Connections
from qualms.http1.listener import listen
from qualms.http1.messages import Refusal, Reply
from qualms.http1.server import DrainingServer, check_uvicorn, protocol

TIMEOUT = 30.0
GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
App = Callable[[Any, Any, Any], Awaitable[None]]


def test_the_installed_uvicorn_is_supported() -> None:
    check_uvicorn()


@pytest.mark.parametrize("name", ["handle_exit", "on_tick", "shutdown", "startup"])
def test_a_uvicorn_without_a_needed_method_is_an_error_that_names_it(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.delattr(uvicorn.Server, name)
    with pytest.raises(QualmsError, match=rf"^uvicorn {uvicorn.__version__} has no Server\.{name}; install"):
        check_uvicorn()


async def hello(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"5")]})
    await send({"type": "http.response.body", "body": b"hello"})


async def hang(scope: Any, receive: Any, send: Any) -> None:
    await asyncio.Event().wait()


class Running:
    """A server that accepts connections."""

    def __init__(self, server: DrainingServer, made: Connections, port: int, drained: list[bool]) -> None:
        self.server, self.connections, self.drained = server, made, drained
        self._port = port
        self._writers: list[asyncio.StreamWriter] = []
        self.task: asyncio.Task[None]

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._writers.append(writer)
        return reader, writer

    async def request(self) -> bytes:
        """The head of the reply to a request on a new connection."""
        reader, writer = await self.connect()
        writer.write(GET)
        return await reader.readuntil(b"\r\n\r\n")

    async def begin(self, reader_writer: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> None:
        """Send a request and wait until it is in progress."""
        reader_writer[1].write(GET)
        while not self.connections.in_progress:
            await asyncio.sleep(0.005)

    def close(self) -> None:
        for writer in self._writers:
            writer.close()


@asynccontextmanager
async def running(app: App, *, drain_seconds: float = 0.0, grace_seconds: float = 20.0) -> AsyncIterator[Running]:
    def refuse(refusal: Refusal) -> Reply:
        return Reply(refusal.status, [(b"content-length", b"0")], b"")

    made, drained = Connections(app, refuse), list[bool]()
    config = uvicorn.Config(app, http=protocol(made), lifespan="off", ws="none", log_config=None, server_header=False)  # type: ignore[arg-type]  # any function that makes protocols
    server = DrainingServer(
        config,
        made,
        drain_seconds=drain_seconds,
        grace_seconds=grace_seconds,
        on_drain=lambda: drained.append(True),
    )
    listener = listen("127.0.0.1", 0)
    run = Running(server, made, listener.getsockname()[1], drained)
    run.task = asyncio.create_task(server.serve([listener]))
    while not server.started:
        await asyncio.sleep(0.005)
    try:
        yield run
    finally:
        server.force_exit = server.should_exit = True
        await asyncio.wait_for(run.task, TIMEOUT)
        run.close()
        await asyncio.sleep(0.01)


def play(scene: Callable[[], Awaitable[None]]) -> None:
    async def whole() -> None:
        await asyncio.wait_for(scene(), TIMEOUT)

    asyncio.run(whole())


def test_replies_have_a_date_from_the_first_request_on_and_no_server_header() -> None:
    async def scene() -> None:
        async with running(hello) as run:
            reply = await run.request()
            assert reply.startswith(b"HTTP/1.1 200 OK\r\ndate: ")
            assert b"server:" not in reply
            assert b"connection:" not in reply

    play(scene)


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_drains_and_the_server_ends_by_itself(sent: int) -> None:
    async def scene() -> None:
        async with running(hello, drain_seconds=0.5) as run:
            idle, _ = await run.connect()
            run.server.handle_exit(sent, None)
            assert run.drained == [True]
            assert b"connection: close\r\n" in await run.request()
            await asyncio.wait_for(run.task, TIMEOUT)
            assert (await idle.read()).startswith(b"HTTP/1.1 408 ")
            assert run.connections.active == set()

    play(scene)


@pytest.mark.slow
def test_requests_that_outlast_the_grace_period_end_with_an_error() -> None:
    async def scene() -> None:
        async with running(hang, grace_seconds=1.0) as run:
            reader, writer = await run.connect()
            await run.begin((reader, writer))
            run.server.handle_exit(signal.SIGTERM, None)
            await asyncio.wait_for(run.task, TIMEOUT)
            assert (await reader.read()).startswith(b"HTTP/1.1 500 ")
            assert run.connections.in_progress == 0

    play(scene)


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_second_signal_ends_the_server_without_waiting_for_requests(second: int) -> None:
    async def scene() -> None:
        async with running(hang, drain_seconds=1000.0, grace_seconds=2000.0) as run:
            await run.begin(await run.connect())
            run.server.handle_exit(signal.SIGTERM, None)
            run.server.handle_exit(second, None)
            await asyncio.wait_for(run.task, TIMEOUT)
            assert run.drained == [True]

    play(scene)


def test_sigint_ends_the_server_without_a_drain_period() -> None:
    async def scene() -> None:
        async with running(hello, drain_seconds=1000.0, grace_seconds=2000.0) as run:
            await run.connect()
            run.server.handle_exit(signal.SIGINT, None)
            await asyncio.wait_for(run.task, TIMEOUT)

    play(scene)


def test_a_failure_ends_the_server_and_is_kept() -> None:
    async def scene() -> None:
        async with running(hello) as run:
            error = QualmsError("The model is damaged.")
            run.server.fail(error)
            await asyncio.wait_for(run.task, TIMEOUT)
            assert run.server.failure is error

    play(scene)
