"""`qualms serve` as a process on loopback, with its memory, its request counters and its log."""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from pathlib import Path

from qualms.bench.servers.process_tree import resident

HOST = "127.0.0.1"
READY_SECONDS = 60.0
_REQUESTS = re.compile(r'^qualms_requests_total\{code="(\d+)",route="(\w+)"\} (\S+)$', re.MULTILINE)
_KILLED_WORKERS = re.compile(r'^qualms_decode_workers_killed_total\{reason="(\w+)"\} (\S+)$', re.MULTILINE)
_CRASH = re.compile(rb"Traceback|Fatal Python error")
_MAX_LINES = 20

Counts = Counter[tuple[str, int]]
"""number of replies by route and status"""


@dataclass(frozen=True)
class Service:
    """A service that is ready."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path
    """standard output: lines of JSON"""
    stderr: Path
    """messages of C libraries about damaged files, and tracebacks"""

    def memory(self) -> int:
        """Resident memory in bytes of the process and all its descendants; 0 if it has ended."""
        return resident(self.process.pid) or 0

    def counts(self) -> Counts:
        """`qualms_requests_total`, without the requests for /metrics that read it."""
        values = _REQUESTS.findall(self._metrics())
        return Counter({(route, int(code)): int(float(value)) for code, route, value in values})

    def killed_workers(self) -> Counter[str]:
        """Number of worker processes that were killed, by reason; empty if the service has none."""
        values = _KILLED_WORKERS.findall(self._metrics())
        return Counter({reason: int(float(value)) for reason, value in values})

    def is_ready(self) -> bool:
        """Whether the service is ready."""
        return is_ready(self.port)

    def library_lines(self) -> int:
        """Number of lines on standard error, which C libraries print about damaged files."""
        return len(self.stderr.read_bytes().splitlines())

    def _metrics(self) -> str:
        connection = HTTPConnection(HOST, self.port, timeout=READY_SECONDS)
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
        connection.close()
        return text

    def log_errors(self) -> list[str]:
        """The first lines of the log that report an error or are not JSON, and tracebacks on standard error."""
        lines = [line.decode(errors="replace") for line in self.stderr.read_bytes().splitlines() if _CRASH.match(line)]
        with self.log.open("rb") as stream:
            for line in stream:
                if b'"level":"info"' not in line and _is_error(line):
                    lines.append(line.decode(errors="replace").strip())
                    if len(lines) >= _MAX_LINES:
                        break
        return lines


def _is_error(line: bytes) -> bool:
    try:
        record = json.loads(line)
    except ValueError:
        return bool(line.strip())
    return record["level"] in ("error", "critical") or "exception" in record


@contextmanager
def running_service(model: Path | str | None = None, **settings: object) -> Iterator[Service]:
    """Run the service, by default with the embedded model, with any settings; yield it when it is ready."""
    values = {"port": 0, "device": "cpu", "threads": 1, "decode_threads": 1, "drain_seconds": 0, **settings}
    variables = {name: value for name, value in os.environ.items() if not name.startswith("QUALMS_")}
    variables |= {f"QUALMS_{name.upper()}": str(value) for name, value in values.items()}
    command = [sys.executable, "-P", "-m", "qualms", "serve", *([] if model is None else [str(model)])]
    with tempfile.TemporaryDirectory() as folder:
        log, stderr = Path(folder) / "log", Path(folder) / "stderr"
        with log.open("wb") as stream, stderr.open("wb") as errors:
            process = subprocess.Popen(command, env=variables, stdout=stream, stderr=errors)
        try:
            yield Service(process, _port_when_ready(process, log, stderr), log, stderr)
        finally:
            process.kill()
            process.wait()


def _port_when_ready(process: subprocess.Popen[bytes], log: Path, stderr: Path) -> int:
    end = time.monotonic() + READY_SECONDS
    while time.monotonic() < end and process.poll() is None:
        listening = re.search(rb'"message":"listening".*"port":(\d+)', log.read_bytes())
        if listening and is_ready(port := int(listening[1])):
            return port
        time.sleep(0.02)
    raise RuntimeError(f"The service is not ready: {log.read_text()}{stderr.read_text()}")


def is_ready(port: int, seconds: float = READY_SECONDS) -> bool:
    """Whether /readyz is 200; an answer may take `seconds`."""
    connection = HTTPConnection(HOST, port, timeout=seconds)
    try:
        connection.request("GET", "/readyz")
        return connection.getresponse().status == 200
    except (OSError, HTTPException):
        return False
    finally:
        connection.close()
