"""POST /predict behind the real connections, without sockets: both entrances of the handler behave alike.

Our own server calls the handler directly, without a task or ASGI messages; other servers call it through ASGI.
"""

import asyncio
import base64
import gc
import json
import re
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry

from qualms.bundle.file import Bundle
from qualms.http1.connection import Connection
from qualms.http1.connections import Connections
from qualms.http1.messages import REASONS as PROTOCOL_REASONS
from qualms.images.worker_pool import NoWorkerError, WorkerPool
from qualms.inference.batcher import SHORT_SECONDS
from qualms.inference.cost import CostCurve
from qualms.inference.decoding import Decoder, Limits
from qualms.settings import Settings
from qualms.telemetry.metrics import ServiceMetrics
from qualms.web.app import Application, create_app
from qualms.web.lifecycle import connections
from qualms.web.predict import INLINE_FILE_BYTES, REASONS, STATUSES, PredictHandler
from qualms.web.served_model import ServedModel
from qualms.web.state import ServiceState

TIMEOUT = 30.0
LARGE = (100, 100)
"""height and width of an image that is too large to be decoded on the event loop"""

Draw = Callable[[int, int], NDArray[np.uint8]]
Encode = Callable[..., bytes]


class Wire:
    """The server's transport of one connection."""

    def __init__(self) -> None:
        self.sent = b""
        self.closed = False
        self.reading = True

    def write(self, data: bytes) -> None:
        self.sent += data

    def write_eof(self) -> None:
        self.closed = True

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return False

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def set_write_buffer_limits(self, high: int | None = None) -> None:
        pass

    def get_extra_info(self, _: str, default: Any = None) -> Any:
        return default


class Host:
    """The application behind connections."""

    def __init__(
        self, made: Connections, app: Application, settings: Settings, registry: CollectorRegistry, state: ServiceState
    ) -> None:
        assert state.model is not None
        self.model: ServedModel = state.model
        self.settings, self.state, self.registry = settings, state, registry
        self.app, self.connections = app, made
        made.start()

    def use_direct(self, direct: Callable[[Any], bool]) -> None:
        """Replace the application's direct entrance."""
        self.connections.direct = direct

    def use_asgi(self) -> None:
        """Answer all requests through ASGI."""
        self.use_direct(lambda _: False)

    @property
    def idle(self) -> bool:
        """Whether no request is in progress."""
        return not self.connections.in_progress and not self.connections.tasks and not self.connections.busy

    def connect(self) -> tuple[Connection, Wire]:
        connection, wire = Connection(self.connections), Wire()
        connection.connection_made(wire)  # type: ignore[arg-type]
        return connection, wire

    def send(self, request: bytes) -> Wire:
        """Send a request on a new connection."""
        connection, wire = self.connect()
        connection.data_received(request)
        return wire

    async def reply(self, request: bytes) -> bytes:
        """The reply to a request on a new connection."""
        return (await self.answered(request)).sent

    async def answered(self, request: bytes) -> Wire:
        """The connection of a request that was answered."""
        wire = self.send(request)
        await becomes(lambda: bool(wire.sent) and self.idle)
        return wire

    def count(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(name, labels)


async def becomes(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds."""
    while not condition():
        await asyncio.sleep(0.002)


Scene = Callable[[Host], Coroutine[Any, Any, None]]
Play = Callable[..., None]


def play(bundle: Bundle, scene: Scene, **options: Any) -> None:
    """Run a scene with a host whose model is loaded, on the application's event loop."""

    async def whole() -> None:
        registry, state = CollectorRegistry(), ServiceState()
        values = {"model": str(bundle.path), "device": "cpu", "threads": 1, "decode_threads": 1, **options}
        settings = Settings(**values)
        app = create_app(settings, registry=registry, state=state)
        made = connections(app, state, settings)
        async with app.router.lifespan_context(app):
            await becomes(lambda: state.model is not None)
            await scene(Host(made, app, settings, registry, state))

    asyncio.run(asyncio.wait_for(whole(), TIMEOUT))


@pytest.fixture(params=["direct", "asgi"])
def play_both(request: pytest.FixtureRequest, bundle: Bundle) -> Play:
    """`play` for tests that hold for both entrances."""

    def play_one(scene: Scene, **options: Any) -> None:
        async def prepared(host: Host) -> None:
            if request.param == "asgi":
                host.use_asgi()
            await scene(host)

        play(bundle, prepared, **options)

    return play_one


class HeldRuns:
    """Holds the model's runs, which are on the runner's thread, until they are released."""

    def __init__(self, host: Host) -> None:
        self._engine = host.model.engine
        self._run = self._engine.run
        self._released = threading.Event()
        self.sizes: list[int] = []
        self._engine.run = self._wait  # type: ignore[method-assign]
        self.set_cost(2 * SHORT_SECONDS)

    def set_cost(self, seconds: float) -> None:
        """Seconds that one image is expected to take."""
        self._engine.cost = CostCurve((1,), (seconds,))

    def release(self) -> None:
        self._released.set()

    def _wait(self, images: NDArray[np.uint8]) -> Any:
        self.sizes.append(len(images))
        assert self._released.wait(TIMEOUT)
        return self._run(images)


def record_sizes(host: Host, max_batch: int = 8) -> list[int]:
    """The number of images of each run from now on; a run has at most `max_batch`, whatever the engine learns."""
    engine, sizes = host.model.engine, list[int]()
    run, engine.max_batch = engine.run, max_batch

    def recorded(images: NDArray[np.uint8]) -> Any:
        sizes.append(len(images))
        outputs = run(images)
        engine.max_batch = max_batch
        return outputs

    engine.run = recorded  # type: ignore[method-assign]
    return sizes


@pytest.fixture
def image(encode: Encode, draw_images: Draw) -> bytes:
    return encode(draw_images(71, 1)[0])


@pytest.fixture
def large_image(encode: Encode) -> bytes:
    return encode(np.zeros(LARGE, np.uint8))


@pytest.fixture
def asgi_ids(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ids of the requests that were answered through ASGI."""
    ids: list[str] = []
    answer = PredictHandler.__call__

    async def recorded(self: PredictHandler, scope: Any, receive: Any, send: Any) -> None:
        ids.append(dict(scope["headers"]).get(b"x-request-id", b"").decode())
        await answer(self, scope, receive, send)

    monkeypatch.setattr(PredictHandler, "__call__", recorded)
    return ids


@pytest.fixture
def decode_threads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The name of the thread that decoded each image."""
    names: list[str] = []
    decode_one = Decoder._decode_one

    def recorded(*args: Any, **options: Any) -> Any:
        names.append(threading.current_thread().name.rpartition("_")[0])
        return decode_one(*args, **options)

    monkeypatch.setattr(Decoder, "_decode_one", recorded)
    return names


def post(body: bytes, *headers: str, target: str = "/predict", version: str = "1.1", kind: str = "image/png") -> bytes:
    lines = [f"POST {target} HTTP/{version}", "host: x", f"content-type: {kind}", f"content-length: {len(body)}"]
    return "\r\n".join([*lines, *headers, "", ""]).encode() + body


def parts(reply: bytes) -> tuple[bytes, list[bytes], Any]:
    """Status line, headers and body, without dates and durations."""
    head, _, body = reply.partition(b"\r\n\r\n")
    status, *headers = re.sub(rb"dur=[0-9.]+", b"dur", head).split(b"\r\n")
    return status, sorted(line for line in headers if not line.startswith(b"date:")), json.loads(body)


# Equal replies


@pytest.mark.parametrize("alpha", ["", "top10", "all", "none", "top5"])
@pytest.mark.parametrize("which", ["bundle", "many_classes_bundle"])
def test_the_detail_of_alpha_is_the_same_by_both_entrances(
    request: pytest.FixtureRequest, image: bytes, asgi_ids: list[str], which: str, alpha: str
) -> None:
    async def scene(host: Host) -> None:
        target = f"/predict?alpha={alpha}" if alpha else "/predict"
        direct = await host.reply(post(image, "x-request-id: a", target=target))
        host.use_asgi()
        asgi = await host.reply(post(image, "x-request-id: a", target=target))
        assert asgi_ids == ["a"]
        assert parts(direct) == parts(asgi)
        status, _, reply = parts(direct)
        if alpha == "top5":
            assert status.split()[1] == b"422"
            assert (reply["field"], reply["accepted"]) == ("alpha", "top10, all, none")
            return
        classes = len(host.model.bundle.manifest.classes)
        entries = {"top10": ["top", "precision"], "all": ["alpha", "precision"], "none": ["precision"]}
        dirichlet = reply["results"][0]["dirichlet"]
        assert list(dirichlet) == entries[alpha or ("all" if classes <= 100 else "top10")]
        assert len(dirichlet.get("alpha", dirichlet.get("top", []))) in (0, min(classes, 10), classes)

    play(request.getfixturevalue(which), scene)


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
def test_direct_and_asgi_replies_are_equal(
    bundle: Bundle, image: bytes, asgi_ids: list[str], headers: list[str], version: str, kind: str
) -> None:
    async def scene(host: Host) -> None:
        request = post(image, "x-request-id: a", *headers, version=version, kind=kind)
        direct = await host.answered(request)
        assert asgi_ids == []
        host.use_asgi()
        asgi = await host.answered(request)
        assert asgi_ids == ["a"]
        assert parts(direct.sent) == parts(asgi.sent)
        assert direct.closed == asgi.closed == (version == "1.0" or "connection: close" in headers)

    play(bundle, scene)


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (post(b"", "x-request-id: a"), 400),
        (post(b"\x89PNG\r\n\x1a\n and no more", "x-request-id: a"), 400),
        (post(b'{"images": []}', "x-request-id: a", kind="application/json"), 422),
        (post(b"x", "x-request-id: a", kind="text/plain"), 415),
        (post(bytes(40_000), "x-request-id: a"), 415),
        (post(b"x", "x-request-id: a", target="/predict?target=1"), 422),
        (post(b"x", "x-request-id: a", target="/predict?target_fpr=1e-9"), 422),
    ],
)
def test_direct_and_asgi_problems_are_equal(bundle: Bundle, asgi_ids: list[str], request_: bytes, status: int) -> None:
    async def scene(host: Host) -> None:
        direct = await host.reply(request_)
        assert asgi_ids == []
        assert direct.startswith(b"HTTP/1.1 %d " % status)
        host.use_asgi()
        assert parts(direct) == parts(await host.reply(request_))
        assert asgi_ids == ["a"]

    play(bundle, scene)


def test_direct_and_asgi_problems_of_a_damaged_image_are_equal(
    bundle: Bundle, image: bytes, asgi_ids: list[str]
) -> None:
    async def scene(host: Host) -> None:
        request = post(image[:45] + bytes(10) + image[55:], "x-request-id: a")
        direct = await host.reply(request)
        assert asgi_ids == []
        assert direct.startswith(b"HTTP/1.1 400 ")
        host.use_asgi()
        assert parts(direct) == parts(await host.reply(request))

    play(bundle, scene)


def test_an_operating_point_and_several_images_are_answered_directly(
    bundle: Bundle, image: bytes, asgi_ids: list[str]
) -> None:
    async def scene(host: Host) -> None:
        body = json.dumps({"images": 3 * [base64.b64encode(image).decode()]}).encode()
        request = post(body, target="/predict?target_fpr=0.1&guarantee=marginal", kind="application/json")
        results = parts(await host.reply(request))[2]["results"]
        assert [result["ood"]["target_fpr"] for result in results] == [0.1, 0.1, 0.1]
        assert asgi_ids == []

    play(bundle, scene)


def test_a_request_that_arrives_in_pieces_is_answered(play_both: Play, image: bytes) -> None:
    async def scene(host: Host) -> None:
        expecting, rest = post(image, "x-request-id: 4", "expect: 100-continue"), image[-10:]
        for head in (expecting[: -len(image)], post(image, "x-request-id: 5")[: -len(image)]):
            connection, wire = host.connect()
            connection.data_received(head)
            await asyncio.sleep(0.01)
            assert wire.sent == (b"HTTP/1.1 100 Continue\r\n\r\n" if head in expecting else b"")
            connection.data_received(image[:-10])
            await asyncio.sleep(0.01)
            connection.data_received(rest)
            await becomes(lambda wire=wire: b"results" in wire.sent)  # type: ignore[misc]
        assert (await host.reply(post(image, target="/other"))).startswith(b"HTTP/1.1 404 ")

    play_both(scene)


def test_a_body_above_the_limit_is_413(play_both: Play, image: bytes) -> None:
    async def scene(host: Host) -> None:
        assert (await host.reply(post(image))).startswith(b"HTTP/1.1 413 ")

    play_both(scene, max_body_bytes=len(image) - 1)


# Decoding


@pytest.mark.parametrize("kind", ["TIFF", "GIF", "BMP", "WEBP"])
def test_files_that_are_not_plain_are_decoded_in_workers(
    play_both: Play, encode: Encode, draw_images: Draw, decode_threads: list[str], kind: str
) -> None:
    async def scene(host: Host) -> None:
        assert (await host.reply(post(encode(draw_images(71, 1)[0], kind)))).startswith(b"HTTP/1.1 200 ")
        assert decode_threads == ["qualms-worker"]

    play_both(scene)


def test_an_image_too_large_for_the_event_loop_is_decoded_in_the_pool(
    play_both: Play, large_image: bytes, decode_threads: list[str]
) -> None:
    async def scene(host: Host) -> None:
        status, _, body = parts(await host.reply(post(large_image, "x-request-id: large")))
        assert (status, body["request_id"], len(body["results"])) == (b"HTTP/1.1 200 OK", "large", 1)
        assert decode_threads == ["qualms-decode"]
        assert host.count("qualms_requests_total", route="predict", code="200") == 1

    play_both(scene)


def test_a_large_image_that_the_queue_cannot_answer_in_time_is_not_decoded(
    play_both: Play, image: bytes, large_image: bytes, decode_threads: list[str]
) -> None:
    async def scene(host: Host) -> None:
        held = HeldRuns(host)
        host.send(post(image))
        await becomes(lambda: held.sizes == [1])
        held.set_cost(2.5)
        wire = host.send(post(large_image, "x-request-timeout: 3"))
        await becomes(lambda: bool(wire.sent))
        held.release()
        assert wire.sent.startswith(b"HTTP/1.1 429 ")
        assert "qualms-decode" not in decode_threads

    play_both(scene)


def test_a_large_image_on_an_idle_service_is_not_delayed_by_itself(play_both: Play, large_image: bytes) -> None:
    """Counted as one more image ahead, it would need three times as long: two images and the safety factor of 1.5."""

    async def scene(host: Host) -> None:
        host.model.engine.cost = CostCurve((1,), (10.0,))
        reply = await host.reply(post(large_image, "x-request-timeout: 15"))
        assert reply.startswith(b"HTTP/1.1 200 ")

    play_both(scene)


@pytest.fixture
def held_decoding(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Holds decoding in the pool; call it to continue."""
    released = threading.Event()
    decode_one = Decoder._decode_one

    def held(*args: Any, **options: Any) -> Any:
        assert released.wait(TIMEOUT)
        return decode_one(*args, **options)

    monkeypatch.setattr(Decoder, "_decode_one", held)
    return released.set


def test_a_request_that_expires_while_it_waits_for_the_pool_is_504_and_not_decoded(
    play_both: Play, encode: Encode, draw_images: Draw, held_decoding: Callable[[], None]
) -> None:
    async def scene(host: Host) -> None:
        good = encode(draw_images(71, 1)[0], "TIFF")
        running = host.send(post(good))
        await asyncio.sleep(0.01)
        expired = host.send(post(good[:60], "x-request-timeout: 0.2"))  # if it were decoded, it would be 400
        await asyncio.sleep(0.25)
        held_decoding()
        await becomes(lambda: host.idle)
        assert running.sent.startswith(b"HTTP/1.1 200 ")
        assert expired.sent.startswith(b"HTTP/1.1 504 ")

    play_both(scene)


def test_images_being_decoded_are_counted_only_until_decoding_ends(
    play_both: Play, encode: Encode, draw_images: Draw, large_image: bytes
) -> None:
    async def scene(host: Host) -> None:
        good = encode(draw_images(71, 1)[0], "TIFF")
        for body, status in ((good, 200), (good[:60], 400), (large_image, 200)):
            assert (await host.reply(post(body))).startswith(b"HTTP/1.1 %d " % status)
        wire = host.send(post(good))
        await asyncio.sleep(0)
        host.connections.cancel()
        await becomes(lambda: host.idle)
        assert wire.sent
        rows = 10_000  # images still counted as being decoded would need further runs
        idle = host.model.batcher.admission.cost(rows)
        await becomes(lambda: host.model.batcher.admission.predicted_wait(rows) == idle)

    play_both(scene)


def test_a_decoder_that_was_closed_fails_the_request_alone(
    bundle: Bundle, image: bytes, large_image: bytes, encode: Encode, draw_images: Draw
) -> None:
    async def scene(host: Host) -> None:
        pool = ThreadPoolExecutor(1)
        pool.shutdown()
        decoder = Decoder(1, Limits(2**24, 2**14, 2**28))
        decoder.close()
        metrics = ServiceMetrics(CollectorRegistry(), STATUSES, REASONS, PROTOCOL_REASONS)
        host.use_direct(PredictHandler(host.settings, host.state, metrics, pool, decoder).direct)
        for body in (encode(draw_images(71, 1)[0], "TIFF"), large_image):
            assert (await host.reply(post(body))).startswith(b"HTTP/1.1 503 ")
        assert (await host.reply(post(image))).startswith(b"HTTP/1.1 200 ")
        admission = host.model.batcher.admission
        assert admission.predicted_wait(1) == admission.cost(1)

    play(bundle, scene)


def test_without_worker_processes_the_reply_is_503(
    play_both: Play, encode: Encode, draw_images: Draw, image: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: WorkerPool) -> None:
        raise NoWorkerError("No process can be started.")

    monkeypatch.setattr(WorkerPool, "_fork", refuse)

    async def scene(host: Host) -> None:
        assert (await host.reply(post(encode(draw_images(71, 1)[0], "TIFF")))).startswith(b"HTTP/1.1 503 ")
        assert host.count("qualms_rejected_total", reason="no_worker") == 1
        assert (await host.reply(post(image))).startswith(b"HTTP/1.1 200 ")

    play_both(scene)


# Failures


@pytest.mark.parametrize("part", ["run", "write"])
def test_an_internal_error_is_500_and_the_next_request_is_answered(
    play_both: Play, image: bytes, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("address 0xdeadbeef")

    async def scene(host: Host) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(host.model.engine if part == "run" else host.model.writer, part, fail)
            reply = await host.reply(post(image))
        assert reply.startswith(b"HTTP/1.1 500 ")
        assert b"deadbeef" not in reply
        assert (await host.reply(post(image))).startswith(b"HTTP/1.1 200 ")

    play_both(scene)


# Deadlines and overload


def test_a_request_that_expires_in_the_queue_is_504_and_not_run(play_both: Play, image: bytes) -> None:
    async def scene(host: Host) -> None:
        held = HeldRuns(host)
        running = host.send(post(image))
        await becomes(lambda: held.sizes == [1])
        expired = host.send(post(image, "x-request-timeout: 0.3"))
        await becomes(lambda: host.model.batcher.depth == 1)
        await asyncio.sleep(0.35)
        held.release()
        await becomes(lambda: host.idle)
        assert running.sent.startswith(b"HTTP/1.1 200 ")
        status, _, body = parts(expired.sent)
        assert status == b"HTTP/1.1 504 Gateway Timeout"
        assert body["detail"] == "The request was not answered within its 0.3 s."
        assert held.sizes == [1]

    play_both(scene)


def test_a_queue_too_long_for_the_deadline_is_429_with_retry_after(play_both: Play, image: bytes) -> None:
    async def scene(host: Host) -> None:
        held = HeldRuns(host)
        held.set_cost(2.5)
        running = host.send(post(image))
        await becomes(lambda: held.sizes == [1])
        refused = host.send(post(image, "x-request-timeout: 3"))
        await becomes(lambda: bool(refused.sent))
        held.release()
        await becomes(lambda: host.idle)
        assert running.sent.startswith(b"HTTP/1.1 200 ")
        status, headers, _ = parts(refused.sent)
        assert status == b"HTTP/1.1 429 Too Many Requests"
        assert b"retry-after: 9" in headers, "7.5 s until the answer, times the safety factor of 1.5, minus its 3 s"

    play_both(scene)


def test_an_overloaded_service_refuses_before_it_parses_the_body(play_both: Play, image: bytes) -> None:
    async def scene(host: Host) -> None:
        held = HeldRuns(host)
        host.send(post(image))
        await becomes(lambda: held.sizes == [1])
        held.set_cost(2.5)
        wire = host.send(post(b"{ this is not JSON", "x-request-timeout: 3", kind="application/json"))
        await becomes(lambda: bool(wire.sent))
        held.release()
        assert wire.sent.startswith(b"HTTP/1.1 429 ")
        assert host.count("qualms_rejected_total", reason="overload") == 1

    play_both(scene)


# Disconnects and shutdown


def test_a_client_that_disconnects_while_waiting_is_not_run_but_counted_as_499(bundle: Bundle, image: bytes) -> None:
    async def scene(host: Host) -> None:
        held = HeldRuns(host)
        running = host.send(post(image))
        await becomes(lambda: held.sizes == [1])
        protocol, wire = host.connect()
        protocol.data_received(post(image))
        await becomes(lambda: host.model.batcher.depth == 1)
        protocol.connection_lost(None)
        held.release()
        await becomes(lambda: host.idle)
        assert running.sent.startswith(b"HTTP/1.1 200 ")
        assert (wire.sent, held.sizes) == (b"", [1])
        assert host.count("qualms_requests_total", route="predict", code="499") == 1
        assert host.count("qualms_rejected_total", reason="disconnected") == 1

    play(bundle, scene)


def test_a_client_that_disconnects_before_its_body_arrived_is_counted_as_499(play_both: Play, image: bytes) -> None:
    async def scene(host: Host) -> None:
        protocol, wire = host.connect()
        protocol.data_received(post(image + bytes(100_000))[:-10])
        await becomes(lambda: host.state.bodies.used > 0)
        protocol.connection_lost(None)
        await becomes(lambda: host.idle)
        assert wire.sent == b""
        assert host.state.bodies.used == 0
        assert host.count("qualms_requests_total", route="predict", code="499") == 1
        assert host.count("qualms_rejected_total", reason="disconnected") == 1

    play_both(scene)


def test_a_disconnect_is_noticed_while_a_request_with_a_large_body_waits(play_both: Play, image: bytes) -> None:
    """A transport that does not read reports no disconnect."""

    async def scene(host: Host) -> None:
        held = HeldRuns(host)
        wire = host.send(post(image + bytes(100_000)))
        await becomes(lambda: held.sizes == [1])
        assert wire.reading
        held.release()
        await becomes(lambda: host.idle)
        assert wire.sent.startswith(b"HTTP/1.1 200 ")

    play_both(scene)


def test_an_idle_connection_holds_no_memory_of_bodies(play_both: Play, image: bytes) -> None:
    async def scene(host: Host) -> None:
        protocol, wire = host.connect()
        protocol.data_received(post(image + bytes(100_000)))
        await becomes(lambda: bool(wire.sent) and host.idle)
        assert host.state.bodies.used == 0
        assert not any(isinstance(one, bytes) and len(one) > 50_000 for one in gc.get_referents(protocol))

    play_both(scene)


async def check_grace_period(host: Host, wire: Wire) -> None:
    """Cancel the only request, as the server does at the end of the grace period."""
    host.state.draining = host.connections.draining = True
    host.connections.cancel()
    await becomes(lambda: host.idle)
    status, headers, body = parts(wire.sent)
    assert (status, body["detail"]) == (b"HTTP/1.1 503 Service Unavailable", "The service is stopping.")
    assert b"connection: close" in headers
    assert wire.closed
    assert host.count("qualms_rejected_total", reason="draining") == 1


async def check_no_second_reply(host: Host, wire: Wire) -> None:
    await asyncio.sleep(0.02)
    assert wire.sent.count(b"HTTP/1.1") == 1
    assert host.count("qualms_requests_total", route="predict", code="200") == 0


def test_a_run_that_outlasts_the_grace_period_is_503(play_both: Play, image: bytes) -> None:
    async def scene(host: Host) -> None:
        held = HeldRuns(host)
        wire = host.send(post(image))
        await becomes(lambda: held.sizes == [1])
        await check_grace_period(host, wire)
        held.release()
        await check_no_second_reply(host, wire)

    play_both(scene)


def test_decoding_that_outlasts_the_grace_period_is_503(
    play_both: Play, encode: Encode, draw_images: Draw, held_decoding: Callable[[], None]
) -> None:
    async def scene(host: Host) -> None:
        sizes = record_sizes(host)
        wire = host.send(post(encode(draw_images(71, 1)[0], "TIFF")))
        await asyncio.sleep(0.02)
        await check_grace_period(host, wire)
        held_decoding()
        await check_no_second_reply(host, wire)
        assert sizes == []

    play_both(scene)


@pytest.mark.parametrize("kind", ["image/png", "text/plain"])
def test_while_draining_every_reply_closes_its_connection(play_both: Play, image: bytes, kind: str) -> None:
    async def scene(host: Host) -> None:
        host.state.draining = host.connections.draining = True
        wire = await host.answered(post(image, kind=kind))
        assert parts(wire.sent)[1].count(b"connection: close") == 1
        assert wire.closed

    play_both(scene)


# Connections


def test_pipelined_requests_are_answered_in_order_in_pieces_of_any_size(bundle: Bundle, image: bytes) -> None:
    ids = [f"id-{number}" for number in range(40)]
    stream = b"".join(post(image, f"x-request-id: {name}") for name in ids)

    async def scene(host: Host) -> None:
        for step in (len(stream), 700, 61):
            protocol, wire = host.connect()
            for start in range(0, len(stream), step):
                protocol.data_received(stream[start : start + step])
                await asyncio.sleep(0)
            await becomes(lambda wire=wire: wire.sent.count(b"HTTP/1.1 200 OK") == len(ids))  # type: ignore[misc]
            await becomes(lambda: host.idle)
            assert re.findall(rb"x-request-id: (\S+)", wire.sent) == [name.encode() for name in ids]
            assert not wire.closed

    play(bundle, scene)


def test_a_request_is_not_started_while_the_client_does_not_read(bundle: Bundle, image: bytes) -> None:
    async def scene(host: Host) -> None:
        connection, wire = host.connect()
        connection.pause_writing()
        connection.data_received(post(image))
        await asyncio.sleep(0.05)
        assert wire.sent == b""
        connection.resume_writing()
        await becomes(lambda: b"results" in wire.sent)

    play(bundle, scene)


@pytest.mark.parametrize(
    ("body", "target", "kind", "status"),
    [
        ("small", "/predict", "image/png", 200),
        ("large", "/predict", "image/png", 200),
        ("damaged", "/predict", "image/png", 400),
        ("II*\0 damaged", "/predict", "image/tiff", 400),
        ("{", "/predict", "application/json", 400),
        ("too large", "/predict", "image/png", 413),
        ("too large, parsed in the pool", "/predict", "image/jpeg", 413),
        ("text", "/predict", "image/png", 415),
        ("text", "/predict?x=1", "image/png", 422),
        ("small", "/predict?target_fpr=1e-9", "image/png", 422),
        ("overload", "/predict", "image/png", 429),
    ],
)
def test_requests_leave_no_reference_cycles(
    play_both: Play, encode: Encode, image: bytes, large_image: bytes, body: str, target: str, kind: str, status: int
) -> None:
    bodies = {"small": image, "large": large_image, "damaged": image[:45] + bytes(10) + image[55:], "overload": image}
    bodies["too large"] = encode(np.zeros((200, 200), np.uint8))
    bodies["too large, parsed in the pool"] = encode(np.zeros((200, 200), np.uint8), "JPEG") + bytes(INLINE_FILE_BYTES)
    request = post(bodies.get(body, body.encode()), target=target, kind=kind)

    async def scene(host: Host) -> None:
        if body == "overload":
            host.state.in_progress = lambda: 10**9
        protocol, wire = host.connect()

        async def send(times: int) -> None:
            for _ in range(times):
                wire.sent = b""
                protocol.data_received(request)
                await becomes(lambda: bool(wire.sent) and host.idle)
                assert wire.sent.startswith(b"HTTP/1.1 %d " % status)

        await send(3)
        gc.collect()
        gc.disable()
        try:
            await send(50)
            assert gc.collect() < 50
        finally:
            gc.enable()

    play_both(scene, max_pixels=20_000)


# Batching


def test_requests_of_one_loop_iteration_are_run_together(bundle: Bundle, image: bytes) -> None:
    async def scene(host: Host) -> None:
        sizes = record_sizes(host)
        wires = [host.send(post(image)) for _ in range(6)]
        await becomes(lambda: all(wire.sent for wire in wires) and host.idle)
        assert sizes == [6]

    play(bundle, scene)


def test_a_lone_request_is_answered_at_once_but_of_several_only_the_first(bundle: Bundle, image: bytes) -> None:
    async def scene(host: Host) -> None:
        sizes = record_sizes(host)
        await host.reply(post(image))
        assert host.send(post(image)).sent.startswith(b"HTTP/1.1 200 ")
        await asyncio.sleep(0.01)
        wires = [host.send(post(image)) for _ in range(6)]
        await becomes(lambda: all(wire.sent for wire in wires) and host.idle)
        assert sizes == [1, 1, 1, 5]

    play(bundle, scene)
