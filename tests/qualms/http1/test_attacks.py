"""Attacks on a real service: each has a status, a bound on memory, and a connection that is closed or kept."""

import http.client
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray
from tests.qualms.fuzz.service import HOST, Service, running_service

from qualms.bundle.file import Bundle
from qualms.web.served_model import MAX_FAILED_RUNS
from qualms.web.state import ServiceState

pytestmark = pytest.mark.slow
TIMEOUT = 60.0
MB = 10**6
Start = Callable[..., tuple[subprocess.Popen[str], str]]
Until = Callable[[Callable[[], bool]], None]
LIVEZ = b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.fixture(scope="module")
def service(bundle: Bundle) -> Iterator[Service]:
    """A service with default limits."""
    with running_service(bundle.path) as process:
        get(process.port, "/metrics")
        yield process


@pytest.fixture
def image(encode: Callable[..., bytes], draw_images: Callable[[int, int], NDArray[np.uint8]]) -> bytes:
    return encode(draw_images(61, 1)[0])


def connect(port: int) -> socket.socket:
    return socket.create_connection((HOST, port), TIMEOUT)


def port_of(url: str) -> int:
    port = httpx.URL(url).port
    assert port is not None
    return port


def get(port: int, path: str) -> httpx.Response:
    return httpx.get(f"http://{HOST}:{port}{path}", trust_env=False, timeout=TIMEOUT)


def metric(port: int, name: str) -> float:
    """The value of a metric, given with its labels."""
    found = re.search(rf"^{re.escape(name)} (\S+)$", get(port, "/metrics").text, re.MULTILINE)
    assert found is not None, name
    return float(found[1])


def peak_memory(process: subprocess.Popen[Any]) -> int:
    """The largest resident memory so far, in bytes."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{process.pid}/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


def receive_all(connection: socket.socket) -> bytes:
    """Everything until the server closes the connection."""
    data = b""
    while piece := connection.recv(2**16):
        data += piece
    return data


def read_reply(connection: socket.socket) -> tuple[http.client.HTTPResponse, bytes]:
    response = http.client.HTTPResponse(connection)
    response.begin()
    return response, response.read()


def send_until_answered(connection: socket.socket, *pieces: bytes) -> None:
    """Send pieces, but stop when the server answers."""
    for piece in pieces:
        rest = memoryview(piece)
        while rest:
            readable, writable, _ = select.select([connection], [connection], [], TIMEOUT)
            if readable:
                return
            assert writable
            rest = rest[connection.send(rest[: 2**18]) :]


def check_problem(response: http.client.HTTPResponse, body: bytes, status: int) -> dict[str, Any]:
    """A refusal is a problem in JSON, and closes the connection."""
    assert (response.status, response.getheader("content-type")) == (status, "application/problem+json")
    assert response.getheader("connection") == "close"
    problem: dict[str, Any] = json.loads(body)
    assert problem["status"] == status
    return problem


def check_alive(port: int) -> None:
    assert get(port, "/livez").status_code == 200
    assert get(port, "/readyz").status_code == 200


# Pipelines


@pytest.mark.parametrize(
    ("request_", "status"),
    [(LIVEZ, b"200 OK"), (b"POST /predict?x=1 HTTP/1.1\r\nHost: x\r\n\r\n", b"422 Unprocessable")],
    ids=["task", "answered at once"],
)
def test_a_pipeline_whose_replies_are_not_read_is_not_read_either(
    service: Service, request_: bytes, status: bytes
) -> None:
    before = peak_memory(service.process)
    requests = 2000 * request_
    with connect(service.port) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**16)
        sent = 0
        while sent < 18 * MB and select.select([], [connection], [], 1.0)[1]:
            sent += connection.send(requests)
        assert sent < 18 * MB, "the server stops to read"
        check_alive(service.port)
        assert connection.recv(100).startswith(b"HTTP/1.1 " + status)
    assert peak_memory(service.process) - before < 64 * MB


def test_a_pipeline_whose_replies_are_read_is_answered_completely(service: Service) -> None:
    count = 3000
    with connect(service.port) as connection, ThreadPoolExecutor(1) as thread:
        sending = thread.submit(
            connection.sendall, count * LIVEZ + LIVEZ.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
        )
        assert receive_all(connection).count(b"HTTP/1.1 200 OK\r\n") == count + 1
        sending.result()


# Heads


@pytest.mark.parametrize(
    ("start", "endless", "status"),
    [
        (b"GET /livez HTTP/1.1\r\nHost: x\r\nX-A: ", 2**16 * b"a", 431),
        (b"GET /", 2**16 * b"a", 414),
        (b"GET /livez HTTP/1.1\r\nHost: x\r\n", 2**14 * b"a:\r\n", 431),
    ],
    ids=["header", "URL", "small headers"],
)
def test_an_endless_head_is_refused_and_the_connection_closes(
    service: Service, start: bytes, endless: bytes, status: int
) -> None:
    before = peak_memory(service.process)
    for _ in range(8):
        with connect(service.port) as connection:
            send_until_answered(connection, start, *(200 * [endless]))
            response, body = read_reply(connection)
            check_problem(response, body, status)
            assert connection.recv(1) == b""
    assert peak_memory(service.process) - before < 32 * MB
    check_alive(service.port)


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET /livez HTTP/1.1\r\n\r\n", 400),
        (b"GET /livez HTTP/1.1\r\nHost: x\r\nHost: x\r\n\r\n", 400),
        (b"POST /predict HTTP/1.0\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (b"POST /predict HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 501),
    ],
    ids=["no host", "two hosts", "chunked in HTTP/1.0", "gzip, chunked"],
)
def test_ambiguous_requests_are_refused_and_what_follows_is_ignored(
    service: Service, request_: bytes, status: int
) -> None:
    with connect(service.port) as connection:
        connection.sendall(request_ + LIVEZ)
        response, body = read_reply(connection)
        check_problem(response, body, status)
        assert receive_all(connection) == b""


def test_slow_heads_are_408_and_idle_connections_are_closed_silently(service_process: Start) -> None:
    _, url = service_process(head_timeout_seconds=0.5, keep_alive_seconds=0.5)
    port = port_of(url)
    silent, slow, idle = connect(port), connect(port), connect(port)
    with silent, slow, idle:
        idle.sendall(LIVEZ)
        assert read_reply(idle)[0].status == 200
        for byte in LIVEZ:
            if select.select([slow], [], [], 0.05)[0]:
                break
            slow.sendall(bytes([byte]))
        for connection in (silent, slow):
            response, body = read_reply(connection)
            problem = check_problem(response, body, 408)
            assert problem["detail"] == "The head of the request did not arrive within 0.5 s."
            assert connection.recv(1) == b""
        assert idle.recv(1) == b""
    assert metric(port, 'qualms_protocol_refusals_total{reason="head_timeout"}') == 2


def test_a_connection_is_reused_after_six_idle_seconds(service: Service) -> None:
    """Some load balancers and clients reuse connections that were idle longer than uvicorn's default of five seconds."""
    with closing(http.client.HTTPConnection(HOST, service.port, timeout=TIMEOUT)) as client:
        client.request("GET", "/livez")
        client.getresponse().read()
        used = client.sock
        time.sleep(6.0)
        client.request("GET", "/livez")
        assert client.getresponse().status == 200
        assert client.sock is used


# Connections


def test_connections_above_the_limit_are_503_and_logged_at_most_once_per_second(
    service_process: Start, tmp_path: Path, until: Until
) -> None:
    limit, refused = 8, 40
    _, url = service_process(max_connections=limit)
    port, started = port_of(url), time.monotonic()
    head = b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Type: image/png\r\nContent-Length: 5\r\n\r\n"
    with ExitStack() as stack:
        uploads = [stack.enter_context(connect(port)) for _ in range(limit)]
        for upload in uploads:
            upload.sendall(head)
        until(lambda: "503" in status_line(port))
        for _ in range(refused):
            with connect(port) as connection:
                response, body = read_reply(connection)
                assert response.getheader("retry-after") == "1"
                problem = check_problem(response, body, 503)
                assert problem["detail"].startswith(f"The service has {limit} open connections, which is its limit;")
                assert connection.recv(1) == b""
        for upload in uploads:
            upload.sendall(b"hello")
            assert read_reply(upload)[0].status == 415
    seconds = time.monotonic() - started
    until(lambda: "200" in status_line(port))
    assert metric(port, 'qualms_protocol_refusals_total{reason="too_many_connections"}') >= refused
    records = [json.loads(line) for line in (tmp_path / "stdout").read_text().splitlines()]
    lines = [record for record in records if record.get("reason") == "too_many_connections"]
    assert 1 <= len(lines) <= seconds + 1


def status_line(port: int) -> str:
    """The status line of /livez on a new connection."""
    with connect(port) as connection:
        connection.sendall(LIVEZ)
        return connection.recv(100).decode().partition("\r\n")[0]


# Bodies


def post(port: int, body: bytes, content_type: str) -> int:
    """Send a body until it is answered; the status."""
    head = f"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n"
    with connect(port) as connection:
        send_until_answered(connection, f"{head}X-Request-Timeout: 30\r\n\r\n".encode(), body)
        return read_reply(connection)[0].status


def post_at_once(port: int, count: int, body: bytes, content_type: str) -> list[int]:
    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(lambda _: post(port, body, content_type), range(count)))


def test_large_bodies_that_wait_for_decoding_share_a_memory_limit(
    service_process: Start, encode: Callable[..., bytes], image: bytes
) -> None:
    allowed = 64 * MB
    process, url = service_process(max_upload_bytes=allowed)
    port = port_of(url)
    large = encode(np.zeros((2300, 2300, 3), np.uint8), "BMP")
    assert 15 * MB < len(large) < 16 * 2**20
    assert post(port, large, "image/bmp") == 200
    before = peak_memory(process)
    statuses = post_at_once(port, 96, large, "image/bmp")
    assert set(statuses) <= {200, 429}
    assert statuses.count(429) > 0
    assert statuses.count(200) > 0
    assert peak_memory(process) - before < 2 * allowed + 64 * MB
    assert metric(port, "qualms_body_bytes") == 0
    assert post(port, image, "image/png") == 200
    assert post(port, large, "image/bmp") == 200
    check_alive(port)


def test_large_arrays_of_floats_are_refused_within_a_memory_limit(service_process: Start, image: bytes) -> None:
    process, url = service_process()
    port = port_of(url)
    body = b'{"images": [[' + b",".join((16 * 10**6 // 7) * [b"0.1234"]) + b"]]}"
    before = peak_memory(process)
    statuses = post_at_once(port, 8, body, "application/json")
    assert all(400 <= status < 500 for status in statuses), statuses
    assert peak_memory(process) - before < 8 * 16 * MB + 256 * MB
    assert metric(port, "qualms_body_bytes") == 0
    assert post(port, image, "image/png") == 200


# Logs


def test_a_log_that_nobody_reads_does_not_stop_the_service(bundle: Bundle, free_port: Callable[[], int]) -> None:
    port = free_port()
    variables = {name: value for name, value in os.environ.items() if not name.startswith("QUALMS_")}
    variables |= {"QUALMS_PORT": str(port), "QUALMS_DEVICE": "cpu", "QUALMS_THREADS": "1"}
    script = Path(sysconfig.get_path("scripts")) / "qualms"
    command = [sys.executable, str(script), "serve", str(bundle.path)]
    with subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        try:
            wait_until_ready(process, port)
            missing = b"GET /" + 200 * b"x" + b" HTTP/1.1\r\nHost: x\r\n"
            rounds = 0
            while not dropped_lines(port):
                rounds += 1
                assert rounds < 20
                with connect(port) as connection, ThreadPoolExecutor(1) as thread:
                    request = 999 * (missing + b"\r\n") + missing + b"Connection: close\r\n\r\n"
                    sending = thread.submit(connection.sendall, request)
                    assert receive_all(connection).count(b"HTTP/1.1 404 ") == 1000
                    sending.result()
            check_alive(port)
        finally:
            process.kill()


def dropped_lines(port: int) -> float:
    found = re.findall(r"^qualms_log_lines_dropped_total\S* (\S+)$", get(port, "/metrics").text, re.MULTILINE)
    assert found
    return sum(map(float, found))


def wait_until_ready(process: subprocess.Popen[Any], port: int) -> None:
    deadline = time.monotonic() + TIMEOUT
    while True:
        assert process.poll() is None
        assert time.monotonic() < deadline, "the service is not ready"
        try:
            if get(port, "/readyz").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.02)


# Signals


def test_sighup_drains_like_sigterm(service_process: Start, until: Until) -> None:
    process, url = service_process(drain_seconds=1)
    process.send_signal(signal.SIGHUP)
    until(lambda: get(port_of(url), "/readyz").status_code == 503)
    assert get(port_of(url), "/livez").headers["connection"] == "close"
    _, stderr = process.communicate(timeout=TIMEOUT)
    assert (process.returncode, stderr) == (0, "")


def test_sighup_is_ignored_if_it_was_ignored_at_the_start(service_process: Start) -> None:
    """As `nohup` does it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        process, url = service_process(drain_seconds=0)
    finally:
        signal.signal(signal.SIGHUP, before)
    process.send_signal(signal.SIGHUP)
    for _ in range(3):
        time.sleep(0.1)  # the signal would have been handled
        check_alive(port_of(url))
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=TIMEOUT)
    assert (process.returncode, stderr) == (0, "")


# Failing runs


def test_a_model_whose_runs_all_fail_is_not_ready_until_a_run_succeeds(
    start_service: Callable[..., httpx.Client], image: bytes, until: Until
) -> None:
    def fail(images: NDArray[np.uint8]) -> Any:
        raise RuntimeError("out of memory")

    state = ServiceState()
    client = start_service(state=state)
    assert state.model is not None
    engine = state.model.engine
    run = engine.run
    engine.run = fail  # type: ignore[method-assign]
    for number in range(MAX_FAILED_RUNS):
        assert client.get("/readyz").status_code == 200, number
        assert client.post("/predict", content=image, headers={"content-type": "image/png"}).status_code == 500
    until(lambda: client.get("/readyz").status_code == 503)
    failing = client.get("/readyz")
    assert "runs of the model failed" in failing.json()["detail"]
    assert client.get("/livez").status_code == 200
    engine.run = run  # type: ignore[method-assign]
    until(lambda: client.get("/readyz").status_code == 200)
    assert client.post("/predict", content=image, headers={"content-type": "image/png"}).status_code == 200
