"""Servers as processes of their own, each on its core, that end with the benchmark whatever happens to it."""

import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from types import FrameType
from typing import IO
from urllib.parse import urlsplit

from qualms.errors import QualmsError

HOST = "127.0.0.1"
_READY_SECONDS = 60.0
_STOP_SECONDS = 10.0
_POLL_SECONDS = 0.05


class BenchError(QualmsError):
    """A server or a load generator that is needed for the comparison does not do its part."""


def choose_cores(
    available: Sequence[int] | None = None, siblings: Callable[[int], set[int]] | None = None
) -> tuple[int | None, int | None]:
    """The server's core and the load generator's, or None where processes cannot be pinned.

    The two share no physical core if that can be had: the server's core should be as fast as when it is alone.
    """
    if available is None:
        available = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if not available:
        return None, None
    server = available[0]
    together = (siblings or _siblings)(server)
    others = [core for core in available if core != server]
    apart = [core for core in others if core not in together]
    return server, (apart or others or [server])[0]


def _siblings(core: int) -> set[int]:
    """The logical cores of one physical core, as far as the system tells."""
    try:
        text = Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list").read_text()
    except OSError:
        return {core}
    spans = [[int(end) for end in span.split("-")] for span in text.strip().split(",")]
    return {number for span in spans for number in range(span[0], span[-1] + 1)}


@contextmanager
def pinned(core: int | None) -> Iterator[None]:
    """Keep this thread, and every process that it starts meanwhile, on one core."""
    if core is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@dataclass(frozen=True)
class Started:
    """A server that is ready."""

    url: str
    pid: int

    def memory(self) -> int | None:
        """Bytes that it holds in memory now; None where the system does not tell, or it has ended."""
        try:
            pages = Path(f"/proc/{self.pid}/statm").read_text().split()[1]
        except (OSError, LookupError):
            return None
        return int(pages) * resource.getpagesize()


@contextmanager
def server(arguments: Callable[[int], list[str]], core: int | None) -> Iterator[str]:
    """Run `python ARGUMENTS(port)` on a core; yields its address once /readyz says 200, and ends it afterwards."""
    with start(arguments, core) as started:
        yield started.url


@contextmanager
def start(arguments: Callable[[int], list[str]], core: int | None) -> Iterator[Started]:
    """The same, for who wants to know the process as well."""
    port = _free_port()
    url = f"http://{HOST}:{port}"
    with tempfile.TemporaryFile() as errors:
        # -P: a folder of the user's that is called service must not take the place of ours.
        command = [sys.executable, "-P", "-m", *arguments(port)]
        with pinned(core):
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors)
        try:
            _wait_until_ready(url, process, errors)
            yield Started(url, process.pid)
        finally:
            _stop(process)


def get(url: str, timeout: float = 5.0) -> bytes:
    """The body of a good reply; BenchError for any other, or for none."""
    parts = urlsplit(url)
    with closing(HTTPConnection(parts.hostname or "", parts.port, timeout)) as connection:
        try:
            connection.request("GET", parts.path)
            reply = connection.getresponse()
            body = reply.read()
        except (OSError, HTTPException) as error:
            raise BenchError(f"{url} does not answer: {error}.") from None
    if reply.status != 200:
        raise BenchError(f"{url} answers with status {reply.status}.")
    return body


@contextmanager
def terminable() -> Iterator[None]:
    """Let SIGTERM unwind the stack as Ctrl-C does, so that what was started is ended."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, _: FrameType | None) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
    return port


def _wait_until_ready(url: str, process: subprocess.Popen[bytes], errors: IO[bytes]) -> None:
    end = time.monotonic() + _READY_SECONDS
    while time.monotonic() < end:
        try:
            get(f"{url}/readyz")
        except BenchError:
            if process.poll() is not None:
                raise BenchError(f"A server did not start: {_last_line(errors, process.returncode)}") from None
            time.sleep(_POLL_SECONDS)
        else:
            return
    raise BenchError(f"A server was not ready within {_READY_SECONDS:g} seconds.")


def _last_line(errors: IO[bytes], code: int) -> str:
    errors.seek(0)
    lines = errors.read().decode(errors="replace").split("\n")
    said = [line for line in lines if line.strip()]
    return said[-1].removeprefix("qualms: ") if said else f"it ended with code {code}."


def _stop(process: subprocess.Popen[bytes]) -> None:
    """SIGINT, as SIGTERM would let the service drain first; then, if it must be, the end."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    try:
        process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        pass
    finally:
        process.kill()  # does nothing to a process that has ended
        process.wait()
