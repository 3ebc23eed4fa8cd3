"""Overload by a mix of small requests and photographs of 12 megapixels, each kind at its own rate and with its own deadline.

Capacities are measured first, each kind alone in a closed loop. A request of a kind costs 1 ÷ its capacity, so a mix with
a share f of photographs has the capacity 1 ÷ ((1 − f) ÷ small + f ÷ photographs). Three times that is offered.

What each kind must keep is defined so that both can be kept at once:

- Photographs are offered more than they could get alone. At least half of their own capacity must be answered in time.
- That leaves half of the service for small requests. If less than half of their own capacity is offered, as with a small
  model, nearly all of those sent must be answered in time; otherwise nearly half of their capacity. "Nearly" is 95 %.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import uvloop
from rich import box
from rich.console import Console
from rich.table import Table

from qualms.bench.load.closed_loop import median, run_closed_loop, send_requests
from qualms.bench.load.open_loop import OpenLoopResult, run_open_loop
from qualms.bench.load.photographs import draw_photographs
from qualms.bench.load.sample_images import SmallPictures, sample_files
from qualms.bench.overload import Poll, poll_service
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
"""offered load as a multiple of the mix's capacity"""
_SMALL_CONCURRENCY = 64
_PHOTO_CONCURRENCY = 4
_ROUNDS = 3
_MAX_PHOTO_CONNECTIONS = 256
"""photographs sent at the same time, which limits the memory of bodies on their way"""
_POLL_SECONDS = 1.0

MIN_SMALL = 0.95
MIN_PHOTOS = 0.5
_MIN_SENT = 0.99
"""share of the due requests that the generator must send to be considered fast enough"""


@dataclass(frozen=True)
class KindResult:
    """One kind of request: its capacity alone in requests/s, and what became of it in the mix."""

    name: str
    capacity: float
    offered: OpenLoopResult

    @property
    def sent_per_second(self) -> float:
        """Requests/s that were sent."""
        return self.offered.sent / self.offered.seconds

    @property
    def goodput(self) -> float:
        """Replies/s with status 200 within the deadline."""
        return self.offered.in_time / self.offered.busy_seconds

    @property
    def share_of_sent(self) -> float:
        """Share of the requests sent that were answered in time."""
        return self.offered.in_time / self.offered.sent if self.offered.sent else 0.0

    @property
    def share_of_capacity(self) -> float:
        """Goodput divided by the capacity of this kind alone."""
        return self.goodput / self.capacity

    @property
    def generator_kept_up(self) -> bool:
        """Whether the load generator was fast enough to send the due requests."""
        offered = self.offered
        return offered.sent >= _MIN_SENT * (offered.sent + offered.skipped_late + offered.skipped_no_connection)


@dataclass(frozen=True)
class MixedResult:
    """Measurements of a mixed overload."""

    small: KindResult
    photos: KindResult
    polls: Sequence[Poll]

    @property
    def small_share(self) -> float:
        """Small requests answered in time as a share of what they must keep: those sent, or half of their capacity."""
        kept = (1 - MIN_PHOTOS) * self.small.capacity / self.small.sent_per_second if self.small.offered.sent else 1.0
        return self.small.share_of_sent / min(1.0, kept)

    @property
    def checks(self) -> dict[str, bool]:
        """Each expected behaviour, and whether it was observed."""
        return {
            f"small requests keep {MIN_SMALL:.0%} goodput": self.small_share >= MIN_SMALL,
            f"photographs keep {MIN_PHOTOS:g} of their capacity": self.photos.share_of_capacity >= MIN_PHOTOS,
            "readiness stays true": bool(self.polls) and all(poll.ready for poll in self.polls),
        }


def run_mixed_overload(
    model: str | None = None,
    *,
    seconds: float = 60.0,
    photos: float = 0.1,
    deadline: float = 0.5,
    photo_deadline: float = 10.0,
    pictures: SmallPictures = "digits",
    idle_seconds: float = 2.0,
    capacity_photos: int = 32,
    console: Console | None = None,
) -> MixedResult:
    """Start the service, overload it for `seconds`, and print the result; `photos` is their share of all requests.

    The capacity for small requests is measured for `idle_seconds`, that for photographs by as many as `capacity_photos`:
    few of them are answered in a second, so that a fixed time would cut off too many.
    """
    if model is not None and "://" in model:
        raise BenchError(f"--overload starts its own service; it accepts a bundle or a model's name, not {model!r}.")
    console = console or Console()
    bundle = open_bundle(resolve_model(model))
    files, path = sample_files(pictures, bundle.manifest.input), str(bundle.path.resolve())
    photographs = draw_photographs("photo-12mp")
    server_cores, load_cores = choose_cores()
    serve = server(service_command(path), server_cores)
    with exit_on_sigterm(), serve as service, pinned(load_cores):
        url = f"{service.url}/predict"
        small_capacity = median(
            [run_closed_loop(url, files, idle_seconds, _SMALL_CONCURRENCY, deadline).summary() for _ in range(_ROUNDS)]
        ).requests_per_second
        start = time.perf_counter()
        answered = send_requests(url, photographs, capacity_photos, _PHOTO_CONCURRENCY)
        photo_capacity = answered / (time.perf_counter() - start)
        rate = _FACTOR * mix_capacity(small_capacity, photo_capacity, photos)
        small = _Load("small", small_capacity, files, (1 - photos) * rate, deadline)
        large = _Load("photographs", photo_capacity, photographs, photos * rate, photo_deadline)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            result = runner.run(_offer(service, small, large, seconds))
    print_mixed(result, photos, console)
    return result


def mix_capacity(small: float, photographs: float, share: float) -> float:
    """Requests/s of a mix with this share of photographs, from the requests/s of each kind alone."""
    return 1 / ((1 - share) / small + share / photographs)


@dataclass(frozen=True)
class _Load:
    name: str
    capacity: float
    files: list[bytes]
    rate: float
    deadline: float


async def _offer(service: ServerProcess, small: _Load, large: _Load, seconds: float) -> MixedResult:
    """Send both kinds at the same time, each at its own fixed rate."""
    url = f"{service.url}/predict"
    polls: list[Poll] = []
    polling = asyncio.create_task(poll_service(service.url, service.memory, min(_POLL_SECONDS, seconds / 4), polls))
    try:
        results = await asyncio.gather(
            run_open_loop(url, small.files, small.rate, seconds, small.deadline),
            run_open_loop(
                url, large.files, large.rate, seconds, large.deadline, max_connections=_MAX_PHOTO_CONNECTIONS
            ),
        )
    finally:
        polling.cancel()
    of_small, of_large = results
    return MixedResult(
        KindResult(small.name, small.capacity, of_small), KindResult(large.name, large.capacity, of_large), polls
    )


def print_mixed(result: MixedResult, photos: float, console: Console) -> None:
    """Print a row for each kind, and then the checks."""
    offered = result.small.offered
    console.print(
        f"{offered.rate + result.photos.offered.rate:,.0f} requests/s for {offered.seconds:g} s, {_FACTOR:g} times the "
        f"capacity of a mix with a share of {photos:g} of photographs of 12 MP. Deadlines: {offered.deadline:g} s, for "
        f"photographs {result.photos.offered.deadline:g} s."
    )
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    headers = ("alone/s", "sent/s", "in\ntime/s", "of\nsent", "of\nalone", "429", "other", "no\nreply", "p99\nms")
    for header in ("", *headers):
        table.add_column(header, justify="right" if header else "left", no_wrap=True)
    for kind in (result.small, result.photos):
        table.add_row(kind.name, *_figures(kind))
    console.print(table)
    memory = [poll.memory for poll in result.polls if poll.memory is not None]
    if memory:
        console.print(f"Memory of the service: at most {max(memory) / 1e6:.0f} MB when polled.")
    for kind in (result.small, result.photos):
        if not kind.generator_kept_up:
            skipped = kind.offered.skipped_late + kind.offered.skipped_no_connection
            console.print(f"The load generator did not send {skipped:,} requests ({kind.name}) that were due.")
    console.print(
        f"Goodput of small requests: {result.small_share:.1%} of those sent or of half their capacity, whichever is "
        f"less. Goodput of photographs: {result.photos.share_of_capacity:.2f} of their capacity alone."
    )
    failed = [name for name, passed in result.checks.items() if not passed]
    summary = f"{len(result.checks) - len(failed)} of {len(result.checks)} checks passed"
    console.print(f"{summary}. Failed: {', '.join(failed)}." if failed else f"{summary}.")


def _figures(kind: KindResult) -> list[str]:
    offered = kind.offered
    return [
        f"{kind.capacity:,.1f}",
        f"{kind.sent_per_second:,.1f}",
        f"{kind.goodput:,.1f}",
        f"{kind.share_of_sent:.3f}",
        f"{kind.share_of_capacity:.3f}",
        f"{offered.refused:,}",
        f"{offered.other_statuses.total():,}",
        f"{offered.unanswered:,}",
        f"{1e3 * np.percentile(offered.good, 99):,.0f}" if offered.good else "–",
    ]
