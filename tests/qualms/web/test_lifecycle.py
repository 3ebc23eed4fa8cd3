"""`qualms serve` as a process: start, drain, stop, slow uploads."""

import http.client
import json
import os
import select
import signal
import socket
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray

from qualms.bundle.file import Bundle, write_bundle
from qualms.bundle.manifest import Manifest
from qualms.images.fingerprints import fingerprints

TIMEOUT = 30.0
Process = subprocess.Popen[str]
Start = Callable[..., tuple[Process, str]]
Until = Callable[[Callable[[], bool]], None]


@pytest.fixture
def image(encode: Callable[..., bytes], draw_images: Callable[[int, int], NDArray[np.uint8]]) -> bytes:
    return encode(draw_images(61, 1)[0])


def address(url: str) -> tuple[str, int]:
    parsed = httpx.URL(url)
    assert parsed.port is not None
    return parsed.host, parsed.port


def get(url: str) -> httpx.Response:
    return httpx.get(url, trust_env=False)


def predict(url: str, image: bytes) -> httpx.Response:
    return httpx.post(f"{url}/predict", content=image, headers={"content-type": "image/png"}, trust_env=False)


def records(folder: Path) -> list[dict[str, Any]]:
    """The lines of the service's log."""
    return [json.loads(line) for line in (folder / "stdout").read_text().splitlines()]


def cpu_seconds(process: Process) -> float:
    stat = Path(f"/proc/{process.pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")


class PartialRequest:
    """A request whose body has been sent in part."""

    def __init__(self, url: str, image: bytes, sent: int = 10) -> None:
        self._connection = socket.create_connection(address(url), TIMEOUT)
        self._rest = image[sent:]
        head = f"POST /predict HTTP/1.1\r\nhost: x\r\ncontent-type: image/png\r\ncontent-length: {len(image)}\r\n\r\n"
        self._connection.sendall(head.encode() + image[:sent])

    def fileno(self) -> int:
        return self._connection.fileno()

    def send_rest(self) -> None:
        self._connection.sendall(self._rest)

    def reply(self) -> http.client.HTTPResponse:
        response = http.client.HTTPResponse(self._connection)
        response.begin()
        return response

    def close(self) -> None:
        self._connection.close()


def refuses_connections(url: str) -> bool:
    try:
        socket.create_connection(address(url), TIMEOUT).close()
    except ConnectionError:
        return True
    return False


# Starting


@pytest.mark.slow
def test_a_new_service_answers_an_image_after_little_cpu_time(
    service_process: Start, image: bytes, bundle: Bundle
) -> None:
    process, url = service_process()
    reply = predict(url, image)
    assert cpu_seconds(process) < 5.0
    assert reply.status_code == 200
    assert reply.json()["model"]["digest"] == bundle.digest
    assert reply.headers["server-timing"].startswith("queue;dur=")
    assert "server" not in reply.headers


@pytest.mark.slow
def test_the_log_reports_address_and_readiness_and_contains_no_images(
    service_process: Start, until: Until, tmp_path: Path, bundle: Bundle, image: bytes
) -> None:
    service_process(port=0, ready=False, log_level="debug")
    until(lambda: any(record["message"] == "ready" for record in records(tmp_path)))
    (listening,) = (record for record in records(tmp_path) if record["message"] == "listening")
    (ready,) = (record for record in records(tmp_path) if record["message"] == "ready")
    assert listening["port"] > 0
    assert (ready["model"], ready["digest"]) == ("tiny", bundle.digest)
    url = f"http://{listening['host']}:{listening['port']}"
    request_id = predict(url, image).json()["request_id"]
    until(lambda: any(record.get("request_id") == request_id for record in records(tmp_path)))
    (record,) = (record for record in records(tmp_path) if record.get("request_id") == request_id)
    assert record["status"] == 200
    assert "PNG" not in (tmp_path / "stdout").read_text()


def finished(process: Process) -> tuple[int, str]:
    """Exit code and stderr of a process that ends by itself."""
    _, stderr = process.communicate(timeout=TIMEOUT)
    return process.returncode, stderr


@pytest.mark.slow
def test_the_log_names_the_service_links_that_are_ignored(service_process: Start, tmp_path: Path) -> None:
    """The settings of this process become the variables QUALMS_CPU_PORT and QUALMS_CPU_SERVICE_HOST."""
    service_process(cpu_port="tcp://10.0.0.2:80", cpu_service_host="10.0.0.2")
    (line,) = [line for line in records(tmp_path) if line["message"].startswith("ignored variables of Kubernetes")]
    assert line["variables"] == ["QUALMS_CPU_PORT", "QUALMS_CPU_SERVICE_HOST"]


def test_golden_vectors_that_are_not_reproduced_are_one_sentence_and_exit_code_2(
    service_process: Start, tmp_path: Path, graph: bytes, manifest: Manifest
) -> None:
    outputs = {**manifest.golden.outputs, "alpha": manifest.golden.outputs["alpha"] + 1}
    golden = manifest.golden.model_copy(update={"outputs": outputs})
    wrong = write_bundle(tmp_path / "wrong.onnx", graph, manifest.model_copy(update={"golden": golden}))
    code, stderr = finished(service_process(wrong.path, ready=False)[0])
    assert code == 2
    assert stderr.count("\n") == 1
    assert stderr.startswith("qualms: The golden vectors are not reproduced: alpha differs by")
    assert [record["level"] for record in records(tmp_path)].count("critical") == 1


@pytest.mark.slow
def test_a_damaged_file_is_one_sentence_and_exit_code_2(service_process: Start, tmp_path: Path, bundle: Bundle) -> None:
    damaged = tmp_path / "damaged.onnx"
    damaged.write_bytes(bundle.path.read_bytes()[:-100])
    code, stderr = finished(service_process(damaged, ready=False)[0])
    assert code == 2
    assert stderr.startswith(f"qualms: {damaged}")
    assert stderr.count("\n") == 1


@pytest.mark.slow
def test_the_scores_of_served_images_are_in_the_score_log_after_the_service_has_stopped(
    service_process: Start, bundle: Bundle, encode: Callable[..., bytes], tmp_path: Path
) -> None:
    path = tmp_path / "folder" / "scores.jsonl"
    images = np.random.default_rng(62).integers(0, 256, (5, 6, 5, 3), np.uint8)
    process, url = service_process(score_log=path, score_log_images=100, drain_seconds=0)
    results = [predict(url, encode(image)).json()["results"][0] for image in images]
    assert "qualms_score_log_dropped_images{" in get(f"{url}/metrics").text
    process.send_signal(signal.SIGTERM)
    assert finished(process)[0] == 0
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["prediction"] for line in lines] == [result["prediction"]["index"] for result in results]
    assert [line["scores"]["fused"] for line in lines] == [result["ood"]["value"] for result in results]
    assert [line["image"] for line in lines] == [f"{one:016x}" for one in fingerprints(images).tolist()]
    assert {line["graph"] for line in lines} == {bundle.manifest.graph_sha256}
    assert all(set(line["scores"]) == set(bundle.manifest.scores) for line in lines)


@pytest.mark.slow
def test_a_score_log_that_cannot_be_written_is_one_sentence_and_exit_code_2(
    service_process: Start, tmp_path: Path
) -> None:
    code, stderr = finished(service_process(score_log=tmp_path, ready=False)[0])
    assert (code, stderr) == (2, f"qualms: The score log {tmp_path} is not a file; give another path.\n")


@pytest.mark.slow
def test_a_port_in_use_is_one_sentence_and_exit_code_2(service_process: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, stderr = finished(service_process(port=port, ready=False)[0])
    assert code == 2
    assert stderr == (
        f"qualms: Port {port} of 127.0.0.1 cannot be used: address already in use; "
        "set QUALMS_HOST and QUALMS_PORT to a free address.\n"
    )


# Stopping


class Load:
    """A client that sends one request after the other, on a new connection whenever a reply closes the old one."""

    def __init__(self, url: str, image: bytes) -> None:
        self._address, self._image = address(url), image
        self.answered = 0
        self.closes = 0
        self.errors: list[str] = []

    def run(self) -> None:
        while (connection := self._connect()) is not None:
            with connection:
                while self._send(connection):
                    pass

    def _connect(self) -> socket.socket | None:
        try:
            return socket.create_connection(self._address, TIMEOUT)
        except ConnectionError:
            return None

    def _send(self, connection: socket.socket) -> bool:
        """Send one request and read its reply; returns whether the connection stays open."""
        head = f"POST /predict HTTP/1.1\r\nhost: x\r\ncontent-type: image/png\r\ncontent-length: {len(self._image)}"
        try:
            connection.sendall(f"{head}\r\n\r\n".encode() + self._image)
            response = http.client.HTTPResponse(connection)
            response.begin()
            body = json.loads(response.read())
        except (OSError, http.client.HTTPException, ValueError) as error:
            self.errors.append(repr(error))
            return False
        if response.status != 200 or len(body["results"]) != 1:
            self.errors.append(str(body))
        self.answered += 1
        self.closes += response.will_close
        return not response.will_close


@pytest.mark.slow
def test_sigterm_under_load_turns_readiness_off_and_fails_no_request(
    service_process: Start, image: bytes, until: Until
) -> None:
    process, url = service_process(drain_seconds=1, grace_seconds=20)
    loads = [Load(url, image) for _ in range(8)]
    with ThreadPoolExecutor(len(loads)) as threads:
        running = [threads.submit(load.run) for load in loads]
        until(lambda: all(load.answered >= 5 for load in loads))
        process.send_signal(signal.SIGTERM)
        until(lambda: get(f"{url}/readyz").status_code == 503)
        during = predict(url, image)
        alive = get(f"{url}/livez")
        for client in running:
            client.result(TIMEOUT)
    assert (during.status_code, during.headers["connection"]) == (200, "close")
    assert alive.status_code == 200
    assert finished(process) == (0, "")
    assert [load.errors for load in loads] == [[]] * len(loads)
    assert all(load.closes > 0 for load in loads)


@pytest.mark.slow
def test_a_request_that_is_still_arriving_when_the_listener_closes_is_answered(
    service_process: Start, image: bytes, until: Until
) -> None:
    process, url = service_process(drain_seconds=0.2)
    slow = PartialRequest(url, image)
    until(lambda: get(f"{url}/livez").status_code == 200)
    process.send_signal(signal.SIGTERM)
    until(lambda: refuses_connections(url))
    slow.send_rest()
    reply = slow.reply()
    assert (reply.status, reply.will_close) == (200, True)
    assert len(json.loads(reply.read())["results"]) == 1
    slow.close()
    assert finished(process) == (0, "")


@pytest.mark.slow
def test_a_request_that_outlasts_the_grace_period_is_503(service_process: Start, image: bytes) -> None:
    process, url = service_process(drain_seconds=0, grace_seconds=1)
    slow = PartialRequest(url, image)
    assert get(f"{url}/livez").status_code == 200
    process.send_signal(signal.SIGTERM)
    reply = slow.reply()
    assert (reply.status, reply.headers["content-type"]) == (503, "application/problem+json")
    assert json.loads(reply.read())["detail"] == "The service is stopping."
    slow.close()
    assert finished(process) == (0, "")


@pytest.mark.slow
def test_idle_connections_do_not_delay_the_exit(service_process: Start, image: bytes) -> None:
    process, url = service_process(drain_seconds=0.2, grace_seconds=1000)
    with httpx.Client(trust_env=False) as client, socket.create_connection(address(url), TIMEOUT):
        assert client.get(f"{url}/livez").status_code == 200
        process.send_signal(signal.SIGTERM)
        assert finished(process) == (0, "")


@pytest.mark.slow
def test_a_second_signal_stops_at_once(service_process: Start, image: bytes, until: Until) -> None:
    process, url = service_process(drain_seconds=1000, grace_seconds=2000)
    slow = PartialRequest(url, image)
    process.send_signal(signal.SIGTERM)
    until(lambda: get(f"{url}/readyz").status_code == 503)
    process.send_signal(signal.SIGTERM)
    code, stderr = finished(process)
    slow.close()
    assert (code, stderr) == (0, "")


@pytest.mark.slow
def test_sigint_closes_the_listener_without_a_drain_period(service_process: Start) -> None:
    process, _ = service_process(drain_seconds=1000, grace_seconds=2000)
    process.send_signal(signal.SIGINT)
    assert finished(process) == (0, "")


@pytest.mark.slow
def test_a_signal_while_loading_ends_the_process(service_process: Start, until: Until, tmp_path: Path) -> None:
    process, _ = service_process(ready=False, drain_seconds=0)
    until(lambda: "Started server process" in (tmp_path / "stdout").read_text())
    process.send_signal(signal.SIGTERM)
    assert finished(process) == (0, "")


# Slow uploads


@pytest.mark.slow
def test_a_body_that_does_not_arrive_in_time_is_408(service_process: Start, image: bytes) -> None:
    _, url = service_process(request_timeout_seconds=0.2)
    slow = PartialRequest(url, image)
    reply = slow.reply()
    assert reply.status == 408
    assert reply.getheader("connection") == "close"
    assert json.loads(reply.read())["detail"] == "The body did not arrive within the request's 0.2 s."
    slow.close()
    assert 'qualms_rejected_total{reason="slow"} 1.0' in get(f"{url}/metrics").text


@pytest.mark.slow
def test_slow_uploads_do_not_occupy_the_queue(service_process: Start, image: bytes) -> None:
    """If they counted as waiting images, twenty of them would exceed a deadline of four runs."""
    _, url = service_process()
    slow = [PartialRequest(url, image) for _ in range(20)]
    png = {"content-type": "image/png"}
    cost = get(f"{url}/models").json()["models"][0]["cost_seconds"]["1"]
    with httpx.Client(trust_env=False) as client:
        client.post(f"{url}/predict", content=image, headers=png)
        timeout = {**png, "x-request-timeout": str(0.05 + 4 * cost)}
        codes = [client.post(f"{url}/predict", content=image, headers=timeout).status_code for _ in range(200)]
    assert codes.count(200) >= 190, "a busy machine may miss a few deadlines"
    for other in slow:
        other.send_rest()
        assert other.reply().status == 200
        other.close()


@pytest.mark.slow
def test_unfinished_uploads_share_a_memory_limit(service_process: Start, image: bytes, until: Until) -> None:
    """More than half of each body has arrived, and neither is complete."""
    _, url = service_process(max_body_bytes=2**20, max_upload_bytes=2**20)
    large = bytes(2**20)
    slow = [PartialRequest(url, large, sent=600_000) for _ in range(2)]
    refused = select.select(slow, [], [], TIMEOUT)[0]
    assert len(refused) == 1
    reply = refused[0].reply()
    assert (reply.status, reply.getheader("retry-after"), reply.getheader("connection")) == (429, "1", "close")
    assert json.loads(reply.read())["detail"] == "Too many bodies are being sent at once; try again in 1 s."
    for other in slow:
        other.close()
    png = {"content-type": "image/png"}
    until(lambda: httpx.post(f"{url}/predict", content=large, headers=png, trust_env=False).status_code == 415)


# HEAD


@pytest.mark.slow
def test_every_get_route_answers_head(service_process: Start) -> None:
    _, url = service_process()
    for path in ("/livez", "/readyz", "/models", "/metrics", "/docs", "/openapi.json"):
        whole, head = get(f"{url}{path}"), httpx.head(f"{url}{path}", trust_env=False)
        assert (head.status_code, head.content) == (200, b""), path
        assert head.headers["content-type"] == whole.headers["content-type"], path
    refused = httpx.head(f"{url}/predict", trust_env=False)
    assert (refused.status_code, refused.headers["allow"], refused.content) == (405, "POST", b"")
