"""Requests that are read completely are answered without ASGI, with the same bytes except for ids and times."""

import asyncio
import base64
import gc
import json
import re
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest
from fastapi import FastAPI
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry

from qualms.bundle.file import Bundle
from qualms.images.preprocess import preprocess
from qualms.inference.batcher import SHORT_SECONDS
from qualms.inference.engine import CostCurve
from qualms.settings import Settings
from qualms.web.app import create_app
from qualms.web.lifecycle import configuration
from qualms.web.predict import PredictHandler
from qualms.web.protocol import DrainingServer, QualmsProtocol
from qualms.web.state import ServiceState

TIMEOUT = 30.0

Draw = Callable[[int, int], NDArray[np.uint8]]
Encode = Callable[..., bytes]


@pytest.fixture
def image(encode: Encode, draw_images: Draw) -> bytes:
    return encode(draw_images(71, 1)[0])


class Wire:
    """The server's end of a connection."""

    def __init__(self) -> None:
        self.sent = b""
        self.closed = False

    def write(self, data: bytes) -> None:
        self.sent += data

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def get_extra_info(self, _: str, default: Any = None) -> Any:
        return default

    def __getattr__(self, _: str) -> Callable[..., None]:
        return lambda *_, **__: None  # flow control


class Host:
    """The application behind the protocol, without sockets."""

    def __init__(self, app: FastAPI, settings: Settings, state: ServiceState, registry: CollectorRegistry) -> None:
        self.state, self.registry = state, registry
        self.config = configuration(app, settings)
        self.config.load()
        self.server = DrainingServer(self.config, state, 0)
        self.tasks: set[Any] = self.server.server_state.tasks

    def connect(self) -> tuple[QualmsProtocol, Wire]:
        protocol, wire = QualmsProtocol(self.config, self.server.server_state, {}), Wire()
        protocol.connection_made(wire)  # type: ignore[arg-type]
        return protocol, wire

    async def ask(self, request: bytes) -> Wire:
        protocol, wire = self.connect()
        protocol.data_received(request)
        await becomes(lambda: bool(wire.sent) and not self.tasks)
        return wire

    def count(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(name, labels)


async def becomes(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.002)


def play(bundle: Bundle, scene: Callable[[Host], Coroutine[Any, Any, None]], **settings: Any) -> None:
    async def whole() -> None:
        registry, state = CollectorRegistry(), ServiceState()
        given = {"model": str(bundle.path), "device": "cpu", "threads": 1, "decode_threads": 1, **settings}
        chosen = Settings(**given)
        app = create_app(chosen, registry=registry, state=state)
        async with app.router.lifespan_context(app):
            await becomes(lambda: state.model is not None)
            await scene(Host(app, chosen, state, registry))

    asyncio.run(asyncio.wait_for(whole(), TIMEOUT))


class Gate:
    """Holds the model's runs up, on the runner's thread."""

    def __init__(self, state: ServiceState) -> None:
        assert state.model is not None
        engine = state.model.engine
        self.open, self.runs, self._run = threading.Event(), 0, engine.run
        engine.run = self._wait  # type: ignore[method-assign]
        engine.cost = CostCurve((1,), (2 * SHORT_SECONDS,))

    def _wait(self, images: NDArray[np.uint8]) -> Any:
        self.runs += 1
        assert self.open.wait(TIMEOUT)
        return self._run(images)


def note_sizes(state: ServiceState) -> list[int]:
    """How many images each run has, from now on."""
    assert state.model is not None
    engine, sizes = state.model.engine, list[int]()
    run = engine.run

    def noted(images: NDArray[np.uint8]) -> Any:
        sizes.append(len(images))
        return run(images)

    engine.run = noted  # type: ignore[method-assign]
    return sizes


@pytest.fixture
def asgi_ids(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ids of the requests that were answered over ASGI."""
    ids: list[str] = []
    answer = PredictHandler.__call__

    async def recorded(self: PredictHandler, scope: Any, receive: Any, send: Any) -> None:
        ids.append(dict(scope["headers"]).get(b"x-request-id", b"").decode())
        await answer(self, scope, receive, send)

    monkeypatch.setattr(PredictHandler, "__call__", recorded)
    return ids


def post(body: bytes, *headers: str, target: str = "/predict", version: str = "1.1", kind: str = "image/png") -> bytes:
    lines = [f"POST {target} HTTP/{version}", "host: x", f"content-type: {kind}", f"content-length: {len(body)}"]
    return "\r\n".join([*lines, *headers, "", ""]).encode() + body


def parts(reply: bytes) -> tuple[bytes, list[bytes], Any]:
    """Status line, headers and body, without what differs from one reply to the next."""
    head, _, body = reply.partition(b"\r\n\r\n")
    status, *headers = re.sub(rb"dur=[0-9.]+", b"dur", head).split(b"\r\n")
    return status, sorted(line for line in headers if not line.startswith(b"date:")), json.loads(body)


# The same replies


@pytest.mark.parametrize(
    ("headers", "version", "kind"),
    [
        ([], "1.1", "image/png"),
        ([], "1.1", "application/octet-stream"),
        ([], "1.0", "image/png"),
        (["connection: close"], "1.1", "image/png"),
        (["x-request-timeout: 5"], "1.1", "IMAGE/anything; q=1"),
        (["x-request-timeout: soon"], "1.1", "image/png"),
        (["x-request-timeout: 1e-9"], "1.1", "image/png"),
    ],
)
def test_a_reply_is_the_endpoints(
    bundle: Bundle, image: bytes, asgi_ids: list[str], headers: list[str], version: str, kind: str
) -> None:
    async def scene(host: Host) -> None:
        request = post(image, "x-request-id: a", *headers, version=version, kind=kind)
        direct = await host.ask(request)
        assert asgi_ids == []
        host.config.loaded_app.direct = lambda _: False
        asgi = await host.ask(request)
        assert asgi_ids == ["a"]
        assert parts(direct.sent) == parts(asgi.sent)
        assert direct.closed == asgi.closed == (version == "1.0" or "connection: close" in headers)

    play(bundle, scene)


def test_what_cannot_be_decoded_is_the_endpoints_problem_word_for_word(
    bundle: Bundle, image: bytes, asgi_ids: list[str]
) -> None:
    async def scene(host: Host) -> None:
        request = post(image[:45] + bytes(10) + image[55:], "x-request-id: a")
        direct = await host.ask(request)
        assert asgi_ids == []
        assert direct.sent.startswith(b"HTTP/1.1 400")
        host.config.loaded_app.direct = lambda _: False
        assert parts(direct.sent) == parts((await host.ask(request)).sent)

    play(bundle, scene)


@pytest.mark.parametrize("kind", ["TIFF", "GIF", "BMP", "WEBP"])
def test_formats_that_may_decode_slowly_are_decoded_in_the_pool(
    bundle: Bundle, encode: Encode, draw_images: Draw, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    threads: list[str] = []

    def recorded(*args: Any, **options: Any) -> Any:
        threads.append(threading.current_thread().name)
        return preprocess(*args, **options)

    monkeypatch.setattr("qualms.web.predict.preprocess", recorded)

    async def scene(host: Host) -> None:
        reply = await host.ask(post(encode(draw_images(71, 1)[0], kind)))
        assert reply.sent.startswith(b"HTTP/1.1 200")
        assert [name.rpartition("_")[0] for name in threads] == ["qualms-decode"]

    play(bundle, scene)


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (post(b"", "x-request-id: a"), 400),
        (post(b'{"images": []}', "x-request-id: a", kind="application/json"), 422),
        (post(b"x", "x-request-id: a", kind="text/plain"), 415),
        (post(bytes(40_000), "x-request-id: a"), 415),
        (post(b"x", "x-request-id: a", target="/predict?target=1"), 422),
    ],
)
def test_every_complete_request_is_answered_without_asgi_and_as_over_asgi(
    bundle: Bundle, asgi_ids: list[str], request_: bytes, status: int
) -> None:
    async def scene(host: Host) -> None:
        direct = await host.ask(request_)
        assert asgi_ids == []
        assert direct.sent.startswith(b"HTTP/1.1 %d" % status)
        host.config.loaded_app.direct = lambda _: False
        assert parts(direct.sent) == parts((await host.ask(request_)).sent)
        assert asgi_ids == ["a"]

    play(bundle, scene)


def test_an_operating_point_and_several_images_are_answered_without_asgi(
    bundle: Bundle, image: bytes, asgi_ids: list[str]
) -> None:
    async def scene(host: Host) -> None:
        body = json.dumps({"images": 3 * [base64.b64encode(image).decode()]}).encode()
        request = post(body, target="/predict?target_fpr=0.1&guarantee=marginal", kind="application/json")
        results = parts((await host.ask(request)).sent)[2]["results"]
        assert [result["ood"]["target_fpr"] for result in results] == [0.1, 0.1, 0.1]
        assert asgi_ids == []

    play(bundle, scene)


def test_a_request_that_is_not_complete_is_answered_over_asgi(
    bundle: Bundle, image: bytes, asgi_ids: list[str]
) -> None:
    async def scene(host: Host) -> None:
        await host.ask(post(image, "x-request-id: 4", "expect: 100-continue"))
        assert asgi_ids == ["4"]
        protocol, wire = host.connect()
        head, rest = post(image, "x-request-id: 5")[:-10], image[-10:]
        protocol.data_received(head)
        await asyncio.sleep(0.01)
        assert not wire.sent
        protocol.data_received(rest)
        await becomes(lambda: b"results" in wire.sent)
        assert asgi_ids == ["4", "5"]
        assert (await host.ask(post(image, target="/other"))).sent.startswith(b"HTTP/1.1 404")

    play(bundle, scene)


def test_a_body_above_the_setting_is_refused(bundle: Bundle, image: bytes) -> None:
    async def scene(host: Host) -> None:
        assert (await host.ask(post(image))).sent.startswith(b"HTTP/1.1 413 ")

    play(bundle, scene, max_body_bytes=len(image) - 1)


def test_an_image_too_large_for_the_event_loop_is_decoded_in_the_pool(bundle: Bundle, encode: Encode) -> None:
    async def scene(host: Host) -> None:
        large = encode(np.zeros((100, 100), np.uint8))
        wire = await host.ask(post(large, "x-request-id: large"))
        status, _, body = parts(wire.sent)
        assert (status, body["request_id"], len(body["results"])) == (b"HTTP/1.1 200 OK", "large", 1)
        assert host.count("qualms_requests_total", route="predict", code="200") == 1

    play(bundle, scene)


# Trouble


def test_a_run_that_fails_is_500_and_the_next_request_is_answered(
    bundle: Bundle, image: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(host: Host) -> None:
        assert host.state.model is not None

        def fail(*_: Any) -> None:
            raise RuntimeError("address 0xdeadbeef")

        for part in (host.state.model.engine, host.state.model.writer):
            with monkeypatch.context() as patch:
                patch.setattr(part, "run" if part is host.state.model.engine else "write", fail)
                wire = await host.ask(post(image))
            assert wire.sent.startswith(b"HTTP/1.1 500 ")
            assert b"deadbeef" not in wire.sent
        assert (await host.ask(post(image))).sent.startswith(b"HTTP/1.1 200 ")

    play(bundle, scene)


def test_what_the_queue_cannot_answer_in_time_is_429_and_what_expires_in_it_504(bundle: Bundle, image: bytes) -> None:
    async def scene(host: Host) -> None:
        gate = Gate(host.state)
        running, _ = host.connect()
        running.data_received(post(image))
        await becomes(lambda: gate.runs == 1)
        late, expired = host.connect()
        late.data_received(post(image, "x-request-timeout: 0.3"))
        assert host.state.model is not None
        host.state.model.engine.cost = CostCurve((1,), (2.5,))
        refused, wire = host.connect()
        refused.data_received(post(image, "x-request-timeout: 3"))
        await becomes(lambda: bool(wire.sent))
        assert wire.sent.startswith(b"HTTP/1.1 429 ")
        assert b"\r\nretry-after: " in wire.sent
        await asyncio.sleep(0.3)
        gate.open.set()
        await becomes(lambda: not host.tasks)
        assert expired.sent.startswith(b"HTTP/1.1 504 ")
        assert b"within its 0.3 s" in expired.sent
        assert gate.runs == 1

    play(bundle, scene)


def test_a_client_that_left_while_it_waited_is_not_run_but_counted(bundle: Bundle, image: bytes) -> None:
    async def scene(host: Host) -> None:
        gate = Gate(host.state)
        host.connect()[0].data_received(post(image))
        await becomes(lambda: gate.runs == 1)
        leaving, wire = host.connect()
        leaving.data_received(post(image))
        leaving.connection_lost(None)
        gate.open.set()
        await becomes(lambda: not host.tasks)
        assert (wire.sent, gate.runs) == (b"", 1)
        assert host.count("qualms_requests_total", route="predict", code="499") == 1

    play(bundle, scene)


def test_what_outlasts_the_grace_period_is_refused_and_not_cut(bundle: Bundle, image: bytes) -> None:
    async def scene(host: Host) -> None:
        gate = Gate(host.state)
        protocol, wire = host.connect()
        protocol.data_received(post(image))
        await becomes(lambda: gate.runs == 1)
        host.state.draining = True
        for task in host.tasks:
            task.cancel(msg="as uvicorn does")
        await becomes(lambda: not host.tasks)
        status, headers, body = parts(wire.sent)
        assert (status, body["detail"]) == (b"HTTP/1.1 503 Service Unavailable", "The service is stopping.")
        assert b"connection: close" in headers
        assert wire.closed
        gate.open.set()
        await asyncio.sleep(0.01)
        assert wire.sent.count(b"HTTP/1.1") == 1

    play(bundle, scene)


# Connections


def test_pipelined_requests_are_answered_in_order_however_they_are_cut(bundle: Bundle, image: bytes) -> None:
    ids = [f"id-{number}" for number in range(40)]
    stream = b"".join(post(image, f"x-request-id: {name}") for name in ids)

    async def scene(host: Host) -> None:
        for step in (len(stream), 700, 61):
            protocol, wire = host.connect()
            for start in range(0, len(stream), step):
                protocol.data_received(stream[start : start + step])
                await asyncio.sleep(0)
            await becomes(lambda wire=wire: wire.sent.count(b"HTTP/1.1 200 OK") == len(ids))  # type: ignore[misc]
            await becomes(lambda: not host.tasks)
            assert re.findall(rb"x-request-id: (\S+)", wire.sent) == [name.encode() for name in ids]
            assert not wire.closed

    play(bundle, scene)


def test_a_client_that_does_not_read_its_replies_has_to_wait(bundle: Bundle, image: bytes, asgi_ids: list[str]) -> None:
    async def scene(host: Host) -> None:
        protocol, wire = host.connect()
        protocol.pause_writing()
        protocol.data_received(post(image))
        await asyncio.sleep(0.05)
        assert (wire.sent, len(asgi_ids)) == (b"", 1)
        protocol.resume_writing()
        await becomes(lambda: b"results" in wire.sent)

    play(bundle, scene)


def test_requests_leave_nothing_for_the_garbage_collector(bundle: Bundle, image: bytes) -> None:
    async def scene(host: Host) -> None:
        protocol, _ = host.connect()
        for _ in range(3):
            protocol.data_received(post(image))
            await becomes(lambda: not host.tasks)
        gc.collect()
        gc.disable()
        try:
            for _ in range(50):
                protocol.data_received(post(image))
                await becomes(lambda: not host.tasks)
            assert gc.collect() < 50
        finally:
            gc.enable()

    play(bundle, scene)


def test_what_one_pass_of_the_loop_brings_is_run_together(bundle: Bundle, image: bytes) -> None:
    """Answered at once, each would be run by itself, however many wait to be read."""

    async def scene(host: Host) -> None:
        sizes = note_sizes(host.state)
        connections = [host.connect() for _ in range(6)]
        for protocol, _ in connections:
            protocol.data_received(post(image))
        await becomes(lambda: all(wire.sent for _, wire in connections) and not host.tasks)
        assert sizes == [6]

    play(bundle, scene)


def test_who_comes_alone_is_answered_at_once_but_only_the_first_of_many(bundle: Bundle, image: bytes) -> None:
    async def scene(host: Host) -> None:
        sizes = note_sizes(host.state)
        await host.ask(post(image))
        protocol, wire = host.connect()
        protocol.data_received(post(image))
        assert wire.sent.startswith(b"HTTP/1.1 200")
        await asyncio.sleep(0.01)
        connections = [host.connect() for _ in range(6)]
        for protocol, _ in connections:
            protocol.data_received(post(image))
        await becomes(lambda: all(wire.sent for _, wire in connections) and not host.tasks)
        assert sizes == [1, 1, 1, 5]

    play(bundle, scene)
