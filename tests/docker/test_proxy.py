"""The examples of proxies: nginx in front of a real service, Envoy's file against its schemas, both against our settings."""

import io
import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import yaml
from envoy.config.bootstrap.v3.bootstrap_pb2 import Bootstrap
from envoy.extensions.filters.http.buffer.v3 import buffer_pb2
from envoy.extensions.filters.http.router.v3 import router_pb2
from envoy.extensions.filters.network.http_connection_manager.v3 import http_connection_manager_pb2
from envoy.extensions.transport_sockets.tls.v3 import tls_pb2
from envoy.extensions.upstreams.http.v3 import http_protocol_options_pb2
from google.protobuf.json_format import ParseDict, ParseError
from PIL import Image
from tests.docker.stack import DOCKER, free_port, missing_programs, wait_until

from qualms.demo.digits import draw
from qualms.settings import Settings

NGINX = (DOCKER / "proxy" / "nginx.conf").read_text(encoding="utf-8")
ENVOY: dict[str, Any] = yaml.safe_load((DOCKER / "proxy" / "envoy.yaml").read_text(encoding="utf-8"))
MESSAGES = (buffer_pb2, router_pb2, http_connection_manager_pb2, tls_pb2, http_protocol_options_pb2)
"""modules of the messages that the file names by type; importing them registers the types"""
DEFAULTS = {name: field.default for name, field in Settings.model_fields.items()}
MISSING = missing_programs("nginx", "openssl")
TIMEOUT = 60.0


# Static: limits and timeouts against the service's defaults


def nginx_value(name: str, after: str = "") -> str:
    """The value of a directive, of the first one after some text."""
    match = re.search(rf"^\s*{name} ([^;]+);", NGINX[NGINX.index(after) :], re.MULTILINE)
    assert match, name
    return match[1]


def seconds(duration: str) -> float:
    return float(duration.removesuffix("s"))


def test_nginx_has_the_limits_of_the_service() -> None:
    assert int(nginx_value("client_max_body_size").removesuffix("m")) * 2**20 == DEFAULTS["max_body_bytes"]
    count, size = nginx_value("large_client_header_buffers").split()
    assert int(count) * int(size.removesuffix("k")) * 2**10 == DEFAULTS["max_head_bytes"]


def test_nginx_closes_idle_connections_first_and_waits_longer_than_any_deadline() -> None:
    assert seconds(nginx_value("keepalive_timeout", "upstream ")) < DEFAULTS["keep_alive_seconds"]
    assert seconds(nginx_value("proxy_read_timeout")) > Settings().max_request_timeout_seconds
    assert seconds(nginx_value("client_header_timeout")) == DEFAULTS["head_timeout_seconds"]
    assert seconds(nginx_value("send_timeout")) == DEFAULTS["send_timeout_seconds"]


def envoy_parts() -> tuple[dict[str, Any], dict[str, Any]]:
    """The HTTP connection manager and the cluster."""
    (listener,), (cluster,) = ENVOY["static_resources"]["listeners"], ENVOY["static_resources"]["clusters"]
    return listener["filter_chains"][0]["filters"][0]["typed_config"], cluster


def test_envoy_has_the_limits_of_the_service() -> None:
    manager, _ = envoy_parts()
    assert manager["http_filters"][0]["typed_config"]["max_request_bytes"] == DEFAULTS["max_body_bytes"]
    assert manager["max_request_headers_kb"] * 2**10 == DEFAULTS["max_head_bytes"]


def test_envoy_closes_idle_connections_first_and_waits_longer_than_any_deadline() -> None:
    manager, cluster = envoy_parts()
    (options,) = cluster["typed_extension_protocol_options"].values()
    assert seconds(options["common_http_protocol_options"]["idle_timeout"]) < DEFAULTS["keep_alive_seconds"]
    route = manager["route_config"]["virtual_hosts"][0]["routes"][-1]["route"]
    assert seconds(route["timeout"]) > Settings().max_request_timeout_seconds
    assert seconds(manager["stream_idle_timeout"]) > seconds(route["timeout"])
    assert seconds(manager["request_headers_timeout"]) == DEFAULTS["head_timeout_seconds"]
    interval = seconds(cluster["health_checks"][0]["interval"])
    assert interval < DEFAULTS["drain_seconds"], "a draining service would get new requests until it stops"


def test_envoy_file_is_valid_against_the_schemas_of_its_messages() -> None:
    bootstrap = ParseDict(ENVOY, Bootstrap())
    (listener,) = bootstrap.static_resources.listeners
    packed = listener.filter_chains[0].filters[0].typed_config
    manager = http_connection_manager_pb2.HttpConnectionManager()
    assert packed.Unpack(manager)
    assert manager.preserve_external_request_id


def test_an_unknown_field_in_an_envoy_file_is_found() -> None:
    broken = json.loads(json.dumps(ENVOY).replace("preserve_external_request_id", "keep_external_request_id"))
    with pytest.raises(ParseError, match="keep_external_request_id"):
        ParseDict(broken, Bootstrap())


# nginx, for real


@dataclass
class Proxy:
    """nginx with the service behind it."""

    url: str
    port: int
    context: ssl.SSLContext
    service: subprocess.Popen[bytes]
    folder: Path

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, verify=self.context, trust_env=False, timeout=TIMEOUT)

    def connect(self, **options: Any) -> ssl.SSLSocket:
        raw = socket.create_connection(("127.0.0.1", self.port), TIMEOUT)
        return self.context.wrap_socket(raw, server_hostname="127.0.0.1", **options)

    def log(self) -> str:
        return (self.folder / "nginx.log").read_text(encoding="utf-8")


def is_listening(port: int) -> bool:
    """True, or OSError if nothing listens there."""
    socket.create_connection(("127.0.0.1", port)).close()
    return True


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    """The example with other addresses and paths, and short timeouts where a test waits for them."""
    folder = tmp_path_factory.mktemp("proxy")
    cert, key = folder / "cert.pem", folder / "key.pem"
    request = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
        "-days",
        "1",
    ]
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)]
    subprocess.run([*request, *names], check=True, capture_output=True, timeout=TIMEOUT)
    port, behind = free_port(), free_port()
    text = NGINX
    for old, new in (
        ("listen 443 ssl", f"listen 127.0.0.1:{port} ssl"),
        ("server service:8000", f"server 127.0.0.1:{behind}"),
        ("/etc/nginx/tls/cert.pem", str(cert)),
        ("/etc/nginx/tls/key.pem", str(key)),
        ("/tmp/nginx", f"{folder}/nginx"),
        ("/dev/stdout", f"{folder}/nginx.log"),
        ("worker_processes auto;", "worker_processes 1;\ndaemon off;\nuser root;"),
        ("client_header_timeout 10s", "client_header_timeout 1s"),
        ("client_body_timeout 10s", "client_body_timeout 1s"),
        ("proxy_read_timeout 65s", "proxy_read_timeout 10s"),
    ):
        assert old in text, old
        text = text.replace(old, new)
    config = folder / "nginx.conf"
    config.write_text(text, encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("QUALMS_")}
    environment |= {"QUALMS_DEVICE": "cpu", "QUALMS_THREADS": "1", "QUALMS_DRAIN_SECONDS": "0"}
    serve = [sys.executable, "-m", "qualms", "serve", "mnist", "--port", str(behind)]
    context = ssl.create_default_context(cafile=cert)
    with (
        (folder / "service.log").open("wb") as log,
        subprocess.Popen(serve, stdout=log, stderr=log, env=environment) as service,
        subprocess.Popen(["nginx", "-p", folder, "-c", config], stdout=log, stderr=log) as nginx,
    ):
        try:
            wait_until(lambda: '"message":"ready"' in (folder / "service.log").read_text(), "the service is ready")
            wait_until(lambda: is_listening(port), "nginx listens")
            assert nginx.poll() is None
            yield Proxy(f"https://127.0.0.1:{port}", port, context, service, folder)
        finally:
            service.send_signal(signal.SIGCONT)
            service.terminate()
            nginx.terminate()


@pytest.fixture
def client(proxy: Proxy) -> Iterator[httpx.Client]:
    with proxy.client() as client:
        yield client


needs_nginx = [pytest.mark.slow, pytest.mark.skipif(bool(MISSING), reason=MISSING)]


class TestNginx:
    pytestmark = needs_nginx

    def test_predictions_pass_over_tls_with_the_request_id_of_the_client(
        self, client: httpx.Client, proxy: Proxy
    ) -> None:
        headers = {"content-type": "image/png", "x-request-id": "mine-1"}
        reply = client.post("/predict", content=digit(), headers=headers)
        assert (reply.status_code, reply.headers["x-request-id"]) == (200, "mine-1")
        assert reply.json()["request_id"] == "mine-1"
        assert reply.headers["strict-transport-security"]
        assert " mine-1 " in proxy.log()

    @pytest.mark.parametrize("given", [{}, {"x-request-id": "not safe\tfor logs"}])
    def test_nginx_makes_the_request_id_that_the_service_returns(
        self, client: httpx.Client, proxy: Proxy, given: dict[str, str]
    ) -> None:
        reply = client.post("/predict", content=digit(), headers={"content-type": "image/png", **given})
        assert re.fullmatch(r"[0-9a-f]{32}", reply.headers["x-request-id"])
        assert f" {reply.headers['x-request-id']} " in proxy.log()

    def test_the_largest_body_reaches_the_service_and_a_larger_one_is_refused(self, client: httpx.Client) -> None:
        limit, headers = DEFAULTS["max_body_bytes"], {"content-type": "image/png"}
        largest = client.post("/predict", content=bytes(limit), headers=headers)
        assert largest.status_code not in (413, 502, 503)
        assert largest.json()["request_id"], "the service writes this field, nginx does not"
        larger = client.post("/predict", content=bytes(limit + 1), headers=headers)
        assert (larger.status_code, larger.headers["content-type"]) == (413, "application/problem+json")
        assert larger.json()["status"] == 413

    def test_refusals_of_the_service_pass_unchanged(self, client: httpx.Client) -> None:
        headers = {"content-type": "image/png", "x-request-timeout": "0.000001"}
        reply = client.post("/predict", content=digit(), headers=headers)
        assert reply.status_code in (422, 429)
        assert reply.headers["content-type"] == "application/problem+json"
        assert reply.json()["request_id"] == reply.headers["x-request-id"]

    def test_metrics_are_not_published(self, client: httpx.Client) -> None:
        assert client.get("/metrics").status_code == 404
        assert client.get("/readyz").status_code == 200

    def test_a_head_above_the_limit_is_refused(self, client: httpx.Client) -> None:
        assert client.get("/readyz", headers={"x-long": "x" * 20_000}).status_code in (400, 431, 494)

    def test_tls_before_1_2_is_refused(self, proxy: Proxy) -> None:
        command = ["openssl", "s_client", "-connect", f"127.0.0.1:{proxy.port}", "-cipher", "ALL:@SECLEVEL=0"]
        versions = {
            version: subprocess.run(
                [*command, version], stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=TIMEOUT
            ).returncode
            for version in ("-tls1", "-tls1_1", "-tls1_2", "-tls1_3")
        }
        assert [version for version, code in versions.items() if code == 0] == ["-tls1_2", "-tls1_3"]

    @pytest.mark.parametrize(
        "part",
        [b"GET /readyz HTTP/1.1\r\nhost: x\r\n", b"POST /predict HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\nx"],
    )
    def test_a_client_that_stops_sending_is_disconnected(self, proxy: Proxy, part: bytes) -> None:
        with proxy.connect() as connection:
            connection.sendall(part)
            received = b""
            while data := connection.recv(4096):
                received += data
        assert received == b"" or received.startswith(b"HTTP/1.1 408 ")

    def test_a_service_that_hangs_gets_a_problem_document_from_nginx(self, client: httpx.Client, proxy: Proxy) -> None:
        proxy.service.send_signal(signal.SIGSTOP)
        try:
            reply = client.get("/readyz")
        finally:
            proxy.service.send_signal(signal.SIGCONT)
        assert (reply.status_code, reply.headers["content-type"]) == (503, "application/problem+json")
        assert reply.headers["retry-after"] == "1"
        wait_until(lambda: client.get("/readyz").status_code == 200, "the service answers again")

    def test_a_service_that_has_stopped_gets_a_problem_document_from_nginx(
        self, client: httpx.Client, proxy: Proxy
    ) -> None:
        """The last test: the service does not start again."""
        proxy.service.terminate()
        assert proxy.service.wait(TIMEOUT) == 0
        reply = client.get("/readyz")
        assert (reply.status_code, reply.json()["title"]) == (503, "Service Unavailable")


def digit() -> bytes:
    """A drawn digit as a PNG file."""
    stream = io.BytesIO()
    Image.fromarray(draw(3, np.random.default_rng(0))).save(stream, "PNG")
    return stream.getvalue()
