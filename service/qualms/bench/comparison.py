"""Compare the service with the machine's limit and with a plain server, in turns within one run, by medians.

A busy machine slows all of them alike, so the ratios stand where the figures do not.
"""

import ipaddress
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from urllib.parse import urlsplit

import numpy as np
import orjson
from rich.console import Console
from rich.progress import Progress

from qualms.bench.breakdown import break_down
from qualms.bench.load import Generator, Load, OwnClient, best_generator, median
from qualms.bench.machine_limit import Limit, LimitMeter
from qualms.bench.processes import HOST, BenchError, choose_cores, get, pinned, server, terminable
from qualms.bench.report import Row, show
from qualms.bench.sample_images import draw
from qualms.bundle.embedded import resolve
from qualms.bundle.file import Bundle, open_bundle
from qualms.images.input_spec import InputSpec
from qualms.settings import load_settings

CONCURRENCIES = (1, 8, 64)
_WARM_UP_SECONDS = 0.3


@dataclass(frozen=True)
class _Parties:
    """Whom to measure, and where."""

    ours: str
    plain: str | None
    limit: LimitMeter | None
    pictures: list[bytes]
    server_core: int | None
    load_core: int | None


def bench(
    target: str | None = None,
    *,
    bundle: str | None = None,
    seconds: float = 5.0,
    rounds: int = 3,
    concurrencies: Sequence[int] = CONCURRENCIES,
    profile: bool = False,
    generator: Generator | None = None,
    console: Console | None = None,
) -> list[Row]:
    """Measure and print; `target` is a bundle's path, an embedded model's name, or the URL of a running service.

    A running service is compared with limit and plain server only where the `bundle` that it serves is given.
    """
    generator, console = generator or best_generator(), console or Console()
    sizes = sorted(set(concurrencies))
    with terminable(), _parties(target, bundle) as parties:
        console.print(_conditions(parties, generator))
        rows = _measure(parties, generator, sizes, seconds, rounds, console)
        show(rows, console)
        if profile:
            with pinned(parties.load_core):
                break_down(parties.ours, parties.pictures, seconds, rows, console)
    return rows


@contextmanager
def _parties(target: str | None, given: str | None) -> Iterator[_Parties]:
    """Start what is to be measured, and end it afterwards."""
    server_core, load_core = choose_cores()
    settings = load_settings()
    url = _loopback(target) if target and "://" in target else None
    if url is None and given is not None:
        raise BenchError("A bundle of its own is for a running service; give the URL first.")
    if url is not None and given is None:
        spec, _ = _served(url)
        yield _Parties(url, None, None, draw(spec), server_core, load_core)
        return
    bundle = open_bundle(resolve(given or target))
    if url is not None:
        _check_served(url, bundle)
    path, pictures = str(bundle.path.resolve()), draw(bundle.manifest.input)
    with pinned(server_core):
        limit = LimitMeter(bundle, pictures, settings.device, settings.max_batch)
    started = server(lambda port: ["qualms", "serve", path, "--host", HOST, "--port", str(port)], server_core)
    plain = server(lambda port: ["qualms.bench.plain_server", path, str(port)], server_core)
    with nullcontext(url) if url else started as ours, plain as beside:
        yield _Parties(ours, beside, limit, pictures, server_core, load_core)


def _measure(
    parties: _Parties, generator: Generator, sizes: Sequence[int], seconds: float, rounds: int, console: Console
) -> list[Row]:
    """Limit, service and plain server in turns, `rounds` times at each concurrency."""
    limits: dict[int, list[Limit]] = {size: [] for size in sizes}
    loads: dict[tuple[str, int], list[Load]] = {}
    urls = [url for url in (parties.ours, parties.plain) if url is not None]
    with Progress(console=console, auto_refresh=False, transient=True) as progress:  # a thread of its own would disturb
        task = progress.add_task("measuring", total=rounds * len(sizes))
        progress.refresh()
        with pinned(parties.load_core):
            for url in urls:
                OwnClient()(f"{url}/predict", parties.pictures, _WARM_UP_SECONDS, sizes[-1])
        for _ in range(rounds):
            for size in sizes:
                if parties.limit is not None:
                    with pinned(parties.server_core):
                        limits[size].append(parties.limit.measure(size, seconds))
                for url in urls:
                    with pinned(parties.load_core):
                        load = generator(f"{url}/predict", parties.pictures, seconds, size)
                    loads.setdefault((url, size), []).append(load)
                progress.update(task, advance=1, refresh=True)
    return [
        Row(
            concurrency=size,
            ours=median(loads[parties.ours, size]),
            plain=None if parties.plain is None else median(loads[parties.plain, size]),
            limit=_best([_median(limits[smaller]) for smaller in sizes if smaller <= size and limits[smaller]]),
        )
        for size in sizes
    ]


def _median(limits: Sequence[Limit]) -> Limit:
    """The round whose rate is the median one, the lower of two."""
    ordered = sorted(limits, key=lambda limit: limit.images_per_second)
    return ordered[(len(ordered) - 1) // 2]


def _best(limits: Sequence[Limit]) -> Limit | None:
    """What the best batch that so many requests can make would do: the largest is not always it."""
    return max(limits, key=lambda limit: limit.images_per_second, default=None)


def _conditions(parties: _Parties, generator: Generator) -> str:
    """How it is measured, for whoever reads the figures later."""
    if parties.server_core is None:
        where = "processes cannot be pinned to cores here"
    elif parties.server_core == parties.load_core:
        where = "server and load share the only core, so the load takes its time from the server"
    else:
        where = f"server on core {parties.server_core}, load on core {parties.load_core}"
    size = int(np.median([len(picture) for picture in parties.pictures]))
    return f"Load by {generator.name}, {len(parties.pictures)} PNG files of about {size:,} bytes in turn; {where}."


def _loopback(url: str) -> str:
    """The URL without a path, if it is on this machine."""
    parts = urlsplit(url)
    name = parts.hostname or ""
    try:
        local = name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        local = False
    if parts.scheme != "http" or not local:
        raise BenchError(
            f"The URL {url!r} is not benchmarked; accepted is http:// on loopback, such as http://{HOST}:8000."
        )
    return f"http://{parts.netloc}"


def _served(url: str) -> tuple[InputSpec, str]:
    """Input and digest of the model that a running service answers with."""
    body = get(f"{url}/models")
    try:
        model = orjson.loads(body)["models"][0]
        return InputSpec.model_validate(model["input"]), str(model["digest"])
    except (ValueError, LookupError, TypeError):
        raise BenchError(f"{url} does not serve a model of ours, or not yet.") from None


def _check_served(url: str, bundle: Bundle) -> None:
    _, digest = _served(url)
    if digest != bundle.digest:
        raise BenchError(f"{url} serves the model {digest[:16]}…, not {bundle.path}, which is {bundle.digest[:16]}….")
