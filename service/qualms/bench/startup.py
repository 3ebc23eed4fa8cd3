"""Start time and memory of the service beside those of the plain server, with the same model and the same load.

Each server is started alone on one core, several times in alternation, and medians are reported.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from statistics import median
from urllib.parse import urlsplit

from rich import box
from rich.console import Console
from rich.table import Table

from qualms.bench.load import closed_loop
from qualms.bench.load.closed_loop import BuiltInClient, LoadGenerator, LoadResult
from qualms.bench.load.connection import content_type
from qualms.bench.load.sample_images import Pictures, sample_files
from qualms.bench.machine_limit import LimitMeter
from qualms.bench.servers.processes import (
    BenchError,
    Cores,
    choose_cores,
    exit_on_sigterm,
    pinned,
    plain_command,
    server,
    service_command,
)
from qualms.bundle.embedded import resolve_model
from qualms.bundle.file import open_bundle

CONCURRENCIES = (1, 16)
_LIMIT_BATCHES = (1, 2, 4, 8)
"""batches for which the machine's limit is measured; larger ones of a large network would need gigabytes"""
_REPLY_SECONDS = 60.0


@dataclass(frozen=True)
class Memory:
    """Memory of a process in bytes."""

    rss: int
    """resident, with all libraries"""
    pss: int
    """resident, with its share of the libraries that other processes use too"""


@dataclass(frozen=True)
class Startup:
    """One start of a server and the load after it."""

    ready: float
    """seconds from the start of the process until /readyz returns 200"""
    first_answer: float
    """seconds from the start of the process until the first reply to POST /predict"""
    before: Memory
    after: Memory
    loads: dict[int, LoadResult]
    """by concurrency"""


def run_startup(
    target: str | None = None,
    *,
    pictures: Pictures = "photo-640",
    seconds: float = 5.0,
    rounds: int = 3,
    generator: LoadGenerator | None = None,
    console: Console | None = None,
) -> dict[str, list[Startup]]:
    """Measure and print; `target` is a bundle's path or an embedded model's name. Returns the rounds by server."""
    if target and "://" in target:
        raise BenchError(f"--startup starts its own servers; it accepts a bundle or a model's name, not {target!r}.")
    console, bundle = console or Console(), open_bundle(resolve_model(target))
    files = sample_files(pictures, bundle.manifest.input)
    path, cores = str(bundle.path.resolve()), choose_cores()
    commands = {"qualms": service_command(path), "plain": plain_command(path)}
    results: dict[str, list[Startup]] = {name: [] for name in commands}
    with exit_on_sigterm():
        for _ in range(rounds):
            for name, command in commands.items():
                results[name].append(_start(command, files, seconds, generator or BuiltInClient(), cores))
        with pinned(cores[0]):
            meter = LimitMeter(bundle, files, max_batch=max(_LIMIT_BATCHES))
            limit = max(meter.measure(size, seconds / 2).images_per_second for size in _LIMIT_BATCHES)
    console.print(f"Pictures: {pictures}; one core; the machine's limit is {limit:,.1f} images/s.")
    _print(results, limit, console)
    return results


def read_memory(pid: int) -> Memory:
    """Memory of a process; raises BenchError on systems without /proc/PID/smaps_rollup."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    except OSError as error:
        raise BenchError(f"The memory of process {pid} cannot be read: {error.strerror}.") from None
    sizes = {line.partition(":")[0]: int(line.split()[1]) * 1024 for line in lines}
    return Memory(sizes["Rss"], sizes["Pss"])


def _start(
    command: Callable[[int], list[str]],
    files: list[bytes],
    seconds: float,
    generator: LoadGenerator,
    cores: tuple[Cores, Cores],
) -> Startup:
    server_core, load_core = cores
    started = time.monotonic()
    with server(command, server_core) as process:
        ready = time.monotonic() - started
        _post(f"{process.url}/predict", files[0])
        first_answer = time.monotonic() - started
        before = read_memory(process.pid)
        with pinned(load_core):
            loads = {size: generator(f"{process.url}/predict", files, seconds, size) for size in CONCURRENCIES}
        return Startup(ready, first_answer, before, read_memory(process.pid), loads)


def _post(url: str, file: bytes) -> None:
    parts = urlsplit(url)
    with closing(HTTPConnection(parts.hostname or "", parts.port, _REPLY_SECONDS)) as connection:
        connection.request("POST", parts.path, file, {"Content-Type": content_type(file)})
        status = connection.getresponse().status
    if status != 200:
        raise BenchError(f"{url} returned status {status}; expected 200.")


def _print(results: dict[str, list[Startup]], limit: float, console: Console) -> None:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("")
    for name in (*results, "ratio"):
        table.add_column(name, justify="right", no_wrap=True)
    for label, figure, digits in _FIGURES:
        values = [median(figure(one) for one in rounds) for rounds in results.values()]
        table.add_row(label, *(f"{value:,.{digits}f}" for value in values), f"{values[0] / values[1]:.2f}")
    for size in CONCURRENCIES:
        loads = [closed_loop.median([one.loads[size] for one in rounds]) for rounds in results.values()]
        for label, figures in _load_figures(loads, limit):
            table.add_row(f"{label}, concurrency {size}", *figures)
    console.print(table)


_FIGURES: Sequence[tuple[str, Callable[[Startup], float], int]] = (
    ("ready, s", lambda one: one.ready, 2),
    ("first answer, s", lambda one: one.first_answer, 2),
    ("RSS after it, MB", lambda one: one.before.rss / 1e6, 0),
    ("RSS after load, MB", lambda one: one.after.rss / 1e6, 0),
    ("PSS after it, MB", lambda one: one.before.pss / 1e6, 0),
    ("PSS after load, MB", lambda one: one.after.pss / 1e6, 0),
)


def _load_figures(loads: list[LoadResult], limit: float) -> list[tuple[str, list[str]]]:
    """The rows of one concurrency: one figure per server, and the ratio of the first to the second."""
    rates = [load.requests_per_second for load in loads]
    tails = [1e3 * load.p99 for load in loads]
    return [
        ("requests/s", [*(f"{rate:,.1f}" for rate in rates), f"{rates[0] / rates[1]:.2f}"]),
        ("of limit", [f"{rate / limit:.3f}" for rate in rates]),
        ("p99, ms", [*(f"{tail:,.1f}" for tail in tails), f"{tails[0] / tails[1]:.2f}"]),
        ("errors", [str(load.errors) for load in loads]),
    ]
