"""Replicas of the service as processes, and haproxy before them."""

import csv
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.docker.stack import free_port
from tests.qualms.fuzz.service import is_ready

HOST = "127.0.0.1"
READY_SECONDS = 180.0
EXIT_SECONDS = 60.0
_CONFIGURATION = """
global
  stats socket {socket} mode 600 level admin
  nbthread 1
  maxconn 8192
defaults
  mode http
  timeout connect 5s
  timeout client 120s
  timeout server 120s
  option httpchk GET /readyz
  http-check expect status 200
  # Waits longer than a starved machine needs for a reply: a false alarm of a check would not be a result.
  timeout check 10s
frontend strict
  bind {host}:{strict}
  default_backend strict
# No request is ever sent twice, so every one that a replica loses is seen.
backend strict
  retries 0
{servers}
frontend retrying
  bind {host}:{retrying}
  default_backend retrying
# A request is sent to another replica only if the connection failed, that is, before any byte of it was sent.
backend retrying
  retries 2
  option redispatch 1
  retry-on conn-failure
{servers}
"""


@dataclass
class Replica:
    """One process of the service in a slot of haproxy."""

    slot: int
    port: int
    process: subprocess.Popen[bytes]
    log: Path

    def wait_until_ready(self) -> None:
        """Wait until the replica is ready, as a startup probe does."""
        deadline = time.monotonic() + READY_SECONDS
        while not is_ready(self.port, seconds=10):
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"The replica on port {self.port} is not ready: {self.log.read_text()[-2000:]}")
            time.sleep(0.05)

    def stop(self) -> tuple[int | None, float]:
        """Send SIGTERM; return the exit code, None if there is none in time, and the seconds that it took."""
        start = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(EXIT_SECONDS)
        return self.process.poll(), time.monotonic() - start


class Cluster:
    """haproxy with slots for replicas; `strict` and `retrying` are the URLs of its two frontends."""

    def __init__(self, folder: Path, stack: ExitStack, slots: int, model: str, settings: dict[str, object]) -> None:
        self._folder, self._stack, self._model, self._settings = folder, stack, model, settings
        self._ports = [free_port() for _ in range(slots)]
        self._socket = folder / "haproxy.sock"
        strict, retrying = free_port(), free_port()
        self.strict, self.retrying = (f"http://{HOST}:{port}/predict" for port in (strict, retrying))
        servers = "\n".join(
            f"  server slot{slot} {HOST}:{port} check inter 500ms fall 2 rise 1 disabled"
            for slot, port in enumerate(self._ports)
        )
        path = folder / "haproxy.cfg"
        path.write_text(
            _CONFIGURATION.format(socket=self._socket, host=HOST, strict=strict, retrying=retrying, servers=servers)
        )
        log = stack.enter_context((folder / "haproxy.log").open("wb"))
        self._haproxy = subprocess.Popen(["haproxy", "-db", "-f", path], stdout=log, stderr=log)
        stack.callback(_end, self._haproxy)
        deadline = time.monotonic() + READY_SECONDS
        while not self._socket.exists():
            if self._haproxy.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"haproxy does not start: {(folder / 'haproxy.log').read_text()}")
            time.sleep(0.02)

    def start(self, slot: int, core: int | None = None) -> Replica:
        """Start a replica with one thread, if so wished on one core; it gets no requests until it is added."""
        values = {"port": self._ports[slot], "device": "cpu", "threads": 1, "decode_threads": 1, **self._settings}
        variables = {name: value for name, value in os.environ.items() if not name.startswith("QUALMS_")}
        variables |= {f"QUALMS_{name.upper()}": str(value) for name, value in values.items()}
        log = self._folder / f"slot{slot}.log"
        pinned = [] if core is None else ["taskset", "--cpu-list", str(core)]
        command = [*pinned, sys.executable, "-P", "-m", "qualms", "serve", self._model]
        with log.open("ab") as stream:
            process = subprocess.Popen(command, env=variables, stdout=stream, stderr=stream)
        self._stack.callback(_end, process)
        return Replica(slot, self._ports[slot], process, log)

    def add(self, replica: Replica) -> None:
        """Send requests to a replica, as an endpoint that has become ready."""
        self._set_state(replica.slot, "ready")

    def remove(self, replica: Replica) -> None:
        """Send no new requests to a replica, as if its endpoint were removed; those in progress go on."""
        self._set_state(replica.slot, "drain")

    def disable(self, slot: int) -> None:
        """Stop the checks of an empty slot."""
        self._set_state(slot, "maint")

    def response_errors(self, backend: str) -> dict[int, int]:
        """By slot: requests that were sent to a replica and got no complete reply."""
        rows = csv.DictReader(self._command("show stat").lstrip("# ").splitlines())
        return {
            int(row["svname"].removeprefix("slot")): int(row["eresp"])
            for row in rows
            if row["pxname"] == backend and re.fullmatch(r"slot\d+", row["svname"])
        }

    def _set_state(self, slot: int, state: str) -> None:
        for backend in ("strict", "retrying"):
            self._command(f"set server {backend}/slot{slot} state {state}")

    def _command(self, text: str) -> str:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(30)
            connection.connect(str(self._socket))
            connection.sendall(f"{text}\n".encode())
            reply = b""
            while chunk := connection.recv(65536):
                reply += chunk
        return reply.decode()


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


@contextmanager
def cluster(folder: Path, slots: int, model: str = "mnist", **settings: object) -> Iterator[Cluster]:
    """haproxy with empty slots; all processes end with the context."""
    with ExitStack() as stack:
        yield Cluster(folder, stack, slots, model, settings)
