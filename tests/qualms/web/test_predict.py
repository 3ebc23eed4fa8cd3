import asyncio
import base64
import json
import re
import threading
import time
import zlib
from collections.abc import Callable, Coroutine, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pytest
from fastapi import FastAPI
from numpy.typing import NDArray
from PIL import Image
from prometheus_client import CollectorRegistry

from qualms.bundle.file import Bundle
from qualms.errors import BundleError
from qualms.images.input_spec import InputSpec
from qualms.images.preprocess import decode
from qualms.inference.batch import Expired
from qualms.inference.batcher import SHORT_SECONDS
from qualms.inference.engine import CostCurve, Engine
from qualms.settings import Settings
from qualms.web import app as app_module
from qualms.web import predict as module
from qualms.web.app import create_app
from qualms.web.problems import Problem, ProblemReply
from qualms.web.reply import PredictReply
from qualms.web.state import ServiceState

PATIENCE = 30.0
JSON = {"content-type": "application/json"}
PNG = {"content-type": "image/png"}

Draw = Callable[[int, int], NDArray[np.uint8]]
Encode = Callable[..., bytes]
Until = Callable[[Callable[[], bool]], None]
Start = Callable[..., httpx.Client]


def results(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    PredictReply.model_validate_json(response.content)
    found: list[dict[str, Any]] = response.json()["results"]
    return found


def problem(response: httpx.Response) -> ProblemReply:
    assert response.headers["content-type"] == "application/problem+json"
    found = ProblemReply.model_validate_json(response.content)
    assert found.status == response.status_code
    assert found.request_id == response.headers["x-request-id"]
    return found


def send(client: httpx.Client, image: bytes, **options: Any) -> httpx.Response:
    return client.post("/predict", content=image, headers={**PNG, **options.pop("headers", {})}, **options)


def send_json(client: httpx.Client, *images: Any) -> httpx.Response:
    return client.post("/predict", json={"images": images})


def send_form(client: httpx.Client, *images: bytes) -> httpx.Response:
    return client.post("/predict", files=[("images", (f"{place}.bin", data)) for place, data in enumerate(images)])


# Every way to send an image


@pytest.fixture
def picture(draw_images: Draw) -> NDArray[np.uint8]:
    """Grey, (6, 5), so that no format has to drop a colour."""
    return np.ascontiguousarray(draw_images(21, 1)[0, ..., 0])


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("PNG", {}),
        ("WEBP", {"lossless": True}),
        ("BMP", {}),
        ("GIF", {}),
        ("TIFF", {"compression": "tiff_lzw"}),
    ],
)
def test_the_same_pixels_give_the_same_numbers_in_every_lossless_format(
    client: httpx.Client, encode: Encode, picture: NDArray[np.uint8], kind: str, options: dict[str, Any]
) -> None:
    data = encode(picture, kind, **options)
    text = base64.b64encode(data).decode()
    want = results(send_json(client, picture.tolist()))
    ways = [
        client.post("/predict", content=data, headers={"content-type": f"image/{kind.lower()}"}),
        client.post("/predict", content=data, headers={"content-type": "application/octet-stream"}),
        send_form(client, data),
        send_json(client, text),
        send_json(client, f"data:image/{kind.lower()};base64,{text}"),
    ]
    assert [results(way) for way in ways] == [want] * len(ways)


def test_pixels_may_come_with_one_three_or_four_channels(client: httpx.Client, picture: NDArray[np.uint8]) -> None:
    colour = np.stack([picture] * 3, axis=-1)
    opaque = np.concatenate((colour, np.full((*picture.shape, 1), 255, np.uint8)), axis=-1)
    shapes = (picture, picture[..., np.newaxis], colour, opaque)
    found = results(send_json(client, *(pixels.tolist() for pixels in shapes)))
    assert found == [found[0]] * 4


def test_a_jpeg_counts_as_the_pixels_it_decodes_to(client: httpx.Client, encode: Encode, draw_images: Draw) -> None:
    data = encode(draw_images(22, 1)[0], "JPEG", quality=60)
    pixels = np.asarray(decode(data))
    jpeg = client.post("/predict", content=data, headers={"content-type": "image/jpeg"})
    assert results(jpeg) == results(send_json(client, pixels.tolist()))


def test_an_image_is_turned_upright_as_its_exif_says(
    client: httpx.Client, encode: Encode, picture: NDArray[np.uint8]
) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned: show it rotated by a quarter clockwise
    lying = np.ascontiguousarray(np.rot90(picture))
    upright, turned, ignored = (
        results(send(client, data)) for data in (encode(picture), encode(lying, exif=exif), encode(lying))
    )
    assert turned == upright
    assert turned != ignored


def test_the_first_frame_of_an_animation_is_the_image(client: httpx.Client, encode: Encode) -> None:
    dark, light = np.full((6, 5), 40, np.uint8), np.full((6, 5), 200, np.uint8)
    animated = encode(dark, "GIF", save_all=True, append_images=[Image.fromarray(light)])
    assert results(send(client, animated)) == results(send(client, encode(dark)))


def test_several_images_are_answered_in_order_as_if_each_were_alone(
    client: httpx.Client, encode: Encode, draw_images: Draw
) -> None:
    files = [encode(image) for image in draw_images(23, 6)]
    alone = [results(send(client, data))[0] for data in files]
    texts = [base64.b64encode(data).decode() for data in files]
    for together in (send_form(client, *files), send_json(client, *texts)):
        for found, want in zip(results(together), alone, strict=True):
            assert found["prediction"]["label"] == want["prediction"]["label"]
            np.testing.assert_allclose(found["dirichlet"]["alpha"], want["dirichlet"]["alpha"], rtol=1e-5)


# Where an image is decoded


@pytest.fixture
def decoders(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the threads that decoded a request's images, all of them."""
    names: list[str] = []
    decode_images = module.decode_images

    def note(*arguments: Any) -> Any:
        images = decode_images(*arguments)
        names.append(threading.current_thread().name)
        return images

    monkeypatch.setattr(module, "decode_images", note)
    return names


def test_what_could_take_long_is_decoded_on_the_pool_with_the_same_result(
    client: httpx.Client,
    encode: Encode,
    draw_images: Draw,
    decoders: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    files = [encode(image) for image in draw_images(24, 3)]
    want = results(send_form(client, *files))
    monkeypatch.setattr(module, "INLINE_BYTES", 10)
    by_bytes = results(send_form(client, *files))
    monkeypatch.undo()
    monkeypatch.setattr(module, "INLINE_PIXELS", 10)
    by_pixels = results(send_form(client, *files))
    assert by_bytes == by_pixels == want
    assert not decoders[0].startswith("qualms-decode")
    assert decoders[1].startswith("qualms-decode")


@pytest.mark.parametrize(("shape", "pooled"), [((96, 96), False), ((97, 96), True), ((96, 96, 4), True)])
def test_pixels_sent_as_json_are_weighed_as_a_whole(
    client: httpx.Client, decoders: list[str], shape: tuple[int, ...], pooled: bool
) -> None:
    results(send_json(client, np.zeros(shape, np.uint8).tolist()))
    assert [name.startswith("qualms-decode") for name in decoders] == [pooled]


def test_an_image_larger_than_what_is_decoded_at_once_goes_to_the_pool(
    client: httpx.Client, encode: Encode, decoders: list[str]
) -> None:
    results(send(client, encode(np.zeros((97, 96), np.uint8))))
    assert [name.startswith("qualms-decode") for name in decoders] == [True]


def test_what_expired_while_it_waited_for_the_pool_is_not_decoded() -> None:
    with pytest.raises(Expired):
        module.decode_images([b"never looked at"], InputSpec(height=6, width=5), 100, 0.0)


# Headers


@pytest.mark.parametrize("given", ["abc-123", "a.b:c_d-e", "x" * 128])
def test_a_request_id_comes_back(client: httpx.Client, encode: Encode, picture: NDArray[np.uint8], given: str) -> None:
    response = send(client, encode(picture), headers={"x-request-id": given})
    assert response.headers["x-request-id"] == response.json()["request_id"] == given
    assert problem(send(client, b"", headers={"x-request-id": given})).request_id == given


@pytest.mark.parametrize("given", [None, "", "with space", "x" * 129, "é"])
def test_a_request_without_a_usable_id_gets_one(
    client: httpx.Client, encode: Encode, picture: NDArray[np.uint8], given: str | None
) -> None:
    headers = {} if given is None else {"x-request-id": given.encode("latin-1")}
    response = send(client, encode(picture), headers=headers)
    assert re.fullmatch(r"[0-9a-f]{32}", response.headers["x-request-id"])
    assert response.json()["request_id"] == response.headers["x-request-id"]


def test_a_reply_says_where_its_time_went(client: httpx.Client, encode: Encode, picture: NDArray[np.uint8]) -> None:
    timing = send(client, encode(picture)).headers["server-timing"]
    assert re.fullmatch(r"queue;dur=\d+\.\d{3}, decode;dur=\d+\.\d{3}, inference;dur=\d+\.\d{3}", timing)


# Operating points


def test_a_query_chooses_another_operating_point(
    client: httpx.Client, encode: Encode, picture: NDArray[np.uint8]
) -> None:
    asked = {"score": "entropy", "target_fpr": "0.2", "guarantee": "marginal", "target_risk": "0.1"}
    (result,) = results(send(client, encode(picture), params=asked))
    assert result["ood"]["score"] == "entropy"
    assert (result["ood"]["target_fpr"], result["ood"]["guarantee"]) == (0.2, "marginal")
    assert result["trust"]["target_risk"] == 0.1
    (default,) = results(send(client, encode(picture)))
    assert (default["ood"]["score"], default["ood"]["target_fpr"]) == ("mutual_information", 0.01)
    assert default["dirichlet"] == result["dirichlet"]


def test_an_abstention_is_an_answer(client: httpx.Client, encode: Encode, draw_images: Draw) -> None:
    files = [encode(image) for image in draw_images(25, 40)]
    found = results(client.post("/predict?target_fpr=0.5", files=[("images", ("a", data)) for data in files]))
    assert {result["ood"]["flag"] for result in found} == {True, False}


@pytest.mark.parametrize(
    ("query", "field", "accepted"),
    [
        ("target_fpr=2", "target_fpr", "between 0 and 1"),
        ("target_fpr=nan", "target_fpr", "between 0 and 1"),
        ("target_fpr=1e-9", "target_fpr", "needs at least"),
        ("target_risk=1e-9", "target_risk", "needs at least"),
        ("score=surprise", "score", "accepted are entropy"),
        ("guarantee=certain", "guarantee", "confident or marginal"),
        ("target_frp=0.1", "target_frp", "score, target_fpr, guarantee, target_risk"),
        ("target_fpr=0.1&target_fpr=0.2", "target_fpr", "one value"),
    ],
)
def test_an_operating_point_that_makes_no_sense_or_has_no_support_is_422(
    client: httpx.Client, encode: Encode, picture: NDArray[np.uint8], query: str, field: str, accepted: str
) -> None:
    response = send(client, encode(picture), params=query)
    found = problem(response)
    assert (found.status, found.field) == (422, field)
    assert accepted in found.detail


# Refusals


@pytest.mark.parametrize(
    ("headers", "content", "status", "field", "said"),
    [
        (PNG, b"", 400, None, "The body is empty"),
        (JSON, b"{", 400, None, "not JSON"),
        (JSON, b"[" * 20, 400, None, "at most 16 levels"),
        (PNG, b"\x89PNG\r\n\x1a\n and no more", 400, "images[0]", "send a complete PNG, JPEG"),
        (JSON, json.dumps({"images": ["####"]}).encode(), 400, "images[0]", "not base64"),
        (PNG, b"GIF or PNG?", 415, "images[0]", "send a PNG, JPEG, WebP, BMP, GIF or TIFF file"),
        ({"content-type": "text/plain"}, b"x", 415, "Content-Type", "accepted: image/*"),
        ({}, b"x", 415, "Content-Type", "accepted: image/*"),
        (JSON, b"{}", 422, "images", "missing"),
        (JSON, b'{"images": [[[1, 2], [3]]]}', 422, "images[0]", "different lengths"),
        (JSON, b'{"images": [[[1]], [[256]]]}', 422, "images[1]", "0 to 255"),
        (JSON, b'{"images": [[[1]]], "score": "entropy"}', 422, "score", "unknown"),
        ({**PNG, "x-request-timeout": "soon"}, b"x", 422, "X-Request-Timeout", "more than 0 and at most 60"),
        ({**PNG, "x-request-timeout": "0"}, b"x", 422, "X-Request-Timeout", "more than 0 and at most 60"),
        ({**PNG, "x-request-timeout": "-1"}, b"x", 422, "X-Request-Timeout", "more than 0 and at most 60"),
        ({**PNG, "x-request-timeout": "inf"}, b"x", 422, "X-Request-Timeout", "more than 0 and at most 60"),
        ({**PNG, "x-request-timeout": "60.1"}, b"x", 422, "X-Request-Timeout", "more than 0 and at most 60"),
        ({**PNG, "x-request-timeout": "nan"}, b"x", 422, "X-Request-Timeout", "more than 0 and at most 60"),
    ],
)
def test_a_refusal_says_what_is_wrong_with_which_field(
    client: httpx.Client, headers: dict[str, str], content: bytes, status: int, field: str | None, said: str
) -> None:
    found = problem(client.post("/predict", content=content, headers=headers))
    assert (found.status, found.field) == (status, field)
    assert said in found.detail


def test_the_image_that_is_wrong_among_several_is_named(
    client: httpx.Client, encode: Encode, picture: NDArray[np.uint8]
) -> None:
    good = encode(picture)
    assert problem(send_form(client, good, good, good[:50], good)).field == "images[2]"
    assert problem(send_form(client, good, b"nonsense")).field == "images[1]"


def test_an_image_that_fails_only_once_it_is_decoded_is_the_senders_mistake(
    client: httpx.Client, encode: Encode
) -> None:
    data = encode(np.zeros((6, 5), np.uint8))
    header = data[12:29].replace(bytes([8, 0, 0, 0, 0]), bytes([8, 3, 0, 0, 0]))  # colours of a palette, and none there
    broken = data[:12] + header + zlib.crc32(header).to_bytes(4, "big") + data[33:]
    found = problem(send(client, broken))
    assert (found.status, found.field) == (400, "images[0]")
    assert "its P pixels cannot be converted to RGB" in found.detail


def test_limits_are_413_and_say_what_they_are(start_service: Start, encode: Encode, picture: NDArray[np.uint8]) -> None:
    limited = start_service(max_body_bytes=2000, max_images=2, max_pixels=500)
    good = encode(picture)
    assert len(results(send_form(limited, good, good))) == 2
    body = problem(send(limited, bytes(2001)))
    count = problem(send_form(limited, good, good, good))
    refused = [body, count]
    for side in (20, 21):
        image = np.zeros((25, side), np.uint8)
        for response in (send(limited, encode(image)), send_json(limited, image.tolist())):
            if side == 20:
                results(response)
            else:
                refused.append(problem(response))
    assert [found.status for found in refused] == [413] * 4
    assert [found.field for found in refused] == [None, "images", "images[0]", "images[0]"]
    said = ("at most 2,000 bytes", "at most 2", "21 × 25 pixels; at most 500", "21 × 25 pixels; at most 500")
    assert all(limit in found.detail for limit, found in zip(said, refused, strict=True))


def test_only_post_is_allowed(client: httpx.Client) -> None:
    response = client.get("/predict")
    assert problem(response).status == 405
    assert response.headers["allow"] == "POST"


# Time


def test_a_deadline_that_an_idle_service_cannot_meet_either_is_422_and_no_time_to_come_back(
    client: httpx.Client, encode: Encode, picture: NDArray[np.uint8]
) -> None:
    response = send(client, encode(picture), headers={"x-request-timeout": "1e-9"})
    found = problem(response)
    assert (found.status, found.field) == (422, "X-Request-Timeout")
    assert "has 1e-09 s, and its images alone take longer; accepted: X-Request-Timeout of at least 0.0" in found.detail
    assert "retry-after" not in response.headers


def test_a_deadline_that_the_queue_cannot_meet_is_429_with_a_time_to_come_back(
    start_service: Start, encode: Encode, picture: NDArray[np.uint8]
) -> None:
    state = ServiceState()
    client = start_service(state=state)
    state.tasks = lambda: 10**9
    response = send(client, encode(picture))
    assert problem(response).status == 429
    assert int(response.headers["retry-after"]) >= 1


class Gate:
    """Holds an engine's runs until it is opened; they cost so much that the runner's thread makes them."""

    def __init__(self, state: ServiceState) -> None:
        assert state.model is not None
        self._engine, self._run = state.model.engine, state.model.engine.run
        self._engine.cost = CostCurve((1,), (2 * SHORT_SECONDS,))
        self._open = threading.Event()
        self.runs: list[int] = []
        self._engine.run = self._wait  # type: ignore[method-assign]

    def _wait(self, images: NDArray[np.uint8]) -> list[NDArray[Any]]:
        self.runs.append(len(images))
        assert self._open.wait(PATIENCE)
        return self._run(images)

    def open(self) -> None:
        self._open.set()


def test_what_was_admitted_and_missed_its_deadline_is_504_and_not_run(
    start_service: Start, encode: Encode, picture: NDArray[np.uint8], until: Until
) -> None:
    state = ServiceState()
    client, image = start_service(state=state), encode(picture)
    assert state.model is not None
    gate, batcher = Gate(state), state.model.batcher
    with ThreadPoolExecutor(2) as threads:
        running = threads.submit(send, client, image)
        until(lambda: gate.runs == [1])
        late = threads.submit(send, client, image, headers={"x-request-timeout": "0.2"})
        until(lambda: batcher.depth == 1)
        job = batcher._ready[0]
        until(lambda: time.monotonic() > job.deadline)
        gate.open()
        assert running.result().status_code == 200
        found = problem(late.result())
    assert (found.status, found.detail) == (504, "The request was not answered within its 0.2 s.")
    assert gate.runs == [1]


def test_a_queue_that_is_too_long_for_the_deadline_is_429(
    start_service: Start, encode: Encode, picture: NDArray[np.uint8], until: Until
) -> None:
    state = ServiceState()
    client, image = start_service(state=state), encode(picture)
    assert state.model is not None
    gate = Gate(state)
    state.model.engine.cost = CostCurve((1,), (2.5,))
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(send, client, image)
        until(lambda: gate.runs == [1])
        response = send(client, image, headers={"x-request-timeout": "3"})
        gate.open()
        assert running.result().status_code == 200
    assert problem(response).status == 429
    assert response.headers["retry-after"] == "5", "5 s until it would be answered, half as much again, less its 3"


# Before, and when it fails


def test_until_the_model_is_loaded_predictions_are_503(
    start_service: Start, encode: Encode, picture: NDArray[np.uint8], monkeypatch: pytest.MonkeyPatch, until: Until
) -> None:
    gate = threading.Event()

    def wait(*arguments: Any) -> Any:
        assert gate.wait(PATIENCE)
        return Engine(*arguments)

    monkeypatch.setattr(app_module, "Engine", wait)
    client = start_service(ready=False)
    for response in (send(client, encode(picture)), client.get("/readyz")):
        found = problem(response)
        assert (found.status, found.detail) == (503, "The model is still loading.")
    assert client.get("/livez").json() == {"status": "alive"}
    assert client.get("/models").json() == {"models": []}
    gate.set()
    until(lambda: client.get("/readyz").status_code == 200)
    results(send(client, encode(picture)))


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (BundleError("The golden vectors are not reproduced."), "The golden vectors are not reproduced."),
        (KeyError("secret"), "The model could not be loaded; the log has the reason."),
    ],
)
def test_a_model_that_cannot_be_loaded_is_never_ready_and_says_why(
    start_service: Start, monkeypatch: pytest.MonkeyPatch, until: Until, error: Exception, said: str
) -> None:
    def fail(*_: Any) -> None:
        raise error

    state = ServiceState()
    monkeypatch.setattr(app_module, "Engine", fail)
    client = start_service(ready=False, state=state)
    until(lambda: state.failure is not None)
    for response in (send(client, b"x"), client.get("/readyz")):
        assert (response.status_code, problem(response).detail) == (503, said)


def test_a_run_that_fails_is_500_without_internals_and_the_next_one_is_answered(
    start_service: Start, encode: Encode, picture: NDArray[np.uint8], monkeypatch: pytest.MonkeyPatch
) -> None:
    state = ServiceState()
    client = start_service(state=state)
    assert state.model is not None

    def fail(_: Any) -> None:
        raise RuntimeError("address 0xdeadbeef")

    with monkeypatch.context() as patch:
        patch.setattr(state.model.engine, "run", fail)
        response = send(client, encode(picture))
    assert problem(response).status == 500
    assert "deadbeef" not in response.text
    results(send(client, encode(picture)))


# Clients that leave, and a server that has to


class Connection:
    """The server's end of a request, as uvicorn's cycle looks to an application."""

    def __init__(self, body: bytes) -> None:
        self.disconnected = False
        self.sent: list[MutableMapping[str, Any]] = []
        self._body = body

    async def receive(self) -> MutableMapping[str, Any]:
        if self.disconnected:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": self._body, "more_body": False}

    async def send(self, message: MutableMapping[str, Any]) -> None:
        self.sent.append(message)

    @property
    def scope(self) -> dict[str, Any]:
        headers = [(b"content-type", b"image/png")]
        return {"type": "http", "method": "POST", "path": "/predict", "query_string": b"", "headers": headers}


def on_its_loop(
    bundle: Bundle, scene: Callable[[FastAPI, ServiceState, CollectorRegistry], Coroutine[Any, Any, None]]
) -> None:
    """Run a scene on the application's own event loop."""

    async def whole() -> None:
        registry, state = CollectorRegistry(), ServiceState()
        settings = Settings(model=str(bundle.path), device="cpu", threads=1, decode_threads=1)
        app = create_app(settings, registry=registry, state=state)
        async with app.router.lifespan_context(app):
            await becomes(lambda: state.model is not None)
            await scene(app, state, registry)

    asyncio.run(asyncio.wait_for(whole(), PATIENCE))


async def becomes(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.002)


def test_a_client_that_left_while_it_waited_is_not_run_but_counted(
    bundle: Bundle, encode: Encode, picture: NDArray[np.uint8]
) -> None:
    async def scene(app: FastAPI, state: ServiceState, registry: CollectorRegistry) -> None:
        gate, image = Gate(state), encode(picture)
        assert state.model is not None
        batcher = state.model.batcher
        first, second = Connection(image), Connection(image)
        running = asyncio.create_task(app(first.scope, first.receive, first.send))
        await becomes(lambda: gate.runs == [1])
        leaving = asyncio.create_task(app(second.scope, second.receive, second.send))
        await becomes(lambda: batcher.depth == 1)
        second.disconnected = True
        gate.open()
        await asyncio.gather(running, leaving)
        assert first.sent[0]["status"] == 200
        assert second.sent == []
        assert gate.runs == [1]
        assert registry.get_sample_value("qualms_rejected_total", {"reason": "disconnected"}) == 1
        assert registry.get_sample_value("qualms_requests_total", {"route": "predict", "code": "499"}) == 1

    on_its_loop(bundle, scene)


def test_a_client_that_left_before_its_body_had_come_is_counted(bundle: Bundle) -> None:
    async def scene(app: FastAPI, state: ServiceState, registry: CollectorRegistry) -> None:
        connection = Connection(b"")
        connection.disconnected = True
        await app(connection.scope, connection.receive, connection.send)
        assert connection.sent == []
        assert registry.get_sample_value("qualms_rejected_total", {"reason": "disconnected"}) == 1

    on_its_loop(bundle, scene)


def test_a_request_that_outlasts_the_grace_period_is_refused_and_not_cut(
    bundle: Bundle, encode: Encode, picture: NDArray[np.uint8]
) -> None:
    async def scene(app: FastAPI, state: ServiceState, registry: CollectorRegistry) -> None:
        gate, connection = Gate(state), Connection(encode(picture))
        task = asyncio.create_task(app(connection.scope, connection.receive, connection.send))
        await becomes(lambda: gate.runs == [1])
        state.draining = True
        task.cancel()
        await task
        gate.open()
        start, body = connection.sent
        assert start["status"] == 503
        assert (b"connection", b"close") in start["headers"]
        assert json.loads(body["body"])["detail"] == "The service is stopping."
        assert registry.get_sample_value("qualms_rejected_total", {"reason": "draining"}) == 1

    on_its_loop(bundle, scene)


def test_a_problem_raised_on_the_pool_is_the_same_problem(encode: Encode) -> None:
    data = encode(np.arange(30, dtype=np.uint8).reshape(6, 5))[:50]
    with pytest.raises(Problem) as caught:
        module.decode_images([data], InputSpec(height=6, width=5), 100)
    assert (caught.value.status, caught.value.field) == (400, "images[0]")
