import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from io import BytesIO

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from qualms.demo.drift import dose_at
from qualms.demo.traffic import Sender, Tally, TrafficError, stream
from qualms.images.encodings import parse_encoding
from qualms.images.input_spec import InputSpec
from qualms.images.observed import observe

IMAGE = np.arange(28 * 28, dtype=np.uint8).reshape(28, 28)


class Clock:
    """A clock that advances only when `sleep` is called or `now` is set."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def run(
    clock: Clock, flags: list[bool | None], *, work: float = 0.0, seconds: float = 10.0, rate: float = 2.0
) -> tuple[list[NDArray[np.uint8]], list[tuple[float, Tally]]]:
    """The images sent and the reports made if the service returns these flags in rotation."""
    sent: list[NDArray[np.uint8]] = []
    reports: list[tuple[float, Tally]] = []

    def send(image: NDArray[np.uint8]) -> bool | None:
        sent.append(image)
        clock.now += work
        return flags[len(sent) % len(flags)]

    replies = stream(
        send,
        rate=rate,
        period=10.0,
        seconds=seconds,
        report=lambda dose, tally: reports.append((dose, tally)),
        report_seconds=5.0,
        clock=clock,
        sleep=clock.sleep,
    )
    assert replies == sum(tally.sent - tally.failed for _, tally in reports)
    return sent, reports


def test_images_are_sent_at_the_rate_and_replies_are_counted() -> None:
    clock = Clock()
    sent, reports = run(clock, [True, False, None, False])
    assert len(sent) == 20
    assert sum(clock.slept) == pytest.approx(9.5)
    assert [tally for _, tally in reports] == [Tally(10, 2, 3), Tally(10, 3, 2)]


def test_images_since_the_last_report_are_reported_at_the_end() -> None:
    sent, reports = run(Clock(), [True, None], seconds=12.5)
    assert len(sent) == 25
    assert [tally for _, tally in reports] == [Tally(10, 5, 5), Tally(10, 5, 5), Tally(5, 2, 3)]
    assert reports[-1][0] == dose_at(12.0, 10.0) > 0


def test_there_is_no_report_if_nothing_was_sent() -> None:
    assert run(Clock(), [True], seconds=0.0) == ([], [])


def test_a_slow_service_does_not_get_a_burst_afterwards() -> None:
    clock = Clock()
    sent, _ = run(clock, [False], work=5.0, seconds=60.0)
    assert len(sent) <= 13
    assert clock.slept == []


def test_images_drift_in_the_middle_of_the_period_and_are_clean_before_and_after() -> None:
    sent, _ = run(Clock(), [False], rate=4.0)
    clean = [bool((image == 0).mean() > 0.5) for image in sent]
    assert clean[:2] == [True, True]
    assert not any(clean[5:13])
    assert all(clean[17:])


class Handler(BaseHTTPRequestHandler):
    status = 200
    requests: list[tuple[str, bytes]]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.requests.append((self.path, body))
        reply = json.dumps({"results": [{"ood": {"flag": True}}]}).encode()
        self.send_response(self.status)
        self.send_header("content-length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, *_: object) -> None:
        """Print nothing on stderr."""


@pytest.fixture
def server() -> Iterator[tuple[str, type[Handler]]]:
    handler = type("RecordingHandler", (Handler,), {"requests": []})
    with HTTPServer(("127.0.0.1", 0), handler) as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}", handler
        running.shutdown()
        thread.join()


def sender(url: str, as_sent: str = "png") -> Sender:
    return Sender(url, parse_encoding(as_sent), np.random.default_rng(0))


def test_a_png_has_the_pixels_of_the_image_and_the_flag_is_returned(server: tuple[str, type[Handler]]) -> None:
    url, handler = server
    assert sender(f"{url}/behind/a/proxy/")(IMAGE) is True
    ((path, body),) = handler.requests
    assert path == "/behind/a/proxy/predict"
    assert np.array_equal(np.asarray(Image.open(BytesIO(body))), IMAGE)


def test_failed_requests_return_none_and_sending_continues(server: tuple[str, type[Handler]]) -> None:
    url, handler = server
    send = sender(url)
    handler.status = 429
    assert send(IMAGE) is None
    handler.status = 200
    assert send(IMAGE) is True
    assert sender("http://127.0.0.1:1")(IMAGE) is None


@pytest.mark.parametrize(
    ("as_sent", "expected"),
    [
        ("jpeg:50", {("jpeg", "50-59", "same")}),
        ("jpeg:50-69", {("jpeg", "50-59", "same"), ("jpeg", "60-69", "same")}),
        ("resize:2+webp:80", {("webp", "lossy", "larger")}),
    ],
)
def test_images_are_sent_in_the_encoding(
    server: tuple[str, type[Handler]], as_sent: str, expected: set[tuple[str, str, str]]
) -> None:
    url, handler = server
    send = sender(url, as_sent)
    for _ in range(10):
        assert send(IMAGE) is True
    spec = InputSpec(height=28, width=28, colour="L")
    assert {tuple(observe(body, spec)) for _, body in handler.requests} == expected


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://host", "http://", "http://host:port", ""])
def test_an_invalid_url_is_rejected(url: str) -> None:
    with pytest.raises(TrafficError, match=r"^The URL '.*' is not accepted; it should be like http://"):
        sender(url)
