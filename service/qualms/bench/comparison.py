"""Compare the service with the machine's limit and with a plain server.

All three are measured alternately within one run, and medians are reported: other work on the machine slows down all of
them alike, so the ratios are more stable than the absolute figures.
"""

import ipaddress
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from urllib.parse import urlsplit

import numpy as np
import orjson
from rich.console import Console
from rich.progress import Progress

from qualms.bench.load.closed_loop import (
    LoadGenerator,
    LoadResult,
    default_generator,
    median,
    run_closed_loop,
    send_requests,
)
from qualms.bench.load.connection import content_type
from qualms.bench.load.sample_images import Pictures, sample_files
from qualms.bench.machine_limit import Limit, LimitMeter
from qualms.bench.servers.instructions import count_instructions, find_callgrind, find_perf
from qualms.bench.servers.process_tree import RequestMemory, cpu_seconds, find_listener, measure_requests
from qualms.bench.servers.processes import (
    HOST,
    BenchError,
    Cores,
    choose_cores,
    exit_on_sigterm,
    get,
    pinned,
    plain_command,
    server,
    service_command,
)
from qualms.bench.tables import (
    ComparisonRow,
    ServerLoad,
    print_breakdown,
    print_comparison,
    print_costs,
    print_instructions,
    print_memory,
)
from qualms.bundle.embedded import resolve_model
from qualms.bundle.file import Bundle, open_bundle
from qualms.images.input_spec import InputSpec
from qualms.settings import load_settings

CONCURRENCIES = (1, 8, 64)
_CONCURRENCIES_OF_LARGE_FILES = (1, 8)
"""more would mostly measure how bodies of megabytes wait"""
_WARM_UP_SECONDS = 0.3
_WARM_UP_REQUESTS = 3
"""warming up takes at least as long as so many requests, one at a time"""


@dataclass
class _Measured:
    """A server and what was measured of it."""

    name: str
    url: str
    pid: int | None
    """None if the process that listens at the URL is unknown, so that its CPU time and memory are"""
    loads: dict[int, list[LoadResult]] = field(default_factory=dict)
    """by concurrency, one for each round"""
    cpu: dict[int, list[float]] = field(default_factory=dict)
    """CPU seconds per successful reply, likewise"""

    def load(self, generator: LoadGenerator, files: list[bytes], seconds: float, concurrency: int) -> None:
        """Run the load generator once."""
        before = None if self.pid is None else cpu_seconds(self.pid)
        result = generator(f"{self.url}/predict", files, seconds, concurrency)
        after = None if self.pid is None else cpu_seconds(self.pid)
        self.loads.setdefault(concurrency, []).append(result)
        if before is not None and after is not None:
            self.cpu.setdefault(concurrency, []).append((after - before) / result.replies)

    def summary(self, concurrency: int) -> ServerLoad:
        """Medians over the rounds."""
        cpu = self.cpu.get(concurrency)
        return ServerLoad(median(self.loads[concurrency]), None if cpu is None else float(np.median(cpu)))


@dataclass(frozen=True)
class _Setup:
    """The running servers, the limit's meter, the files to send, and the cores to use."""

    ours: _Measured
    plain: _Measured | None
    limit: LimitMeter | None
    files: list[bytes]
    server_cores: Cores
    load_cores: Cores

    @property
    def servers(self) -> list[_Measured]:
        """The service, and the plain server if there is one."""
        return [self.ours] if self.plain is None else [self.ours, self.plain]


def default_concurrencies(pictures: Pictures) -> Sequence[int]:
    """The concurrencies that are measured if none are given."""
    return _CONCURRENCIES_OF_LARGE_FILES if pictures == "photo-12mp" else CONCURRENCIES


def compare(
    target: str | None = None,
    *,
    bundle: str | None = None,
    seconds: float = 5.0,
    rounds: int = 3,
    concurrencies: Sequence[int] | None = None,
    profile: bool = False,
    pictures: Pictures = "digits",
    instructions: bool = False,
    cores: int = 1,
    pid: int | None = None,
    generator: LoadGenerator | None = None,
    console: Console | None = None,
) -> list[ComparisonRow]:
    """Measure and print; `target` is a bundle's path, an embedded model's name, or the URL of a running service.

    A running service is compared with the limit and the plain server only if its `bundle` is given; its CPU time and
    memory are those of the process `pid`, by default the one that listens at the URL. Servers that are started run on
    `cores` cores, and the limit always on one. Instructions per request are counted if the processor's counters can be
    read; with `instructions`, they are otherwise counted by valgrind.
    """
    if instructions and target and "://" in target:
        raise BenchError(
            f"--instructions starts its own service; it accepts a bundle or a model's name, not {target!r}."
        )
    generator, console = generator or default_generator(), console or Console()
    sizes = sorted(set(concurrencies or default_concurrencies(pictures)))
    with exit_on_sigterm(), _set_up(target, bundle, pictures, cores, pid) as setup:
        console.print(_conditions(setup, generator))
        memory = {server.name: _memory_of_requests(server, setup) for server in setup.servers}
        rows = _measure(setup, generator, sizes, seconds, rounds, console)
        print_comparison(rows, console)
        print_costs(rows, console)
        print_memory(memory, console)
        if profile:
            with pinned(setup.load_cores):
                print_breakdown(setup.ours.url, setup.files, seconds, rows, console)
    if not (target and "://" in target):
        _count(str(resolve_model(target)), setup.files, sizes, instructions, console)
    return rows


def _count(path: str, files: list[bytes], sizes: Sequence[int], requested: bool, console: Console) -> None:
    """Print instructions per request if they can be counted; without counters only if they were requested."""
    tool = find_perf() or (find_callgrind() if requested else None)
    if tool is not None:
        print_instructions(count_instructions(path, files, sizes, tool), tool.name, console)
    elif requested:
        console.print("Instructions are not counted: perf can read no counters here, and valgrind is not installed.")


@contextmanager
def _set_up(target: str | None, given: str | None, pictures: Pictures, cores: int, pid: int | None) -> Iterator[_Setup]:
    """Start the servers, and end them afterwards; `given` is the bundle of a running service, `pid` its process."""
    server_cores, load_cores = choose_cores(cores)
    settings = load_settings()
    running = _running_service(target, pid) if target and "://" in target else None
    if running is None and given is not None:
        raise BenchError(f"The bundle {given!r} is accepted only together with the URL of a running service.")
    if running is None and pid is not None:
        raise BenchError(f"--pid {pid} is accepted only together with the URL of a running service.")
    if running is not None and given is None:
        spec, _ = _served_model(running.url)
        yield _Setup(running, None, None, sample_files(pictures, spec), server_cores, load_cores)
        return
    bundle = open_bundle(resolve_model(given or target))
    if running is not None:
        _check_digest(running.url, bundle)
    path, files = str(bundle.path.resolve()), sample_files(pictures, bundle.manifest.input)
    with pinned(server_cores[:1]):
        limit = LimitMeter(bundle, files, settings.device, settings.max_batch)
    with ExitStack() as servers:
        if running is None:
            service = servers.enter_context(server(service_command(path), server_cores))
            running = _Measured("qualms", service.url, service.pid)
        plain = servers.enter_context(server(plain_command(path), server_cores))
        yield _Setup(running, _Measured("plain", plain.url, plain.pid), limit, files, server_cores, load_cores)


def _running_service(target: str, pid: int | None) -> _Measured:
    url = _loopback(target)
    return _Measured("qualms", url, find_listener(urlsplit(url).port or 80) if pid is None else pid)


def _memory_of_requests(server: _Measured, setup: _Setup) -> RequestMemory | None:
    """Send each file once, one at a time, before the load leaves memory in the server's allocators."""
    send = partial(send_requests, f"{server.url}/predict", setup.files, len(setup.files), 1)
    with pinned(setup.load_cores):
        return None if server.pid is None else measure_requests(server.pid, send)


def _measure(
    setup: _Setup, generator: LoadGenerator, sizes: Sequence[int], seconds: float, rounds: int, console: Console
) -> list[ComparisonRow]:
    """Measure limit, service and plain server alternately, `rounds` times at each concurrency."""
    limits: dict[int, list[Limit]] = {size: [] for size in sizes}
    # auto_refresh would start a thread that disturbs the measurement.
    with Progress(console=console, auto_refresh=False, transient=True) as progress:
        task = progress.add_task("measuring", total=rounds * len(sizes))
        progress.refresh()
        with pinned(setup.load_cores):
            for server in setup.servers:
                _warm_up(f"{server.url}/predict", setup.files, sizes[-1])
        for _ in range(rounds):
            for size in sizes:
                if setup.limit is not None:
                    with pinned(setup.server_cores[:1]):
                        limits[size].append(setup.limit.measure(size, seconds))
                for server in setup.servers:
                    with pinned(setup.load_cores):
                        server.load(generator, setup.files, seconds, size)
                progress.update(task, advance=1, refresh=True)
    return [
        ComparisonRow(
            concurrency=size,
            ours=setup.ours.summary(size),
            plain=None if setup.plain is None else setup.plain.summary(size),
            limit=_best([_median(limits[smaller]) for smaller in sizes if smaller <= size and limits[smaller]]),
        )
        for size in sizes
    ]


def _warm_up(url: str, files: list[bytes], concurrency: int) -> None:
    start = time.perf_counter()
    send_requests(url, files, 1, 1)
    one = time.perf_counter() - start
    run_closed_loop(url, files, _WARM_UP_SECONDS + _WARM_UP_REQUESTS * one, concurrency)


def _median(limits: Sequence[Limit]) -> Limit:
    """The round with the median rate; the lower of the two middle ones if their number is even."""
    ordered = sorted(limits, key=lambda limit: limit.images_per_second)
    return ordered[(len(ordered) - 1) // 2]


def _best(limits: Sequence[Limit]) -> Limit | None:
    """The limit of the fastest batch size; larger batches are not always faster."""
    return max(limits, key=lambda limit: limit.images_per_second, default=None)


def _conditions(setup: _Setup, generator: LoadGenerator) -> str:
    """One sentence about the load generator, the files and the cores."""
    cores = _name_cores(_affinity(setup.ours.pid) or setup.server_cores)
    if not setup.server_cores:
        place = "processes cannot be pinned to cores on this system"
    elif set(setup.load_cores) <= set(setup.server_cores):
        place = f"server and load generator share {cores}, so the load takes time from the server"
    else:
        place = f"server on {cores}, load generator on {_name_cores(setup.load_cores)}"
    size = int(np.median([len(file) for file in setup.files]))
    kind = content_type(setup.files[0]).removeprefix("image/").upper()
    return f"Load by {generator.name}: {len(setup.files)} {kind} files of about {size:,} bytes in rotation; {place}."


def _affinity(pid: int | None) -> Cores:
    """The cores on which a process may run; empty if that is unknown."""
    try:
        return () if pid is None else tuple(sorted(os.sched_getaffinity(pid)))
    except (OSError, AttributeError):  # there is no such process, or the system has no affinity
        return ()


def _name_cores(cores: Cores) -> str:
    return f"core{'s' if len(cores) > 1 else ''} {', '.join(map(str, cores))}"


def _loopback(url: str) -> str:
    """The URL without its path; raises BenchError unless it is http:// on the loopback interface."""
    parts = urlsplit(url)
    name = parts.hostname or ""
    try:
        local = name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        local = False
    if parts.scheme != "http" or not local:
        raise BenchError(
            f"The URL {url!r} is not accepted; it should be http:// on the loopback interface, "
            f"for example http://{HOST}:8000."
        )
    return f"http://{parts.netloc}"


def _served_model(url: str) -> tuple[InputSpec, str]:
    """Input and digest of the model of a running service."""
    body = get(f"{url}/models")
    try:
        model = orjson.loads(body)["models"][0]
        return InputSpec.model_validate(model["input"]), str(model["digest"])
    except (ValueError, LookupError, TypeError):
        raise BenchError(f"{url} is not a Qualms service, or its model is not loaded yet.") from None


def _check_digest(url: str, bundle: Bundle) -> None:
    _, digest = _served_model(url)
    if digest != bundle.digest:
        raise BenchError(
            f"{url} serves the model with digest {digest[:16]}…, but the digest of {bundle.path} is {bundle.digest[:16]}…."
        )
