"""Stop the service with SIGTERM under load, many times, and count the requests that are lost.

    python -m tests.qualms.http1.drain_campaign --runs 200 --report drain.md
    python -m tests.qualms.http1.drain_campaign --runs 50 --narrow [--loss 2]

Clients connect over loopback or, with `--narrow` (as root), over a slow link between two network namespaces, on which handshakes
are under way when the signal arrives. The exit code is 1 if a request was lost, or a service did not stop as it should.
"""

import argparse
import asyncio
import io
import multiprocessing
import random
import shlex
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from PIL import Image
from tests.qualms.fuzz.service import HOST, Service, running_service
from tests.qualms.http1.drain_clients import (
    Load,
    Lost,
    Record,
    Signal,
    connection_per_request,
    idle_then_request,
    keep_alive,
    late_request,
    pipelined_pairs,
    slow_upload,
)
from tests.qualms.http1.narrow_link import SERVER, LinkSettings, NarrowLink, narrow_link, unavailable

DRAIN_SECONDS, GRACE_SECONDS = 0.3, 15.0
LOAD_SECONDS = 4.0
"""time after the signal in which clients start requests, longer than the service accepts connections"""
CLOSES_AT = DRAIN_SECONDS + 2.0
"""about when the service closes idle connections: `ACCEPT_SECONDS` and `LAST_REQUEST_SECONDS` after draining"""
EXPECTED = {200: "", 408: ", closed while the request was on its way"}
"""statuses of replies"""
PARALLEL = 2
CLIENTS = [
    *[keep_alive] * 4,
    *[connection_per_request] * 6,
    *[slow_upload] * 4,
    *[pipelined_pairs] * 2,
    *[idle_then_request(-0.3, CLOSES_AT - 0.2)] * 4,
    *[idle_then_request(CLOSES_AT - 0.2, CLOSES_AT + 0.4)] * 4,
    *[late_request(-0.2, 0.0, 0.5)] * 4,
    *[late_request(DRAIN_SECONDS - 0.15, DRAIN_SECONDS + 0.15, 0.5)] * 12,
]


@dataclass
class Run:
    """The outcome of one run."""

    seed: int
    record: Record
    exit_code: int | None
    """None if the process did not stop in time"""
    seconds: float
    """from the signal to the exit"""
    log_errors: list[str] = field(default_factory=list)
    dropped: int = 0
    """packets that the narrow link dropped"""

    @property
    def problems(self) -> list[str]:
        """Why the run failed; empty if it did not."""
        other = {key: count for key, count in self.record.replies.items() if key[1] not in EXPECTED}
        return [
            *(f"lost: {lost}" for lost in self.record.lost),
            *(f"{client}: {count} replies with status {status}" for (client, status), count in other.items()),
            *([] if self.exit_code == 0 else [f"exit code {self.exit_code}"]),
            *([] if self.seconds <= GRACE_SECONDS else [f"exit after {self.seconds:.1f} s"]),
            *(f"log: {line}" for line in self.log_errors),
        ]


def run(seed: int, *, narrow: bool = False, loss: float = 0.0, model: Path | str = "demo") -> Run:
    """Start a service, stop it under load, and record what became of the requests."""
    rng = random.Random(seed)
    if not narrow:
        return _run(rng, seed, None, model)
    with narrow_link(LinkSettings.draw(rng, loss), rng) as link:
        return _run(rng, seed, link, model)


def runs(seeds: Iterable[int], *, narrow: bool = False, loss: float = 0.0, model: Path | str = "demo") -> Iterator[Run]:
    """Runs in processes of their own, two at a time: one service drains while the next one starts."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(PARALLEL, mp_context=context, max_tasks_per_child=1) as pool:
        futures = [pool.submit(run, seed, narrow=narrow, loss=loss, model=model) for seed in seeds]
        try:
            for future in as_completed(futures):
                yield future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _run(rng: random.Random, seed: int, link: NarrowLink | None, model: Path | str) -> Run:
    host, port = (HOST if link is None else SERVER), _free_port(rng)
    settings = {"host": "0.0.0.0" if link else HOST, "port": port, "allow_anonymous": bool(link)}
    with ExitStack() as stack:
        with link.server_side() if link else nullcontext():
            service = stack.enter_context(
                running_service(model, drain_seconds=DRAIN_SECONDS, grace_seconds=GRACE_SECONDS, **settings)
            )
        return asyncio.run(_stop_under_load(rng, seed, service, (host, port), link))


async def _stop_under_load(
    rng: random.Random, seed: int, service: Service, address: tuple[str, int], link: NarrowLink | None
) -> Run:
    if link is not None:
        link.start()
    when = Signal(asyncio.get_running_loop().time() + rng.uniform(0.6, 1.2))
    load = Load(address, _images(seed), rng, when, LOAD_SECONDS)
    clients = [asyncio.ensure_future(client(load)) for client in CLIENTS]
    await when.wait(0.0)
    when.at = asyncio.get_running_loop().time()
    service.process.send_signal(signal.SIGTERM)
    while service.process.poll() is None and when.since < GRACE_SECONDS + 5:
        await asyncio.sleep(0.005)
    seconds = when.since
    await asyncio.gather(*clients)
    dropped = 0 if link is None else link.dropped
    return Run(seed, load.record, service.process.poll(), seconds, service.log_errors(), dropped)


def _images(seed: int) -> list[bytes]:
    """PNG files of a few hundred bytes up to 15 kB."""
    rng = np.random.default_rng(seed)
    files = []
    for side in (16, 28, 70):
        stream = io.BytesIO()
        Image.fromarray(rng.integers(0, 256, (side, side, 3), np.uint8)).save(stream, "PNG")
        files.append(stream.getvalue())
    return files


def _free_port(rng: random.Random) -> int:
    """A port that no other process gets by chance after the service has closed it: below those the kernel chooses."""
    while True:
        port = rng.randint(15000, 32000)
        with socket.socket() as probe:
            if probe.connect_ex((HOST, port)) != 0:
                return port


def table(finished: list[Run]) -> str:
    """The outcome of all runs as Markdown."""
    replies = sum((one.record.replies for one in finished), Counter[tuple[str, int]]())
    lost = [(one.seed, lost) for one in finished for lost in one.record.lost]
    codes = Counter(one.exit_code for one in finished)
    slowest = max((one.seconds for one in finished), default=0.0)
    rows = [
        ("runs", f"{len(finished)}"),
        ("replies", f"{replies.total():,}"),
        *(
            (f"{client}: {status}{EXPECTED.get(status, '')}", f"{count:,}")
            for (client, status), count in sorted(replies.items())
        ),
        ("connections refused", f"{sum(one.record.refused for one in finished):,}"),
        ("idle connections closed before a request", f"{sum(one.record.closed_idle for one in finished):,}"),
        ("**lost requests**", f"**{len(lost)}** in {len({seed for seed, _ in lost})} runs"),
        *_lost_rows(lost),
        ("exit codes", ", ".join(f"{count} × {code}" for code, count in codes.items())),
        ("slowest exit after SIGTERM", f"{slowest:.2f} s"),
        ("runs with errors in the log", f"{sum(bool(one.log_errors) for one in finished)}"),
    ]
    if any(one.dropped for one in finished):
        rows.append(("packets dropped by the link", f"{sum(one.dropped for one in finished):,}"))
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)])


def _lost_rows(lost: list[tuple[int, Lost]]) -> Iterator[tuple[str, str]]:
    kinds = Counter((one.client, one.cause) for _, one in lost)
    for kind, count in kinds.most_common():
        seed, example = next((seed, one) for seed, one in lost if (one.client, one.cause) == kind)
        yield f"lost, {kind[0]}: {kind[1]}", f"{count}, e.g. seed {seed}: {example}"


def main() -> int:
    """Run the campaign from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200, help="number of services to stop")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first run; each run has the next one")
    parser.add_argument("--narrow", action="store_true", help="a slow link between network namespaces; needs root")
    parser.add_argument("--loss", type=float, default=0.0, help="percent of packets that the slow link drops at random")
    parser.add_argument("--model", default="demo", help="path of a bundle or name of an embedded model")
    parser.add_argument("--report", type=Path, help="Markdown file for the table")
    options = parser.parse_args()
    if options.narrow and (reason := unavailable()):
        parser.error(f"--narrow is not available: {reason}")
    start, finished = time.monotonic(), list[Run]()
    seeds = range(options.seed, options.seed + options.runs)
    with suppress(KeyboardInterrupt):  # the table then shows the runs that are finished
        for one in runs(seeds, narrow=options.narrow, loss=options.loss / 100, model=options.model):
            finished.append(one)
            for problem in one.problems:
                print(f"seed {one.seed}: {problem}", flush=True)
            if len(finished) % 10 == 0:
                lost = sum(len(one.record.lost) for one in finished)
                print(f"{len(finished)} runs, {lost} lost, {time.monotonic() - start:.0f} s", flush=True)
    text = table(finished)
    print(text)
    if options.report is not None:
        command = shlex.join(["python", "-m", "tests.qualms.http1.drain_campaign", *sys.argv[1:]])
        options.report.write_text(f"`{command}`\n\n{text}\n")
    return int(len(finished) < options.runs or any(one.problems for one in finished))


if __name__ == "__main__":
    sys.exit(main())
