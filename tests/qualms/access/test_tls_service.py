"""The service with TLS: versions and ciphers by OpenSSL's client, plain HTTP, limits of the handshake, new certificates."""

import contextlib
import re
import resource
import shutil
import socket
import ssl
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

OPENSSL = shutil.which("openssl")
pytestmark = pytest.mark.skipif(OPENSSL is None, reason="openssl is not installed")
Make = Callable[..., tuple[Path, Path]]
Until = Callable[[Callable[[], bool]], None]
Start = Callable[..., tuple[str, int, Path, Path]]


@pytest.fixture
def processes() -> list[subprocess.Popen[str]]:
    """The processes that `start` has started."""
    return []


@pytest.fixture
def start(
    service_process: Callable[..., tuple[Any, str]],
    make_certificate: Make,
    free_port: Callable[[], int],
    tmp_path: Path,
    until: Until,
    processes: list[subprocess.Popen[str]],
) -> Start:
    """(any setting) → address of a service with TLS, its management port, and the files of certificate and key."""

    def run(**settings: object) -> tuple[str, int, Path, Path]:
        certificate, key = (Path(shutil.copy(path, tmp_path)) for path in make_certificate())
        management = free_port()
        options = {"tls_cert": certificate, "tls_key": key, "management_port": management, **settings}
        process, url = service_process(ready=False, **options)
        processes.append(process)

        def is_ready() -> bool:
            assert process.poll() is None, process.communicate()[1]
            try:
                return httpx.get(f"http://127.0.0.1:{management}/readyz", trust_env=False).status_code == 200
            except httpx.TransportError:
                return False

        until(is_ready)
        return url.removeprefix("http://"), management, certificate, key

    return run


def s_client(address: str, *options: object) -> str:
    """The output of OpenSSL's client."""
    command = [str(OPENSSL), "s_client", "-connect", address, *map(str, options)]
    done = subprocess.run(command, input="", capture_output=True, text=True, check=False, timeout=60)
    return done.stdout + done.stderr


def metric(management: int, line: str) -> float:
    text = httpx.get(f"http://127.0.0.1:{management}/metrics", trust_env=False).text
    return next(float(one.rpartition(" ")[2]) for one in text.splitlines() if one.startswith(line))


def context(certificate: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=certificate)


def test_versions_ciphers_and_plain_http(start: Start, until: Until) -> None:
    address, management, certificate, _ = start()
    for version, accepted in (("-tls1", False), ("-tls1_1", False), ("-tls1_2", True), ("-tls1_3", True)):
        output = s_client(address, version, "-cipher", "ALL:@SECLEVEL=0")
        match = re.search(r"Cipher\s*(?:is|:) (\S+)", output)
        assert match, output
        assert (match[1] not in ("(NONE)", "0000")) == accepted, (version, output)
    for cipher, accepted in (
        ("ECDHE-ECDSA-AES128-GCM-SHA256", True),
        ("ECDHE-ECDSA-CHACHA20-POLY1305", True),
        ("ECDHE-ECDSA-AES128-SHA", False),
        ("ECDHE-ECDSA-AES256-SHA384", False),
        ("AES128-GCM-SHA256", False),
        ("NULL-SHA256", False),
    ):
        output = s_client(address, "-tls1_2", "-cipher", f"{cipher}:@SECLEVEL=0")
        assert (f"Cipher is {cipher}" in output) == accepted, (cipher, output)
    assert "Secure Renegotiation IS" in s_client(address, "-tls1_2")
    assert metric(management, 'qualms_protocol_refusals_total{reason="tls_handshake"}') >= 5
    plain = httpx.get(f"http://{address}/livez", trust_env=False)
    assert (plain.status_code, plain.json()["accepted"]) == (400, "https://")
    assert metric(management, 'qualms_protocol_refusals_total{reason="plain_http"}') == 1
    secure = httpx.get(f"https://{address}/livez", verify=context(certificate), trust_env=False)
    assert secure.status_code == 200


def test_the_management_port_has_metrics_and_health_and_nothing_else(start: Start) -> None:
    address, management, certificate, _ = start()
    with httpx.Client(trust_env=False, verify=context(certificate)) as client:
        for path in ("/metrics", "/livez", "/readyz", "/healthz"):
            assert client.get(f"http://127.0.0.1:{management}{path}").status_code == 200, path
        for path in ("/", "/models", "/docs", "/status", "/predict", "/openapi.json", "/page/app.js"):
            assert client.get(f"http://127.0.0.1:{management}{path}").status_code == 404, path
        assert client.post(f"http://127.0.0.1:{management}/predict", content=b"x").status_code == 404
        assert client.get(f"https://{address}/metrics").status_code == 404
        for path in ("/livez", "/readyz", "/healthz"):
            assert client.get(f"https://{address}{path}").status_code == 200, path


def test_a_handshake_that_does_not_end_is_closed_and_makes_room(start: Start, until: Until) -> None:
    address, _, certificate, _ = start(head_timeout_seconds=1, max_connections=4)
    host, port = address.split(":")
    stuck = [socket.create_connection((host, int(port)), timeout=60) for _ in range(4)]
    for connection in stuck[:2]:
        connection.sendall(b"\x16\x03\x01\x02\x00\x01")  # the beginning of a handshake, whose rest never comes
    for connection in stuck:
        with contextlib.suppress(ConnectionResetError):
            assert connection.recv(100) == b""
        connection.close()
    until(
        lambda: httpx.get(f"https://{address}/livez", verify=context(certificate), trust_env=False).status_code == 200
    )


def test_large_bodies_and_pipelined_requests_pass(start: Start) -> None:
    address, _, certificate, _ = start()
    host, port = address.split(":")
    with httpx.Client(trust_env=False, verify=context(certificate)) as client:
        reply = client.post(
            f"https://{address}/predict", content=bytes(3_000_000), headers={"content-type": "image/png"}
        )
        assert reply.status_code == 415
    plain = socket.create_connection((host, int(port)), timeout=60)
    with context(certificate).wrap_socket(plain, server_hostname="localhost") as connection:
        one = b"GET /models HTTP/1.1\r\nHost: x\r\n\r\n"
        connection.sendall(one * 20 + one.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
        received = b""
        while part := connection.recv(65536):  # ends with close_notify, else this raises
            received += part
    assert received.count(b"HTTP/1.1 200 OK") == 21


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs the memory of a process from /proc")
def test_idle_connections_do_not_keep_the_memory_of_what_they_have_sent(
    start: Start, processes: list[subprocess.Popen[str]]
) -> None:
    """Without a key, each connection may send 256 kB at once, and keep its buffers for as long as it is open."""
    address, _, certificate, _ = start()
    (host, port), number = address.split(":"), 100
    burst = 4 * (b"GET /livez HTTP/1.1\r\nHost: x\r\nA: " + b"a" * 60_000 + b"\r\n\r\n")

    def memory() -> int:
        pages = int(Path(f"/proc/{processes[0].pid}/statm").read_text().split()[1])
        return pages * resource.getpagesize()

    def send(connection: ssl.SSLSocket) -> None:
        connection.sendall(burst)
        received = b""
        while received.count(b'"alive"') < 4:
            part = connection.recv(65536)
            assert part
            received += part

    with contextlib.ExitStack() as stack:
        connections = []
        for _ in range(number + 5):
            plain = stack.enter_context(socket.create_connection((host, int(port)), timeout=60))
            wrapped = context(certificate).wrap_socket(plain, server_hostname="localhost")
            connections.append(stack.enter_context(wrapped))
        for connection in connections[number:]:
            send(connection)
        before = memory()
        for connection in connections[:number]:
            send(connection)
        assert memory() - before < number * 80_000


def test_a_new_certificate_is_used_by_new_connections_only(start: Start, make_certificate: Make, until: Until) -> None:
    address, management, certificate, key = start()
    host, port = address.split(":")
    old, (other, other_key) = context(certificate), make_certificate("other")

    def get(connection: ssl.SSLSocket) -> bytes:
        connection.sendall(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
        return connection.recv(65536)

    plain = socket.create_connection((host, int(port)), timeout=60)
    with old.wrap_socket(plain, server_hostname="localhost") as connection:
        assert get(connection).startswith(b"HTTP/1.1 200")
        shutil.copy(other, certificate)  # without its key: the old files stay in use
        until(lambda: metric(management, 'qualms_reloads_total{accepted="false",content="tls"}') >= 1)
        assert httpx.get(f"https://{address}/livez", verify=old, trust_env=False).status_code == 200
        shutil.copy(other_key, key)
        until(lambda: metric(management, 'qualms_reloads_total{accepted="true",content="tls"}') >= 1)
        assert httpx.get(f"https://{address}/livez", verify=context(other), trust_env=False).status_code == 200
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"https://{address}/livez", verify=old, trust_env=False)
        assert get(connection).startswith(b"HTTP/1.1 200")


def test_clients_need_a_certificate_if_there_is_a_client_ca(start: Start, make_certificate: Make) -> None:
    client_certificate, client_key = make_certificate("client")
    address, _, certificate, _ = start(tls_client_ca=client_certificate)
    with pytest.raises((httpx.TransportError, ssl.SSLError)):
        httpx.get(f"https://{address}/livez", verify=context(certificate), trust_env=False)
    known = context(certificate)
    known.load_cert_chain(client_certificate, client_key)
    assert httpx.get(f"https://{address}/livez", verify=known, trust_env=False).status_code == 200
