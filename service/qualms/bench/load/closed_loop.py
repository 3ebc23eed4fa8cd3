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
from itertools import islice
from pathlib import Path
from typing import Protocol

import numpy as np
import uvloop

from qualms.bench.load.connection import Connection, content_type, post_requests
from qualms.bench.servers.processes import BenchError

_WRK_EXTRA_SECONDS = 30.0
"""how much longer than requested wrk may run before it is stopped"""
_WRK_TIMEOUT_SECONDS = 15
"""wrk counts replies that take longer as errors; the default of the service's deadline is 10 seconds"""

_WRK_SCRIPT = """
local files = {FILES}
local requests, turn = {}, 0

function init(args)
  for index, file in ipairs(files) do
    local stream = assert(io.open(file.path, "rb"))
    requests[index] = wrk.format("POST", nil, {["Content-Type"] = file.typeAUTHORIZATION}, stream:read("*a"))
    stream:close()
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
    replies: int
    """replies with status 200"""


def median(results: Sequence[LoadResult]) -> LoadResult:
    """The median of each figure over several results, and the sums of their errors and replies."""
    return LoadResult(
        float(np.median([result.requests_per_second for result in results])),
        float(np.median([result.p50 for result in results])),
        float(np.median([result.p99 for result in results])),
        sum(result.errors for result in results),
        sum(result.replies for result in results),
    )


class LoadGenerator(Protocol):
    """A program that generates closed-loop load."""

    name: str

    def __call__(self, url: str, bodies: list[bytes], seconds: float, concurrency: int) -> LoadResult:
        """POST the bodies, which are PNG or JPEG files, in rotation for `seconds` over `concurrency` connections."""
        ...


class Wrk:
    """wrk with one thread; durations are rounded up to whole seconds, because wrk accepts no others."""

    name = "wrk"

    def __init__(self, program: str, authorization: str | None = None) -> None:
        """`authorization` is the value of that header; it is in a file, because others see the arguments of a process."""
        self._program, self._authorization = program, authorization

    def __call__(self, url: str, bodies: list[bytes], seconds: float, concurrency: int) -> LoadResult:
        """Run wrk once."""
        whole = math.ceil(seconds)
        timeout = whole + _WRK_EXTRA_SECONDS
        with tempfile.TemporaryDirectory() as folder:
            script = Path(folder) / "post.lua"
            files = []
            for index, body in enumerate(bodies):
                path = Path(folder) / f"body{index}"
                path.write_bytes(body)
                files.append(f"{{path = [[{path}]], type = '{content_type(body)}'}}")
            header = "" if self._authorization is None else f", Authorization = [[{self._authorization}]]"
            script.write_text(_WRK_SCRIPT.replace("FILES", ", ".join(files)).replace("AUTHORIZATION", header))
            options = ["-t1", f"-c{concurrency}", f"-d{whole}s", f"--timeout={_WRK_TIMEOUT_SECONDS}s"]
            command = [self._program, *options, "-s", str(script), url]
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
    return LoadResult(1e6 * good / counts["microseconds"], counts["p50"] / 1e6, counts["p99"] / 1e6, errors, good)


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
        good = len(self.latencies)
        return LoadResult(good / self.seconds, p50, p99, self.errors, good)


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


def send_requests(url: str, bodies: list[bytes], count: int, concurrency: int, timeout: float = 600.0) -> int:
    """POST `count` bodies in rotation over `concurrency` connections; return how many replies have status 200.

    Raises BenchError if less than 0.95 of the replies have. A few are lost if a slow server closes idle connections.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        replies = runner.run(_run(url, islice(post_requests(url, bodies), count), timeout, concurrency))
    good = len(replies.latencies)
    if good < 0.95 * count:
        raise BenchError(f"{url} returned {good:,} successful replies to {count:,} requests.")
    return good


async def _run(url: str, requests: Iterator[bytes], seconds: float, concurrency: int) -> Replies:
    """Send requests for `seconds`, or until each of the requests has a reply."""
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
        await asyncio.wait([connection.ended for connection in connections], timeout=seconds)
    for connection in connections:
        connection.close()
    replies.seconds = time.perf_counter() - start
    return replies


class _ClosedLoopConnection(Connection):
    """Sends the next request as soon as a reply is complete."""

    def __init__(self, requests: Iterator[bytes], replies: Replies) -> None:
        super().__init__()
        self._requests, self._replies = requests, replies
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """done when no request is left or the connection is broken"""
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
        self.ended.set_result(None)

    def _send_next(self) -> None:
        request = next(self._requests, None)
        if request is None:
            self.close()
            self.ended.set_result(None)
            return
        self._sent_at = time.perf_counter()
        self.send(request)
