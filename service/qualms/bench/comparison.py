"""Compare the service with the machine's limit and with a plain server.

All three are measured alternately within one run, and medians are reported: other work on the machine slows down all of
them alike, so the ratios are more stable than the absolute figures.
"""

import ipaddress
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

import numpy as np
import orjson
from rich.console import Console
from rich.progress import Progress

from qualms.bench.closed_loop import BuiltInClient, LoadGenerator, LoadResult, default_generator, median
from qualms.bench.instructions import count_instructions, find_callgrind, find_perf
from qualms.bench.machine_limit import Limit, LimitMeter
from qualms.bench.processes import (
    HOST,
    BenchError,
    choose_cores,
    exit_on_sigterm,
    get,
    pinned,
    plain_command,
    server,
    service_command,
)
from qualms.bench.sample_images import Pictures, sample_files
from qualms.bench.tables import ComparisonRow, print_breakdown, print_comparison, print_instructions
from qualms.bundle.embedded import resolve_model
from qualms.bundle.file import Bundle, open_bundle
from qualms.images.input_spec import InputSpec
from qualms.settings import load_settings

CONCURRENCIES = (1, 8, 64)
_WARM_UP_SECONDS = 0.3


@dataclass(frozen=True)
class _Setup:
    """The running servers, the limit's meter, the files to send, and the cores to use."""

    ours: str
    plain: str | None
    limit: LimitMeter | None
    files: list[bytes]
    server_core: int | None
    load_core: int | None


def compare(
    target: str | None = None,
    *,
    bundle: str | None = None,
    seconds: float = 5.0,
    rounds: int = 3,
    concurrencies: Sequence[int] = CONCURRENCIES,
    profile: bool = False,
    pictures: Pictures = "digits",
    instructions: bool = False,
    generator: LoadGenerator | None = None,
    console: Console | None = None,
) -> list[ComparisonRow]:
    """Measure and print; `target` is a bundle's path, an embedded model's name, or the URL of a running service.

    A running service is compared with the limit and the plain server only if its `bundle` is given. Instructions per
    request are counted if the processor's counters can be read; with `instructions`, they are otherwise counted by
    valgrind.
    """
    if instructions and target and "://" in target:
        raise BenchError(
            f"--instructions starts its own service; it accepts a bundle or a model's name, not {target!r}."
        )
    generator, console = generator or default_generator(), console or Console()
    sizes = sorted(set(concurrencies))
    with exit_on_sigterm(), _set_up(target, bundle, pictures) as setup:
        console.print(_conditions(setup, generator))
        rows = _measure(setup, generator, sizes, seconds, rounds, console)
        print_comparison(rows, console)
        if profile:
            with pinned(setup.load_core):
                print_breakdown(setup.ours, setup.files, seconds, rows, console)
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
def _set_up(target: str | None, given: str | None, pictures: Pictures) -> Iterator[_Setup]:
    """Start the servers, and end them afterwards; `given` is the bundle of a running service."""
    server_core, load_core = choose_cores()
    settings = load_settings()
    url = _loopback(target) if target and "://" in target else None
    if url is None and given is not None:
        raise BenchError(f"The bundle {given!r} is accepted only together with the URL of a running service.")
    if url is not None and given is None:
        spec, _ = _served_model(url)
        yield _Setup(url, None, None, sample_files(pictures, spec), server_core, load_core)
        return
    bundle = open_bundle(resolve_model(given or target))
    if url is not None:
        _check_digest(url, bundle)
    path, files = str(bundle.path.resolve()), sample_files(pictures, bundle.manifest.input)
    with pinned(server_core):
        limit = LimitMeter(bundle, files, settings.device, settings.max_batch)
    with ExitStack() as servers:
        if url is None:
            url = servers.enter_context(server(service_command(path), server_core)).url
        plain = servers.enter_context(server(plain_command(path), server_core))
        yield _Setup(url, plain.url, limit, files, server_core, load_core)


def _measure(
    setup: _Setup, generator: LoadGenerator, sizes: Sequence[int], seconds: float, rounds: int, console: Console
) -> list[ComparisonRow]:
    """Measure limit, service and plain server alternately, `rounds` times at each concurrency."""
    limits: dict[int, list[Limit]] = {size: [] for size in sizes}
    loads: dict[tuple[str, int], list[LoadResult]] = {}
    urls = [url for url in (setup.ours, setup.plain) if url is not None]
    # auto_refresh would start a thread that disturbs the measurement.
    with Progress(console=console, auto_refresh=False, transient=True) as progress:
        task = progress.add_task("measuring", total=rounds * len(sizes))
        progress.refresh()
        with pinned(setup.load_core):
            for url in urls:
                BuiltInClient()(f"{url}/predict", setup.files, _WARM_UP_SECONDS, sizes[-1])
        for _ in range(rounds):
            for size in sizes:
                if setup.limit is not None:
                    with pinned(setup.server_core):
                        limits[size].append(setup.limit.measure(size, seconds))
                for url in urls:
                    with pinned(setup.load_core):
                        load = generator(f"{url}/predict", setup.files, seconds, size)
                    loads.setdefault((url, size), []).append(load)
                progress.update(task, advance=1, refresh=True)
    return [
        ComparisonRow(
            concurrency=size,
            ours=median(loads[setup.ours, size]),
            plain=None if setup.plain is None else median(loads[setup.plain, size]),
            limit=_best([_median(limits[smaller]) for smaller in sizes if smaller <= size and limits[smaller]]),
        )
        for size in sizes
    ]


def _median(limits: Sequence[Limit]) -> Limit:
    """The round with the median rate; the lower of the two middle ones if their number is even."""
    ordered = sorted(limits, key=lambda limit: limit.images_per_second)
    return ordered[(len(ordered) - 1) // 2]


def _best(limits: Sequence[Limit]) -> Limit | None:
    """The limit of the fastest batch size; larger batches are not always faster."""
    return max(limits, key=lambda limit: limit.images_per_second, default=None)


def _conditions(setup: _Setup, generator: LoadGenerator) -> str:
    """One sentence about the load generator, the files and the cores."""
    if setup.server_core is None:
        cores = "processes cannot be pinned to cores on this system"
    elif setup.server_core == setup.load_core:
        cores = "server and load generator share the only core, so the load takes time from the server"
    else:
        cores = f"server on core {setup.server_core}, load generator on core {setup.load_core}"
    size = int(np.median([len(file) for file in setup.files]))
    return f"Load by {generator.name}: {len(setup.files)} PNG files of about {size:,} bytes in rotation; {cores}."


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
