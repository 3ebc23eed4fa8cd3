"""The throughput of `qualms.Client` and `qualms.AsyncClient` as a share of wrk's, on the same service.

All rates are measured alternately within one run, and medians are reported. httpx alone, which both clients use and which sends
the same requests without reading results, shows how much of the rest is its own.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import cycle, islice

import httpx
import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from qualms.bench.load.closed_loop import LoadGenerator, default_generator
from qualms.bench.load.connection import content_type
from qualms.bench.load.sample_images import Pictures, sample_files
from qualms.bench.servers.processes import choose_cores, exit_on_sigterm, pinned, server, service_command
from qualms.bundle.embedded import resolve_model
from qualms.bundle.file import open_bundle
from qualms.client.async_client import AsyncClient
from qualms.client.sync_client import Client

CONCURRENT = 32
_LIST_IMAGES = 640
"""images in each call of the last row: ten requests at the service's default limit"""
_Run = Callable[[str, Sequence[bytes], float], float]
"""(URL of the service, files, seconds) → images per second"""


@dataclass(frozen=True)
class ClientRate:
    """The median rate of one way to send images, and the median of its share of wrk's in the same round."""

    name: str
    concurrency: int
    images_per_second: float
    of_wrk: float


def _loop(url: str, files: Sequence[bytes], seconds: float) -> float:
    with Client(url) as client:
        client.predict(files[0])
        return _repeat(client.predict, files, seconds)


def _httpx_loop(url: str, files: Sequence[bytes], seconds: float) -> float:
    with httpx.Client() as client:

        def send(file: bytes) -> None:
            client.post(f"{url}/predict", content=file, headers={"content-type": content_type(file)}).raise_for_status()

        send(files[0])
        return _repeat(send, files, seconds)


def _lists(url: str, files: Sequence[bytes], seconds: float) -> float:
    images = list(islice(cycle(files), _LIST_IMAGES))
    with Client(url) as client:
        client.predict(images)
        return _LIST_IMAGES * _repeat(client.predict, [images], seconds)


def _repeat(send: Callable[..., object], arguments: Sequence[object], seconds: float) -> float:
    """Calls per second, one at a time."""
    started, count, source = time.perf_counter(), 0, cycle(arguments)
    while (elapsed := time.perf_counter() - started) < seconds:
        send(next(source))
        count += 1
    return count / elapsed


def _tasks(url: str, files: Sequence[bytes], seconds: float) -> float:
    async def run() -> float:
        async with AsyncClient(url) as client:
            return await _gather(client.predict, files, seconds)

    return asyncio.run(run())


def _httpx_tasks(url: str, files: Sequence[bytes], seconds: float) -> float:
    async def run() -> float:
        async with httpx.AsyncClient() as client:

            async def send(file: bytes) -> None:
                headers = {"content-type": content_type(file)}
                (await client.post(f"{url}/predict", content=file, headers=headers)).raise_for_status()

            return await _gather(send, files, seconds)

    return asyncio.run(run())


async def _gather(send: Callable[..., Awaitable[object]], files: Sequence[bytes], seconds: float) -> float:
    """Calls per second of tasks that each send one image at a time."""
    await send(files[0])
    started, count, source = time.perf_counter(), 0, cycle(files)

    async def task() -> None:
        nonlocal count
        while time.perf_counter() - started < seconds:
            await send(next(source))
            count += 1

    await asyncio.gather(*(task() for _ in range(CONCURRENT)))
    return count / (time.perf_counter() - started)


_RUNS: dict[str, tuple[int, _Run]] = {
    "Client in a loop": (1, _loop),
    "httpx in a loop": (1, _httpx_loop),
    "AsyncClient, 32 tasks": (CONCURRENT, _tasks),
    "httpx, 32 tasks": (CONCURRENT, _httpx_tasks),
    f"Client, lists of {_LIST_IMAGES}": (CONCURRENT, _lists),
}
"""name in the table: concurrency of wrk that it is compared with, and the function"""


def run_client_rates(
    target: str | None = None,
    *,
    seconds: float = 5.0,
    rounds: int = 3,
    pictures: Pictures = "digits",
    generator: LoadGenerator | None = None,
    console: Console | None = None,
) -> list[ClientRate]:
    """Measure and print; `target` is a bundle's path or an embedded model's name."""
    generator, console = generator or default_generator(), console or Console()
    bundle = open_bundle(resolve_model(target))
    files = sample_files(pictures, bundle.manifest.input)
    server_cores, load_cores = choose_cores()
    rates: dict[str, list[tuple[float, float]]] = {name: [] for name in _RUNS}
    baseline: dict[int, list[float]] = {1: [], CONCURRENT: []}
    with ExitStack() as stack:
        stack.enter_context(exit_on_sigterm())
        service = stack.enter_context(server(service_command(str(bundle.path.resolve())), server_cores))
        stack.enter_context(pinned(load_cores))
        for _ in range(rounds):
            for concurrency, measured in baseline.items():
                load = generator(f"{service.url}/predict", files, seconds, concurrency)
                measured.append(load.requests_per_second)
                for name, (size, run) in _RUNS.items():
                    if size == concurrency:
                        rate = run(service.url, files, seconds)
                        rates[name].append((rate, rate / measured[-1]))
    rows = [
        ClientRate(generator.name, concurrency, float(np.median(measured)), 1.0)
        for concurrency, measured in baseline.items()
    ]
    for name, (concurrency, _) in _RUNS.items():
        rate, share = np.median(rates[name], axis=0).tolist()
        rows.append(ClientRate(name, concurrency, rate, share))
    _print(sorted(rows, key=lambda row: row.concurrency), generator, console)
    return rows


def _print(rows: Sequence[ClientRate], generator: LoadGenerator, console: Console) -> None:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for header in ("concurrency", "", "images/s", f"of {generator.name}"):
        table.add_column(header, justify="right" if header else "left", no_wrap=True)
    for row in rows:
        table.add_row(str(row.concurrency), row.name, f"{row.images_per_second:,.0f}", f"{row.of_wrk:.2f}")
    console.print(table)
