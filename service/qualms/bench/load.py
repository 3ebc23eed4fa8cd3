"""Keep a server busy and take the time of its answers, with wrk where it is installed."""

import json
import math
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from qualms.bench.closed_loop import Replies, drive
from qualms.bench.processes import BenchError

_PATIENCE = 30.0
"""seconds that wrk may take beyond what it was told"""

_SCRIPT = """
local bodies = {BODIES}
local requests, turn = {}, 0

function init(args)
  for place, body in ipairs(bodies) do
    requests[place] = wrk.format("POST", nil, {["Content-Type"] = "image/png"}, body)
  end
end

function request()
  turn = turn % #requests + 1
  return requests[turn]
end

function done(summary, latency, _)
  local found = summary.errors
  local broken = found.connect + found.read + found.write + found.timeout
  io.write(string.format('{"requests": %d, "refused": %d, "broken": %d, "microseconds": %d, "p50": %d, "p99": %d}\\n',
    summary.requests, found.status, broken, summary.duration, latency:percentile(50), latency:percentile(99)))
end
"""


@dataclass(frozen=True)
class Load:
    """What a server did while it was kept busy."""

    requests_per_second: float
    p50: float
    """seconds"""
    p99: float
    errors: int
    """replies that were not good, and connections that broke"""


class Generator(Protocol):
    """Something that keeps a server busy."""

    name: str

    def __call__(self, url: str, bodies: list[bytes], seconds: float, concurrency: int) -> Load:
        """POST the bodies, PNG files, in turn for `seconds`, always `concurrency` at a time."""
        ...


class Wrk:
    """The program wrk, on one thread; it takes whole seconds only."""

    name = "wrk"

    def __init__(self, program: str) -> None:
        self._program = program

    def __call__(self, url: str, bodies: list[bytes], seconds: float, concurrency: int) -> Load:
        """Run wrk once."""
        whole = math.ceil(seconds)
        with tempfile.TemporaryDirectory() as folder:
            script = Path(folder) / "post.lua"
            script.write_text(_SCRIPT.replace("BODIES", ", ".join(map(_lua_string, bodies))))
            command = [self._program, "-t1", f"-c{concurrency}", f"-d{whole}s", "-s", str(script), url]
            try:
                done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=whole + _PATIENCE)
            except subprocess.TimeoutExpired:
                raise BenchError(f"wrk did not end within {whole + _PATIENCE:g} seconds.") from None
        return parse_wrk(done.stdout + done.stderr)


class OwnClient:
    """Our own client, in this thread."""

    name = "the client of this program"

    def __call__(self, url: str, bodies: list[bytes], seconds: float, concurrency: int) -> Load:
        """Drive the server and sum up."""
        return load_of(drive(url, bodies, seconds, concurrency))


def load_of(replies: Replies) -> Load:
    """What the replies, of which one at least was good, come to."""
    p50, p99 = np.percentile(replies.latencies, (50, 99)).tolist()
    return Load(len(replies.latencies) / replies.seconds, p50, p99, replies.errors)


def best_generator() -> Generator:
    """wrk, or our own client where there is none."""
    program = shutil.which("wrk")
    return OwnClient() if program is None else Wrk(program)


def parse_wrk(output: str) -> Load:
    """Read the line that our script adds to what wrk prints; only good replies count as requests served."""
    lines = [line for line in output.splitlines() if line.strip()]
    found = [json.loads(line) for line in lines if line.startswith('{"requests": ')]
    if not found:
        raise BenchError(f"wrk failed: {lines[-1] if lines else 'it said nothing'}.")
    counts = found[-1]
    good = counts["requests"] - counts["refused"]
    if good == 0:
        raise BenchError(f"Of {counts['requests']:,} replies to wrk, none was good.")
    errors = counts["refused"] + counts["broken"]
    return Load(1e6 * good / counts["microseconds"], counts["p50"] / 1e6, counts["p99"] / 1e6, errors)


def median(loads: Sequence[Load]) -> Load:
    """Each figure's median over several loads; errors add up."""
    return Load(
        float(np.median([load.requests_per_second for load in loads])),
        float(np.median([load.p50 for load in loads])),
        float(np.median([load.p99 for load in loads])),
        sum(load.errors for load in loads),
    )


def _lua_string(data: bytes) -> str:
    return '"' + "".join(f"\\{byte:03d}" for byte in data) + '"'
