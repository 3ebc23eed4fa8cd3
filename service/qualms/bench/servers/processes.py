"""Server processes for benchmarks, each pinned to its cores and always ended with the benchmark."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from types import FrameType
from typing import IO
from urllib.parse import urlsplit

from qualms.bench.servers.process_tree import resident
from qualms.errors import QualmsError

HOST = "127.0.0.1"
_NOT_INHERITED = tuple(
    f"QUALMS_{name}"
    for name in ("KEYS_FILE", "TLS_CERT", "TLS_KEY", "TLS_CLIENT_CA", "MANAGEMENT_HOST", "MANAGEMENT_PORT")
)
"""settings of a service in the same environment, with which a load generator would get no answers"""
_STOP_SECONDS = 10.0
_POLL_SECONDS = 0.01


class BenchError(QualmsError):
    """A benchmark cannot run as requested: a server or load generator failed, or an argument is not accepted."""


Cores = tuple[int, ...]
"""core numbers; empty if processes cannot be pinned on this system"""


def choose_cores(
    number: int = 1, available: Sequence[int] | None = None, siblings: Callable[[int], set[int]] | None = None
) -> tuple[Cores, Cores]:
    """The cores of the server, as many as `number`, and the core of the load generator.

    They are on different physical cores if possible, so that the load does not slow down the server's cores. If no core
    is left, the load generator shares those of the server. Raises BenchError if there are fewer cores than `number`.
    """
    if available is None:
        available = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if not available and number == 1:
        return (), ()
    if len(available) < number:
        raise BenchError(f"--cores is {number}, but the server can be pinned to at most {len(available)} cores here.")
    siblings = siblings or _siblings
    server: Cores = ()
    taken: set[int] = set()
    for _ in range(number):
        core = _first(available, without=set(server) | taken) or _first(available, without=set(server))
        server += core
        taken |= siblings(core[0])
    load = _first(available, without=set(server) | taken) or _first(available, without=set(server))
    return server, load or server


def _first(cores: Sequence[int], without: set[int]) -> Cores:
    return tuple(core for core in cores if core not in without)[:1]


def _siblings(core: int) -> set[int]:
    """The logical cores on the same physical core; only the core itself if the system does not list them."""
    try:
        text = Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list").read_text()
    except OSError:
        return {core}
    spans = [[int(end) for end in span.split("-")] for span in text.strip().split(",")]
    return {number for span in spans for number in range(span[0], span[-1] + 1)}


@contextmanager
def pinned(cores: Cores) -> Iterator[None]:
    """Pin this thread, and every process that it starts, to these cores."""
    if not cores:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@dataclass(frozen=True)
class ServerProcess:
    """A running server that is ready."""

    url: str
    pid: int

    def memory(self) -> int | None:
        """Memory of the process tree in bytes; None if the process has ended or the system has no /proc."""
        return resident(self.pid)


@contextmanager
def server(
    arguments: Callable[[int], list[str]],
    cores: Cores,
    *,
    wrapper: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
    ready_url: str | None = None,
    ready_seconds: float = 60.0,
) -> Iterator[ServerProcess]:
    """Run `python -m ARGUMENTS(port)` on these cores; yield it when /readyz returns 200, and end it afterwards.

    `wrapper` is a command that runs the server, for example valgrind, and `variables` are added to its environment.
    `ready_url` is where it is asked whether it is ready, by default at its own URL.
    """
    port = free_port()
    url = f"http://{HOST}:{port}"
    with tempfile.TemporaryFile() as errors:
        # -P: a folder named qualms in the working directory must not shadow this package.
        command = [*wrapper, sys.executable, "-P", "-m", *arguments(port)]
        inherited = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
        environment = {**inherited, **(variables or {})}
        with pinned(cores):
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors, env=environment)
        try:
            _wait_until_ready(ready_url or url, process, errors, ready_seconds)
            yield ServerProcess(url, process.pid)
        finally:
            _stop(process)


def get(url: str, timeout: float = 5.0) -> bytes:
    """The body of a reply with status 200; raises BenchError for any other status or if there is no reply."""
    parts = urlsplit(url)
    with closing(HTTPConnection(parts.hostname or "", parts.port, timeout)) as connection:
        try:
            connection.request("GET", parts.path)
            reply = connection.getresponse()
            body = reply.read()
        except (OSError, HTTPException) as error:
            raise BenchError(f"{url} does not respond: {error}.") from None
    if reply.status != 200:
        raise BenchError(f"{url} returned status {reply.status}; expected 200.")
    return body


def service_command(path: str) -> Callable[[int], list[str]]:
    """The arguments of `server` that serve a bundle."""
    return lambda port: ["qualms", "serve", path, "--host", HOST, "--port", str(port)]


def plain_command(path: str) -> Callable[[int], list[str]]:
    """The arguments of `server` that run the plain server with a bundle."""
    return lambda port: ["qualms.bench.servers.plain_server", path, str(port)]


@contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """Make SIGTERM unwind the stack like Ctrl-C, so that started processes are ended."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def exit_on_signal(number: int, _: FrameType | None) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, exit_on_signal)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def free_port() -> int:
    """A port of the loopback interface that is currently unused."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
    return port


def _wait_until_ready(url: str, process: subprocess.Popen[bytes], errors: IO[bytes], seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            get(f"{url}/readyz")
        except BenchError:
            if process.poll() is not None:
                raise BenchError(f"The server did not start: {_last_line(errors, process.returncode)}") from None
            time.sleep(_POLL_SECONDS)
        else:
            return
    raise BenchError(f"The server was not ready within {seconds:g} seconds.")


def _last_line(errors: IO[bytes], code: int) -> str:
    errors.seek(0)
    lines = errors.read().decode(errors="replace").split("\n")
    written = [line for line in lines if line.strip()]
    return written[-1].removeprefix("qualms: ") if written else f"it exited with code {code}."


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Send SIGINT, because SIGTERM would start draining; kill the process if it does not end in time."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    try:
        process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        pass
    finally:
        process.kill()  # does nothing if the process has ended
        process.wait()
