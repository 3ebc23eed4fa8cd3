"""Overload test: offer the service three times its capacity and check that it keeps answering in time.

Capacity and idle latency are measured first, on the same service and core, so that every check is a ratio.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

import numpy as np
import uvloop
from rich import box
from rich.console import Console
from rich.table import Table

from qualms.bench.load.closed_loop import LoadResult, median, run_closed_loop
from qualms.bench.load.connection import Connection
from qualms.bench.load.open_loop import OpenLoopResult, run_open_loop
from qualms.bench.load.sample_images import SmallPictures, sample_files
from qualms.bench.servers.processes import (
    BenchError,
    ServerProcess,
    choose_cores,
    exit_on_sigterm,
    pinned,
    server,
    service_command,
)
from qualms.bundle.embedded import resolve_model
from qualms.bundle.file import open_bundle

_FACTOR = 3.0
"""offered load as a multiple of capacity"""
_CONCURRENCY = 64
_ROUNDS = 3
_WARM_UP_SECONDS = 0.3
_POLL_SECONDS = 1.0

_MIN_GOODPUT = 0.8
"""share of capacity that must be answered in time"""
_MIN_IN_TIME = 0.99
"""share of admitted requests that must be answered in time, equivalent to a p99 within the deadline"""
_MAX_GROWTH = 1.05
"""memory in the last quarter of the overload divided by memory in its first quarter"""
_MAX_SLOWDOWN = 1.5
"""p50 after the overload divided by p50 before it"""
_MIN_SENT = 0.99
"""share of the due requests that the generator must send to be considered fast enough"""
_MIB = 2**20


@dataclass(frozen=True)
class Poll:
    """Readiness and memory of the service at one time, as an orchestrator would measure them."""

    ready: bool
    seconds: float
    """duration of the readiness probe, including a probe that timed out"""
    memory: int | None
    """bytes"""


@dataclass(frozen=True)
class OverloadResult:
    """Measurements before, during and after an overload."""

    capacity: float
    """requests/s in a closed loop"""
    before: LoadResult
    """one request at a time, before the overload"""
    offered: OpenLoopResult
    polls: Sequence[Poll]
    after: LoadResult | None
    """one request at a time, directly after the overload; None if no reply had status 200"""

    @property
    def goodput(self) -> float:
        """Replies/s with status 200 within the deadline."""
        return self.offered.in_time / self.offered.busy_seconds

    @property
    def share_of_capacity(self) -> float:
        """Goodput as a share of capacity."""
        return self.goodput / self.capacity

    @property
    def admitted_in_time(self) -> float:
        """Share of the requests not refused that got status 200 within the deadline."""
        admitted = self.offered.sent - self.offered.refused
        return self.offered.in_time / admitted if admitted else 0.0

    @property
    def memory(self) -> tuple[float, float] | None:
        """Median memory in bytes in the first and in the last quarter of the overload."""
        values = [poll.memory for poll in self.polls if poll.memory is not None]
        if not values:
            return None
        quarter = max(1, len(values) // 4)
        return float(np.median(values[:quarter])), float(np.median(values[-quarter:]))

    @property
    def generator_kept_up(self) -> bool:
        """Whether the load generator was fast enough to send the due requests."""
        offered = self.offered
        return offered.sent >= _MIN_SENT * (offered.sent + offered.skipped_late + offered.skipped_no_connection)

    @property
    def checks(self) -> dict[str, bool]:
        """Each expected behaviour, and whether it was observed."""
        offered, memory = self.offered, self.memory
        return {
            "admitted requests' p99 is within the deadline": self.admitted_in_time >= _MIN_IN_TIME,
            f"goodput is at least {_MIN_GOODPUT:g} of capacity": self.share_of_capacity >= _MIN_GOODPUT,
            "all other requests get 429 with a usable Retry-After": (
                not offered.other_statuses
                and not offered.unanswered
                and len(offered.retry_after_seconds) == offered.refused
            ),
            "memory does not grow": memory is not None and memory[1] <= _MAX_GROWTH * memory[0],
            "readiness stays true": bool(self.polls) and all(poll.ready for poll in self.polls),
            "latency recovers at once": (
                self.after is not None and not self.after.errors and self.after.p50 <= _MAX_SLOWDOWN * self.before.p50
            ),
        }


def run_overload(
    model: str | None = None,
    *,
    seconds: float = 60.0,
    deadline: float = 0.5,
    pictures: SmallPictures = "digits",
    idle_seconds: float = 2.0,
    console: Console | None = None,
) -> OverloadResult:
    """Start the service, overload it for `seconds`, and print the result; `model` is a bundle's path or a name."""
    if model is not None and "://" in model:
        raise BenchError(f"--overload starts its own service; it accepts a bundle or a model's name, not {model!r}.")
    console = console or Console()
    bundle = open_bundle(resolve_model(model))
    files, path = sample_files(pictures, bundle.manifest.input), str(bundle.path.resolve())
    server_cores, load_cores = choose_cores()
    serve = server(service_command(path), server_cores)
    with exit_on_sigterm(), serve as service, pinned(load_cores):
        result = measure(service, files, seconds, deadline, idle_seconds)
    print_overload(result, console)
    if server_cores and server_cores == load_cores:
        console.print("Server and load generator shared the only core, so the load took time from the server.")
    return result


def measure(
    service: ServerProcess, files: list[bytes], seconds: float, deadline: float, idle_seconds: float
) -> OverloadResult:
    """Measure idle latency, capacity, the overload, and idle latency again."""
    url = f"{service.url}/predict"

    def closed_loop(concurrency: int) -> LoadResult:
        return run_closed_loop(url, files, idle_seconds, concurrency, deadline).summary()

    run_closed_loop(url, files, _WARM_UP_SECONDS, _CONCURRENCY)
    before = closed_loop(1)
    capacity = median([closed_loop(_CONCURRENCY) for _ in range(_ROUNDS)]).requests_per_second
    polls: list[Poll] = []

    async def overload() -> OpenLoopResult:
        polling = asyncio.create_task(poll_service(service.url, service.memory, min(_POLL_SECONDS, seconds / 4), polls))
        try:
            return await run_open_loop(url, files, _FACTOR * capacity, seconds, deadline)
        finally:
            polling.cancel()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        offered = runner.run(overload())
    try:
        after = closed_loop(1)
    except BenchError:
        after = None
    return OverloadResult(capacity, before, offered, polls, after)


async def poll_service(
    url: str, memory: Callable[[], int | None], interval: float, polls: list[Poll], *, timeout: float = 1.0
) -> None:
    """Append a poll every `interval` seconds until cancelled; `timeout` is that of Kubernetes' probes."""
    start = time.perf_counter()
    while True:
        probe_start = time.perf_counter()
        ready = await _is_ready(url, timeout)
        polls.append(Poll(ready, time.perf_counter() - probe_start, memory()))
        elapsed = time.perf_counter() - start
        await asyncio.sleep(interval - elapsed % interval)


async def _is_ready(url: str, timeout: float) -> bool:
    probe = _Probe()
    try:
        async with asyncio.timeout(timeout):
            await probe.open(url)
            probe.send(f"GET /readyz HTTP/1.1\r\nHost: {urlsplit(url).netloc}\r\n\r\n".encode())
            return await probe.status == 200
    except OSError:  # includes TimeoutError
        return False
    finally:
        probe.close()


class _Probe(Connection):
    """A connection for one request; `status` is 0 if the connection breaks."""

    def __init__(self) -> None:
        super().__init__()
        self.status: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def reply_received(self, status: int, headers: dict[bytes, bytes]) -> None:
        if not self.status.done():
            self.status.set_result(status)

    def connection_broken(self) -> None:
        if not self.status.done():
            self.status.set_result(0)


def print_overload(result: OverloadResult, console: Console) -> None:
    """Print the figures and then the checks."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 2, 0, 0), pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column()
    for name, value in _figures(result):
        table.add_row(name, value)
    console.print(table)
    offered = result.offered
    if not result.generator_kept_up:
        console.print(
            f"The load generator could not keep the rate: {offered.skipped_late:,} requests were not sent because it was "
            f"behind, {offered.skipped_no_connection:,} because all {offered.peak_connections:,} connections were busy."
        )
    passed = [name for name, true in result.checks.items() if true]
    failed = [name for name, true in result.checks.items() if not true]
    summary = f"{len(passed)} of {len(result.checks)} checks passed"
    if passed:
        summary += f": {', '.join(passed)}"
    if failed:
        summary += f". Failed: {', '.join(failed)}"
    console.print(f"{summary}.")


def _figures(result: OverloadResult) -> list[tuple[str, str]]:
    offered, seconds, memory = result.offered, result.offered.seconds, result.memory
    others = [f"{status}: {count:,}" for status, count in sorted(offered.other_statuses.items())]
    waits = offered.retry_after_seconds
    usable = f", Retry-After in {len(waits) / offered.refused:.1%} of them" if offered.refused else ""
    span = f", {min(waits)} to {max(waits)} s" if waits else ""
    ready = sum(poll.ready for poll in result.polls)
    slowest = max((poll.seconds for poll in result.polls), default=0.0)
    return [
        ("capacity", f"{result.capacity:,.0f}/s in a closed loop with {_CONCURRENCY} connections"),
        ("due", f"{offered.rate:,.0f}/s for {seconds:g} s, {offered.rate / result.capacity:.2f} × capacity"),
        (
            "sent",
            f"{offered.sent / seconds:,.0f}/s, {offered.sent / seconds / result.capacity:.2f} × capacity; "
            f"{offered.peak_connections:,} connections; lag p99 {_milliseconds(offered.lags, 99)}",
        ),
        ("good in time", f"{result.goodput:,.0f}/s, {result.share_of_capacity:.2f} of capacity"),
        ("admitted, in time", f"{result.admitted_in_time:.2%} of those not refused"),
        (
            "good replies",
            f"{len(offered.good):,}, {offered.in_time / max(1, len(offered.good)):.2%} of them in time; "
            f"p50 {_milliseconds(offered.good, 50)}, p99 {_milliseconds(offered.good, 99)}"
            + (f", {np.percentile(offered.good, 99) / offered.deadline:.2f} of the deadline" if offered.good else ""),
        ),
        ("refused, 429", f"{offered.refused / seconds:,.0f}/s{usable}{span}"),
        ("other replies", ", ".join(others) or "none"),
        ("no reply", f"{offered.unanswered:,}"),
        (
            "memory",
            f"{memory[0] / _MIB:.1f} MiB in the first quarter, {memory[1] / _MIB:.1f} MiB in the last"
            if memory
            else "not available on this system",
        ),
        ("ready", f"{ready} of {len(result.polls)} polls, the slowest in {1e3 * slowest:.0f} ms"),
        ("one at a time, before", _latency(result.before)),
        ("one at a time, after", _latency(result.after) if result.after else "no successful reply"),
    ]


def _milliseconds(values: Sequence[float], percentile: float) -> str:
    return f"{1e3 * np.percentile(values, percentile):.1f} ms" if len(values) else "–"


def _latency(load: LoadResult) -> str:
    return f"p50 {1e3 * load.p50:.2f} ms, p99 {1e3 * load.p99:.2f} ms, {load.errors} errors"
