"""Log lines while stdout blocks or fails: LineQueue on real pipes, and real processes that log."""

import errno
import gc
import json
import logging
import os
import signal
import subprocess
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from qualms.bundle.file import Bundle
from qualms.telemetry import logs
from qualms.telemetry.line_queue import LineQueue

TIMEOUT = 30.0
Until = Callable[[Callable[[], bool]], None]


# A queue in this process


class FullPipe:
    """A pipe that is full. Every write to it is read separately, because it is in packet mode."""

    def __init__(self) -> None:
        self.reader, self.writer = os.pipe2(os.O_DIRECT)
        os.set_blocking(self.writer, False)
        self._filler = 0
        try:
            while True:
                self._filler += os.write(self.writer, b"x")
        except BlockingIOError:
            os.set_blocking(self.writer, True)

    def close_reader(self) -> None:
        """From now on, writes fail with a broken pipe."""
        os.close(self.reader)
        self.reader = -1

    def drain(self) -> None:
        """Make room, so that writes no longer block."""
        while self._filler:
            self._filler -= len(os.read(self.reader, 1))

    def writes(self) -> list[bytes]:
        """Everything that was written until all writers were closed."""
        os.close(self.writer)
        self.writer = -1
        return list(iter(lambda: os.read(self.reader, 2**16), b""))

    def close(self) -> None:
        for descriptor in (self.reader, self.writer):
            if descriptor >= 0:
                os.close(descriptor)


@pytest.fixture
def pipe() -> Iterator[FullPipe]:
    full = FullPipe()
    yield full
    full.close()


def report(count: int) -> bytes:
    return b"dropped %d\n" % count


def numbered(count: int) -> list[bytes]:
    return [b"line %04d\n" % number for number in range(count)]


def test_lines_that_wait_are_written_together(pipe: FullPipe) -> None:
    queue = LineQueue(pipe.writer, report)
    for line in numbered(100):
        queue.put(line)
    pipe.drain()
    queue.close(TIMEOUT)
    writes = pipe.writes()
    assert b"".join(writes) == b"".join(numbered(100))
    assert len(writes) <= 2, "one write that was blocked, and one for the lines that came later"


def test_lines_beyond_the_limit_in_bytes_are_dropped_and_reported(pipe: FullPipe) -> None:
    queue = LineQueue(pipe.writer, report, max_bytes=105)
    for line in numbered(50):
        queue.put(line)
    assert queue.dropped == 40
    pipe.drain()
    queue.close(TIMEOUT)
    assert b"".join(pipe.writes()) == b"".join([*numbered(10), report(40)])


def test_lines_beyond_the_limit_in_lines_are_dropped_and_reported(pipe: FullPipe) -> None:
    queue = LineQueue(pipe.writer, report, max_lines=5)
    for line in numbered(50):
        queue.put(line)
    dropped = queue.dropped
    assert 40 <= dropped <= 45, "five lines wait, and up to five are in a write that is blocked"
    pipe.drain()
    queue.close(TIMEOUT)
    written = b"".join(pipe.writes()).splitlines(keepends=True)
    assert sum(line.startswith(b"line") for line in written) == 50 - dropped
    assert report(dropped) in written


def test_each_drop_is_reported_once(pipe: FullPipe) -> None:
    queue = LineQueue(pipe.writer, report, max_bytes=25)
    for line in numbered(3):
        queue.put(line)
    pipe.drain()
    received = b""
    while not received.endswith(report(1)):
        received += os.read(pipe.reader, 2**16)
    queue.put(b"next\n")
    queue.close(TIMEOUT)
    assert received == b"".join([*numbered(2), report(1)])
    assert b"".join(pipe.writes()) == b"next\n"


def test_closing_gives_up_while_the_pipe_is_full(
    pipe: FullPipe, capfd: pytest.CaptureFixture[str], until: Until
) -> None:
    queue = LineQueue(pipe.writer, report)
    queue.put(b"line\n")
    queue.close(timeout=0.01)
    queue.put(b"late\n")
    assert queue.dropped == 1
    pipe.close_reader()
    until(lambda: queue.dropped == 2)
    until(lambda: "broken pipe" in capfd.readouterr().err)


def test_waiting_records_keep_no_frames_of_exceptions_alive(pipe: FullPipe, capfd: pytest.CaptureFixture[str]) -> None:
    class Local:
        pass

    handler = logs.LineHandler(pipe.writer, logs.to_line)

    def fail() -> "weakref.ref[Local]":
        local = Local()
        try:
            raise KeyError(local)  # noqa: TRY301
        except KeyError:
            handler.handle(logging.LogRecord("qualms", logging.ERROR, "", 0, "failed", None, sys.exc_info()))
        return weakref.ref(local)

    reference = fail()
    gc.collect()
    assert reference() is None
    pipe.drain()
    handler.close()
    (line,) = map(json.loads, b"".join(pipe.writes()).splitlines())
    assert "KeyError" in line["exception"]


# Processes


PREAMBLE = """
import logging, os, resource, signal, sys, threading, time
from qualms.telemetry import logs

def until(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "timeout"
        time.sleep(0.001)

def write_stderr(text):
    os.write(2, f"{text}\\n".encode())

logs.configure("info")
log = logging.getLogger("qualms.test")
"""


def command(program: str) -> list[str]:
    return [sys.executable, "-c", PREAMBLE + program]


def start(program: str) -> subprocess.Popen[bytes]:
    """A process whose three standard streams are pipes."""
    pipe = subprocess.PIPE
    return subprocess.Popen(command(program), stdin=pipe, stdout=pipe, stderr=pipe)


def run(program: str, stdout: Any = subprocess.PIPE) -> tuple[bytes, str]:
    """Run a program that succeeds; returns stdout and stderr."""
    done = subprocess.run(command(program), stdout=stdout, stderr=subprocess.PIPE, check=False, timeout=TIMEOUT)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr.decode()


def parsed(stdout: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stdout.splitlines()]


def sentence(number: int) -> str:
    reason = os.strerror(number).lower()
    return f"qualms: Log lines cannot be written ({reason}); qualms_log_lines_dropped_total counts them.\n"


def test_a_blocked_stdout_drops_lines_and_reports_them_when_it_is_read_again() -> None:
    program = """
for number in range(30_000):
    log.info("line", extra={"number": number})
write_stderr(logs.dropped())
sys.stdin.read()
log.info("last")
"""
    with start(program) as process:
        assert process.stderr is not None
        dropped = int(process.stderr.readline())
        stdout, stderr = process.communicate(timeout=TIMEOUT)
    lines = parsed(stdout)
    assert (process.returncode, stderr) == (0, b"")
    assert dropped > 0
    reported = sum(line["dropped"] for line in lines if line["message"] == "log lines dropped")
    assert reported >= dropped
    assert sum(line["message"] in ("line", "last") for line in lines) == 30_001 - reported
    numbers = [line["number"] for line in lines if line["message"] == "line"]
    assert numbers == sorted(numbers)


@pytest.mark.slow
def test_a_blocked_stdout_does_not_prevent_the_exit() -> None:
    with start("for _ in range(30_000): log.info('line')") as process:
        assert process.wait(TIMEOUT) == 0
        assert process.stderr is not None
        assert process.stderr.read() == b""


def test_all_lines_are_written_before_the_exit() -> None:
    stdout, stderr = run("for number in range(5_000): log.info('line', extra={'number': number})")
    assert [line["number"] for line in parsed(stdout)] == list(range(5_000))
    assert stderr == ""


def test_lines_are_written_before_the_exit_after_an_uncaught_exception() -> None:
    done = subprocess.run(command("log.info('line'); 1 / 0"), capture_output=True, check=False, timeout=TIMEOUT)
    assert done.returncode == 1
    assert [line["message"] for line in parsed(done.stdout)] == ["line"]


DROP_THREE = """
for number in range(1, 4):
    log.info("line")
    until(lambda: logs.dropped() == number)
"""


def test_a_full_disk_is_reported_in_one_sentence() -> None:
    with Path("/dev/full").open("wb") as full:
        _, stderr = run(DROP_THREE, full)
    assert stderr == sentence(errno.ENOSPC)


def test_a_closed_pipe_is_reported_in_one_sentence() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        _, stderr = run(DROP_THREE, writer)
    finally:
        os.close(writer)
    assert stderr == sentence(errno.EPIPE)


def test_a_stdout_that_is_open_for_reading_only_is_reported_in_one_sentence() -> None:
    with Path(os.devnull).open("rb") as null:
        _, stderr = run(DROP_THREE, null)
    assert stderr == sentence(errno.EBADF)


def test_a_stdout_that_is_closed_is_reported_in_one_sentence(tmp_path: Path) -> None:
    """Another file gets the number of the closed descriptor; no line may be written to it."""
    path = tmp_path / "other"
    program = f"file = open({str(path)!r}, 'wb'); assert file.fileno() == 1\n{DROP_THREE}"
    shell = ["sh", "-c", 'exec "$0" "$@" >&-', *command(program)]
    done = subprocess.run(shell, stderr=subprocess.PIPE, text=True, check=False, timeout=TIMEOUT)
    assert (
        done.stderr
        == "qualms: Log lines cannot be written (stdout is closed); qualms_log_lines_dropped_total counts them.\n"
    )
    assert done.returncode == 0
    assert path.read_bytes() == b""


def test_a_blocked_stderr_does_not_stop_the_process(pipe: FullPipe) -> None:
    with Path("/dev/full").open("wb") as full:
        process = subprocess.Popen(command(DROP_THREE), stdout=full, stderr=pipe.writer)
        assert process.wait(TIMEOUT) == 0


def test_writing_goes_on_when_the_disk_has_space_again(tmp_path: Path) -> None:
    """A limit on the size of files acts like a full disk: the line that reaches it is written in part."""
    program = f"""
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
resource.setrlimit(resource.RLIMIT_FSIZE, (150, hard))
{DROP_THREE.replace("range(1, 4)", "range(1, 2)").replace('"line"', '"x" * 200')}
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
log.info("after")
"""
    path = tmp_path / "log"
    with path.open("wb") as file:
        _, stderr = run(program, file)
    torn, *lines = path.read_bytes().splitlines()
    assert len(torn) == 150
    after, dropped = map(json.loads, lines)
    assert after["message"] == "after"
    assert (dropped["level"], dropped["message"], dropped["dropped"]) == ("warning", "log lines dropped", 1)
    assert stderr == sentence(errno.EFBIG)


def test_a_non_blocking_stdout_loses_no_lines() -> None:
    program = """
os.set_blocking(1, False)
for number in range(5_000):
    log.info("line", extra={"number": number})
write_stderr("logged")
"""
    with start(program) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == b"logged\n"
        stdout, stderr = process.communicate(timeout=TIMEOUT)
    assert [line["number"] for line in parsed(stdout)] == list(range(5_000))
    assert (process.returncode, stderr) == (0, b"")


def test_threads_log_complete_lines() -> None:
    program = """
def work(thread):
    for number in range(500):
        log.info("line", extra={"worker": thread, "number": number})

threads = [threading.Thread(target=work, args=(thread,)) for thread in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""
    stdout, stderr = run(program)
    lines = parsed(stdout)
    for thread in range(8):
        assert [line["number"] for line in lines if line["worker"] == thread] == list(range(500))
    assert stderr == ""


def test_signal_handlers_may_log_while_a_line_is_logged() -> None:
    program = """
counts = {"main": 0, "signal": 0}

def handle(number, frame):
    log.info("signal")
    counts["signal"] += 1

signal.signal(signal.SIGALRM, handle)
signal.setitimer(signal.ITIMER_REAL, 0.0002, 0.0002)
while counts["signal"] < 500 and counts["main"] < 1_000_000:
    log.info("main")
    counts["main"] += 1
signal.setitimer(signal.ITIMER_REAL, 0)
write_stderr(f"{counts['main']} {counts['signal']} {logs.dropped()}")
"""
    stdout, stderr = run(program)
    logged_by_main, logged_by_handler, dropped = map(int, stderr.split())
    written = Counter(line["message"] for line in parsed(stdout))
    assert logged_by_handler >= 500
    assert written["main"] + written["signal"] + dropped == logged_by_main + logged_by_handler


@pytest.mark.slow
def test_the_service_answers_and_stops_while_nobody_reads_its_log(
    bundle: Bundle, free_port: Callable[[], int], until: Until
) -> None:
    port = free_port()
    variables = {name: value for name, value in os.environ.items() if not name.startswith("QUALMS_")}
    settings = {"QUALMS_PORT": str(port), "QUALMS_DEVICE": "cpu", "QUALMS_THREADS": "1", "QUALMS_DRAIN_SECONDS": "0"}
    serve = [sys.executable, "-m", "qualms", "serve", str(bundle.path)]
    url = f"http://127.0.0.1:{port}"

    def is_ready() -> bool:
        try:
            return client.get(f"{url}/readyz").status_code == 200
        except httpx.TransportError:
            return False

    with (
        httpx.Client(trust_env=False, timeout=TIMEOUT) as client,
        subprocess.Popen(
            serve, env=variables | settings, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process,
    ):
        try:
            until(is_ready)
            for _ in range(1_000):  # more lines than fit into a pipe
                assert client.get(f"{url}/nothing").status_code == 404
            assert client.get(f"{url}/livez").status_code == 200
            process.send_signal(signal.SIGTERM)
            assert process.wait(TIMEOUT) == 0
            assert process.stderr is not None
            assert process.stderr.read() == ""
        finally:
            process.kill()
