"""What the service does with three times more than it can: answer as much as ever, in time, and refuse the rest at once.

The service runs on a core of its own; capacity and calm are measured first, on the same service, so that every
statement is a ratio.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import uvloop
from rich import box
from rich.console import Console
from rich.table import Table

from qualms.bench.closed_loop import drive
from qualms.bench.load import Load, load_of, median
from qualms.bench.open_loop import Offered, offer
from qualms.bench.processes import HOST, BenchError, Started, choose_cores, pinned, start, terminable
from qualms.bench.sample_images import draw
from qualms.bench.watch import Look, watch
from qualms.bundle.embedded import resolve
from qualms.bundle.file import open_bundle

FACTOR = 3.0
"""times capacity"""
DEADLINE = 0.5
"""seconds in which each request is to be answered"""
_CONCURRENCY = 64
_ROUNDS = 3
_WARM_UP_SECONDS = 0.3
_LOOK_SECONDS = 1.0

_GOODPUT = 0.8
"""least share of capacity that is to be answered in time"""
_IN_TIME = 0.99
"""least share of admitted requests that are to be answered in time, as p99 says"""
_GROWTH = 1.05
"""most memory in the overload's last quarter, as a multiple of its first quarter's"""
_SLOWER = 1.5
"""most p50 afterwards, as a multiple of the calm one"""
_KEPT = 0.99
"""least share of what was due that a generator which keeps its rate offers"""
_MIB = 2**20


@dataclass(frozen=True)
class Overload:
    """What was measured before, during and after."""

    capacity: float
    """requests/s in a closed loop"""
    calm: Load
    """one request at a time, before"""
    offered: Offered
    looks: Sequence[Look]
    after: Load | None
    """one request at a time, at once afterwards; None without a good reply"""

    @property
    def goodput(self) -> float:
        """Good replies within the deadline, a second."""
        return self.offered.in_time / self.offered.busy_seconds

    @property
    def of_capacity(self) -> float:
        """Goodput as a share of capacity."""
        return self.goodput / self.capacity

    @property
    def admitted_in_time(self) -> float:
        """Of the requests that were not refused, the share that got a good reply within the deadline."""
        admitted = self.offered.offered - self.offered.refused
        return self.offered.in_time / admitted if admitted else 0.0

    @property
    def memory(self) -> tuple[float, float] | None:
        """Bytes held in the first and in the last quarter of the overload, medians."""
        held = [look.memory for look in self.looks if look.memory is not None]
        if not held:
            return None
        quarter = max(1, len(held) // 4)
        return float(np.median(held[:quarter])), float(np.median(held[-quarter:]))

    @property
    def kept_rate(self) -> bool:
        """Whether the generator offered what was due."""
        return self.offered.offered >= _KEPT * (
            self.offered.offered + self.offered.too_late + self.offered.no_connection
        )

    @property
    def statements(self) -> dict[str, bool]:
        """What should be true, and whether it is."""
        found, memory = self.offered, self.memory
        return {
            "admitted requests' p99 is within the deadline": self.admitted_in_time >= _IN_TIME,
            f"goodput is at least {_GOODPUT:g} of capacity": self.of_capacity >= _GOODPUT,
            "the rest get 429 with a usable Retry-After": (
                not found.others and not found.unanswered and len(found.waits) == found.refused
            ),
            "memory is flat": memory is not None and memory[1] <= _GROWTH * memory[0],
            "readiness stays true": bool(self.looks) and all(look.ready for look in self.looks),
            "latency is back at once": (
                self.after is not None and not self.after.errors and self.after.p50 <= _SLOWER * self.calm.p50
            ),
        }


def overload(
    model: str | None = None,
    *,
    seconds: float = 60.0,
    deadline: float = DEADLINE,
    factor: float = FACTOR,
    calm_seconds: float = 2.0,
    console: Console | None = None,
) -> Overload:
    """Start the service, overload it for `seconds`, and print what happened; `model` is a bundle's path or a name."""
    if model is not None and "://" in model:
        raise BenchError(f"An overload is for a service of the benchmark's own; {model!r} is not a bundle.")
    console = console or Console()
    bundle = open_bundle(resolve(model))
    pictures, path = draw(bundle.manifest.input), str(bundle.path.resolve())
    server_core, load_core = choose_cores()
    ours = start(lambda port: ["qualms", "serve", path, "--host", HOST, "--port", str(port)], server_core)
    with terminable(), ours as service, pinned(load_core):
        found = measure(service, pictures, seconds, deadline, factor, calm_seconds)
    show(found, console)
    if server_core is not None and server_core == load_core:
        console.print("Server and load shared the only core, so the load took its time from the server.")
    return found


def measure(
    service: Started, pictures: list[bytes], seconds: float, deadline: float, factor: float, calm_seconds: float
) -> Overload:
    """Calm, capacity, overload, and calm again."""
    url = f"{service.url}/predict"

    def closed(concurrency: int) -> Load:
        return load_of(drive(url, pictures, calm_seconds, concurrency, deadline))

    drive(url, pictures, _WARM_UP_SECONDS, _CONCURRENCY)
    calm = closed(1)
    capacity = median([closed(_CONCURRENCY) for _ in range(_ROUNDS)]).requests_per_second
    looks: list[Look] = []

    async def attack() -> Offered:
        watching = asyncio.create_task(watch(service.url, service.memory, min(_LOOK_SECONDS, seconds / 4), looks))
        try:
            return await offer(url, pictures, factor * capacity, seconds, deadline)
        finally:
            watching.cancel()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        offered = runner.run(attack())
    try:
        after = closed(1)
    except BenchError:
        after = None
    return Overload(capacity, calm, offered, looks, after)


def show(found: Overload, console: Console) -> None:
    """Print the figures, and last which statements hold."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 2, 0, 0), pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column()
    for name, value in _figures(found):
        table.add_row(name, value)
    console.print(table)
    offered = found.offered
    if not found.kept_rate:
        console.print(
            f"The load generator could not keep the rate: {offered.too_late:,} requests were not sent as it was behind, "
            f"{offered.no_connection:,} as all {offered.connections:,} connections were busy."
        )
    holds = [name for name, true in found.statements.items() if true]
    fails = [name for name, true in found.statements.items() if not true]
    said = f"{len(holds)} of {len(found.statements)} statements hold"
    if holds:
        said += f": {', '.join(holds)}"
    if fails:
        said += f". Not so: {', '.join(fails)}"
    console.print(f"{said}.")


def _figures(found: Overload) -> list[tuple[str, str]]:
    offered, seconds, memory = found.offered, found.offered.seconds, found.memory
    others = [f"{status}: {count:,}" for status, count in sorted(offered.others.items())]
    waits = offered.waits
    usable = f", Retry-After in {len(waits) / offered.refused:.1%} of them" if offered.refused else ""
    span = f", {min(waits)} to {max(waits)} s" if waits else ""
    ready = sum(look.ready for look in found.looks)
    slowest = max((look.seconds for look in found.looks), default=0.0)
    return [
        ("capacity", f"{found.capacity:,.0f}/s in a closed loop of {_CONCURRENCY}"),
        ("due", f"{offered.rate:,.0f}/s for {seconds:g} s, {offered.rate / found.capacity:.2f} × capacity"),
        (
            "offered",
            f"{offered.offered / seconds:,.0f}/s, {offered.offered / seconds / found.capacity:.2f} × capacity; "
            f"{offered.connections:,} connections; lag p99 {_milliseconds(offered.lags, 99)}",
        ),
        ("good in time", f"{found.goodput:,.0f}/s, {found.of_capacity:.2f} of capacity"),
        ("admitted, in time", f"{found.admitted_in_time:.2%} of those not refused"),
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
            else "not known on this system",
        ),
        ("ready", f"{ready} of {len(found.looks)} polls, the slowest in {1e3 * slowest:.0f} ms"),
        ("one at a time, before", _latency(found.calm)),
        ("one at a time, after", _latency(found.after) if found.after else "no good reply"),
    ]


def _milliseconds(values: Sequence[float], percentile: float) -> str:
    return f"{1e3 * np.percentile(values, percentile):.1f} ms" if len(values) else "–"


def _latency(load: Load) -> str:
    return f"p50 {1e3 * load.p50:.2f} ms, p99 {1e3 * load.p99:.2f} ms, {load.errors} errors"
