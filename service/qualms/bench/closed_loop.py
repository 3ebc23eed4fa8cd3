"""Closed-loop load: each connection sends its next request when the reply to the previous one has arrived.

The load comes from wrk if it is installed. Otherwise it comes from the built-in client, which also records the
Server-Timing header of each reply.
"""

import asyncio
import json
import math
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Protocol, cast
from urllib.parse import urlsplit

import httptools
import numpy as np
import uvloop

from qualms.bench.processes import BenchError

_WRK_EXTRA_SECONDS = 30.0
"""how much longer than requested wrk may run before it is stopped"""

_WRK_SCRIPT = """
local bodies = {BODIES}
local requests, turn = {}, 0

function init(args)
  for index, body in ipairs(bodies) do
    requests[index] = wrk.format("POST", nil, {["Content-Type"] = "image/png"}, body)
  end
end

function request()
  turn = turn % #requests + 1
  return requests[turn]
end

function done(summary, latency, _)
  local errors = summary.errors
  local broken = errors.connect + errors.read + errors.write + errors.timeout
  io.write(string.format('{"requests": %d, "refused": %d, "broken": %d, "microseconds": %d, "p50": %d, "p99": %d}\\n',
    summary.requests, errors.status, broken, summary.duration, latency:percentile(50), latency:percentile(99)))
end
"""

_TIMING = re.compile(rb"(\w+);dur=([0-9.]+)")


@dataclass(frozen=True)
class LoadResult:
    """Throughput and latency of a server under closed-loop load."""

    requests_per_second: float
    p50: float
    """seconds"""
    p99: float
    errors: int
    """replies with a status other than 200, and broken connections"""


def median(results: Sequence[LoadResult]) -> LoadResult:
    """The median of each figure over several results, and the sum of their errors."""
    return LoadResult(
        float(np.median([result.requests_per_second for result in results])),
        float(np.median([result.p50 for result in results])),
        float(np.median([result.p99 for result in results])),
        sum(result.errors for result in results),
    )


class LoadGenerator(Protocol):
    """A program that generates closed-loop load."""

    name: str

    def __call__(self, url: str, bodies: list[bytes], seconds: float, concurrency: int) -> LoadResult:
        """POST the bodies, which are PNG files, in rotation for `seconds` over `concurrency` connections."""
        ...


class Wrk:
    """wrk with one thread; durations are rounded up to whole seconds, because wrk accepts no others."""

    name = "wrk"

    def __init__(self, program: str) -> None:
        self._program = program

    def __call__(self, url: str, bodies: list[bytes], seconds: float, concurrency: int) -> LoadResult:
        """Run wrk once."""
        whole = math.ceil(seconds)
        timeout = whole + _WRK_EXTRA_SECONDS
        with tempfile.TemporaryDirectory() as folder:
            script = Path(folder) / "post.lua"
            script.write_text(_WRK_SCRIPT.replace("BODIES", ", ".join(map(_lua_string, bodies))))
            command = [self._program, "-t1", f"-c{concurrency}", f"-d{whole}s", "-s", str(script), url]
            try:
                done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout)
            except subprocess.TimeoutExpired:
                raise BenchError(f"wrk did not end within {timeout:g} seconds.") from None
        return parse_wrk(done.stdout + done.stderr)


class BuiltInClient:
    """The client of this module, in the calling thread."""

    name = "the built-in client"

    def __call__(self, url: str, bodies: list[bytes], seconds: float, concurrency: int) -> LoadResult:
        """Run the closed loop once and summarise its replies."""
        return run_closed_loop(url, bodies, seconds, concurrency).summary()


def default_generator() -> LoadGenerator:
    """wrk if it is installed, otherwise the built-in client."""
    program = shutil.which("wrk")
    return BuiltInClient() if program is None else Wrk(program)


def parse_wrk(output: str) -> LoadResult:
    """Read the JSON line that our script adds to wrk's output; only replies with status 200 count as served."""
    lines = [line for line in output.splitlines() if line.strip()]
    summaries = [json.loads(line) for line in lines if line.startswith('{"requests": ')]
    if not summaries:
        raise BenchError(f"wrk failed: {lines[-1] if lines else 'it printed nothing'}.")
    counts = summaries[-1]
    good = counts["requests"] - counts["refused"]
    if good == 0:
        raise BenchError(f"None of the {counts['requests']:,} replies to wrk was successful.")
    errors = counts["refused"] + counts["broken"]
    return LoadResult(1e6 * good / counts["microseconds"], counts["p50"] / 1e6, counts["p99"] / 1e6, errors)


def _lua_string(data: bytes) -> str:
    return '"' + "".join(f"\\{byte:03d}" for byte in data) + '"'


@dataclass
class Replies:
    """All replies to the built-in client in one run."""

    latencies: list[float] = field(default_factory=list)
    """seconds, for replies with status 200"""
    timings: list[bytes] = field(default_factory=list)
    """Server-Timing headers of the same replies; empty if a reply had none"""
    errors: int = 0
    seconds: float = 0.0

    def timing(self, index: int) -> dict[str, float]:
        """Seconds per stage of one reply, from its Server-Timing header."""
        return {name.decode(): float(value) / 1e3 for name, value in _TIMING.findall(self.timings[index])}

    def summary(self) -> LoadResult:
        """Throughput and latency; at least one reply must have had status 200."""
        p50, p99 = np.percentile(self.latencies, (50, 99)).tolist()
        return LoadResult(len(self.latencies) / self.seconds, p50, p99, self.errors)


def run_closed_loop(
    url: str, bodies: list[bytes], seconds: float, concurrency: int, deadline: float | None = None
) -> Replies:
    """POST the bodies in rotation for `seconds`, one request at a time on each of `concurrency` connections.

    A connection that breaks counts as an error and is not reopened. A `deadline` in seconds is sent as X-Request-Timeout.
    Raises BenchError if no reply has status 200.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        replies = runner.run(_run(url, post_requests(url, bodies, deadline), seconds, concurrency))
    if not replies.latencies:
        raise BenchError(f"{url} returned no successful reply within {seconds:g} seconds.")
    return replies


async def _run(url: str, requests: Iterator[bytes], seconds: float, concurrency: int) -> Replies:
    replies = Replies()
    start = time.perf_counter()
    connections = []
    for _ in range(concurrency):
        connection = _ClosedLoopConnection(requests, replies)
        try:
            await connection.open(url)
            connections.append(connection)
        except OSError:
            replies.errors += 1
    if connections:
        await asyncio.sleep(seconds)
    for connection in connections:
        connection.close()
    replies.seconds = time.perf_counter() - start
    return replies


def post_requests(url: str, bodies: list[bytes], deadline: float | None = None) -> Iterator[bytes]:
    """Endless HTTP requests that POST the bodies, which are PNG files, in rotation."""
    parts = urlsplit(url)
    head = f"POST {parts.path} HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: image/png\r\n"
    if deadline is not None:
        head += f"X-Request-Timeout: {deadline:g}\r\n"
    return cycle([f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body for body in bodies])


class Connection(asyncio.Protocol):
    """One HTTP connection with one request at a time; subclasses define how a reply is handled."""

    _transport: asyncio.Transport

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._headers: dict[bytes, bytes] = {}
        self.is_open = False

    async def open(self, url: str) -> None:
        """Connect; raises OSError if the server does not accept the connection."""
        parts = urlsplit(url)
        loop = asyncio.get_running_loop()
        await loop.create_connection(lambda: self, parts.hostname or "", parts.port or 80)

    def send(self, request: bytes) -> None:
        """Send a request; the reply to the previous one must be complete."""
        self._headers = {}
        self._transport.write(request)

    def close(self) -> None:
        """Close the connection; a pending reply is not reported."""
        if self.is_open:
            self.is_open = False
            self._transport.abort()

    @property
    def keep_alive(self) -> bool:
        """Whether the server keeps the connection open after the reply just read."""
        return bool(self._parser.should_keep_alive())

    def reply_received(self, status: int, headers: dict[bytes, bytes]) -> None:
        """Called when a reply is complete; header names are in lower case."""
        raise NotImplementedError

    def connection_broken(self) -> None:
        """Called when the server has closed the connection or sent invalid HTTP; the connection is closed."""
        raise NotImplementedError

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio callback: the connection is open."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's transports do not inherit from it
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        """asyncio callback: data has arrived."""
        if not self.is_open:
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._break()

    def connection_lost(self, error: Exception | None) -> None:
        """asyncio callback: the connection was closed by either side."""
        if self.is_open:
            self._break()

    def on_header(self, name: bytes, value: bytes) -> None:
        """httptools callback: one header was read."""
        self._headers[name.lower()] = value

    def on_message_complete(self) -> None:
        """httptools callback: the reply is complete."""
        self.reply_received(self._parser.get_status_code(), self._headers)

    def _break(self) -> None:
        self.close()
        self.connection_broken()


class _ClosedLoopConnection(Connection):
    """Sends the next request as soon as a reply is complete."""

    def __init__(self, requests: Iterator[bytes], replies: Replies) -> None:
        super().__init__()
        self._requests, self._replies = requests, replies
        self._sent_at = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._send_next()

    def reply_received(self, status: int, headers: dict[bytes, bytes]) -> None:
        if status == 200:
            self._replies.latencies.append(time.perf_counter() - self._sent_at)
            self._replies.timings.append(headers.get(b"server-timing", b""))
        else:
            self._replies.errors += 1
        self._send_next()

    def connection_broken(self) -> None:
        self._replies.errors += 1

    def _send_next(self) -> None:
        self._sent_at = time.perf_counter()
        self.send(next(self._requests))
