"""Replace replicas behind haproxy under load as Kubernetes does, kill some, and count the requests that are lost.

    python -m tests.docker.kubernetes.rolling_update_campaign --requests 100000 --rate 300 --kills 5
    python -m tests.docker.kubernetes.rolling_update_campaign --throughput model.onnx

A replacement is that of a rolling update with maxSurge 1 and maxUnavailable 0: a new replica is started, and added when it is
ready; then an old one is removed and stopped. Two ways alternate. `endpoint`: it is removed from haproxy at a random time of the
preStop delay, and gets SIGTERM after that delay. `checks`: it gets SIGTERM at once, and haproxy learns of it from /readyz alone. No
request is sent twice. Killed replicas get SIGKILL, with haproxy sending requests again only if the connection failed.
The exit code is 1 if a replacement lost a request or a kill lost more than the requests in flight.
"""

import argparse
import asyncio
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from urllib.parse import urlsplit

from tests.docker.kubernetes.replicas import Cluster, Replica, cluster

from qualms.bench.load.open_loop import OpenLoopResult, run_open_loop
from qualms.bench.load.photographs import draw_photographs
from qualms.bench.load.sample_images import draw_colour_pngs
from qualms.bench.servers.process_tree import cpu_seconds

REPLICAS = 4
PRE_STOP_SECONDS = 5.0
"""as in docker/kubernetes/base/deployment.yaml"""
DEADLINE_SECONDS = 20.0
CONNECTIONS_PER_REPLICA = 4


@dataclass
class Rollout:
    """The events of replicas and requests."""

    load: OpenLoopResult
    replaced: Counter[str] = field(default_factory=Counter)
    """number of replacements by the way in which haproxy learnt of them"""
    bad_exits: list[str] = field(default_factory=list)
    slowest_exit: float = 0.0
    killed: list[int] = field(default_factory=list)
    """by killed replica: requests that it had received and not answered"""
    other_response_errors: int = 0
    """requests that other replicas than the killed ones did not answer"""

    @property
    def failed(self) -> int:
        """Number of requests without a reply of status 200."""
        return self.load.sent - len(self.load.good)

    def rows(self) -> Iterator[tuple[str, str]]:
        """The rows of the report."""
        latencies = sorted(self.load.good)
        yield "requests", f"{self.load.sent:,}"
        yield "answered with 200", f"{len(self.load.good):,}"
        yield "**failed**", f"**{self.failed}** {dict(self.load.other_statuses) or ''}".rstrip()
        yield "refused (429), unanswered", f"{self.load.refused}, {self.load.unanswered}"
        yield "skipped by the generator", f"{self.load.skipped_late + self.load.skipped_no_connection}"
        if self.replaced:
            yield "replacements", ", ".join(f"{count} × {way}" for way, count in sorted(self.replaced.items()))
            yield "exits other than 0", f"{len(self.bad_exits)}"
            yield "slowest exit after SIGTERM", f"{self.slowest_exit:.1f} s"
        if self.killed:
            yield "requests in flight at each kill", ", ".join(map(str, self.killed))
            yield "lost by other replicas", f"{self.other_response_errors}"
        if latencies:
            p50, p99 = (latencies[int(q * (len(latencies) - 1))] for q in (0.5, 0.99))
            yield "latency p50, p99, maximum", f"{1000 * p50:.0f}, {1000 * p99:.0f}, {1000 * latencies[-1]:.0f} ms"


def roll(folder: Path, requests: int, rate: float, pre_stop: float, seed: int = 0, **settings: object) -> Rollout:
    """Replace one replica after the other, alternating both ways, until all requests are sent."""
    rng = random.Random(seed)
    with (
        cluster(folder, REPLICAS + 1, "mnist", **settings) as replicas,
        _load(replicas.strict, requests, rate) as (rollout, ended),
    ):
        running = _start_all(replicas)
        rollout.start()
        free = REPLICAS
        while not ended.is_set():
            fresh = replicas.start(free)
            fresh.wait_until_ready()
            replicas.add(fresh)
            old = running.pop(0)
            way = ("endpoint", "checks")[rollout.result.replaced.total() % 2]
            if way == "endpoint":
                removed_after = rng.uniform(0, pre_stop)
                time.sleep(removed_after)
                replicas.remove(old)
                time.sleep(pre_stop - removed_after)
            code, seconds = old.stop()
            replicas.disable(old.slot)
            rollout.result.slowest_exit = max(rollout.result.slowest_exit, seconds)
            if code != 0:
                rollout.result.bad_exits.append(f"{way}: exit code {code}")
            rollout.result.replaced[way] += 1
            running.append(fresh)
            free = old.slot
    return rollout.result


def kill(folder: Path, kills: int, rate: float, **settings: object) -> Rollout:
    """Kill replicas one after the other, replacing each, and count what each of them lost."""
    seconds = 12.0 * kills
    with (
        cluster(folder, REPLICAS, "mnist", **settings) as replicas,
        _load(replicas.retrying, round(rate * seconds), rate) as (rollout, ended),
    ):
        running = _start_all(replicas)
        rollout.start()
        for _ in range(kills):
            ended.wait(2.0)
            victim = running.pop(0)
            before = replicas.response_errors("retrying")
            victim.process.kill()
            victim.process.wait()
            ended.wait(3.0)  # haproxy's checks notice it within a second
            after = replicas.response_errors("retrying")
            rollout.result.killed.append(after[victim.slot] - before[victim.slot])
            rollout.result.other_response_errors += (
                sum(after.values()) - sum(before.values()) - rollout.result.killed[-1]
            )
            replicas.disable(victim.slot)
            fresh = replicas.start(victim.slot)
            fresh.wait_until_ready()
            replicas.add(fresh)
            running.append(fresh)
        ended.wait()
    return rollout.result


def _start_all(replicas: Cluster) -> list[Replica]:
    running = [replicas.start(slot) for slot in range(REPLICAS)]
    for replica in running:
        replica.wait_until_ready()
        replicas.add(replica)
    return running


class _Load:
    """Open-loop load in a thread."""

    def __init__(self, url: str, requests: int, rate: float, ended: threading.Event) -> None:
        self._url, self._seconds, self._rate, self._ended = url, requests / rate, rate, ended
        self._thread = threading.Thread(target=self._run)
        self.result = Rollout(OpenLoopResult(rate, self._seconds, DEADLINE_SECONDS))

    def start(self) -> None:
        """Send the first request."""
        self._thread.start()

    def join(self) -> None:
        """Wait for the last reply."""
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            bodies = draw_colour_pngs()
            load = run_open_loop(
                self._url,
                bodies,
                self._rate,
                self._seconds,
                DEADLINE_SECONDS,
                max_lag=DEADLINE_SECONDS,
                single_use_every=10,
            )
            self.result.load = asyncio.run(load)
        finally:
            self._ended.set()


@contextmanager
def _load(url: str, requests: int, rate: float) -> Iterator[tuple[_Load, threading.Event]]:
    ended = threading.Event()
    load = _Load(url, requests, rate, ended)
    try:
        yield load, ended
    finally:
        load.join()


@dataclass(frozen=True)
class Throughput:
    """One measurement in a closed loop."""

    replicas: int
    requests: int
    seconds: float
    cpu_seconds: float
    """of all replicas"""

    @property
    def rate(self) -> float:
        """Requests per second."""
        return self.requests / self.seconds

    @property
    def normalised_rate(self) -> float:
        """Requests per second if each replica had its core for itself: replicas per CPU second of a request."""
        return self.replicas * self.requests / self.cpu_seconds


def measure_throughput(folder: Path, model: str, rounds: int, seconds: float) -> list[Throughput]:
    """Alternate between one and two replicas, each on its own core, behind haproxy."""
    body = draw_photographs("photo-640")[0]
    results = []
    with cluster(folder, 2, model=model) as replicas:
        running = [replicas.start(slot, slot) for slot in range(2)]
        for replica in running:
            replica.wait_until_ready()
        for _ in range(rounds):
            for count in (1, 2):
                for replica in running[:count]:
                    replicas.add(replica)
                for replica in running[count:]:
                    replicas.remove(replica)
                results.append(_closed_loop(replicas.strict, body, running[:count], seconds))
    return results


def _closed_loop(url: str, body: bytes, running: list[Replica], seconds: float) -> Throughput:
    parts = urlsplit(url)
    stop = time.monotonic() + seconds

    def client(_: int) -> int:
        connection, count = HTTPConnection(parts.hostname or "", parts.port, timeout=120), 0
        while time.monotonic() < stop:
            headers = {"Content-Type": "image/jpeg", "X-Request-Timeout": "60"}
            connection.request("POST", parts.path, body, headers)
            reply = connection.getresponse()
            reply.read()
            if reply.status != 200:
                raise HTTPException(f"a request got {reply.status}")
            count += 1
        connection.close()
        return count

    connections = CONNECTIONS_PER_REPLICA * len(running)
    before = [cpu_seconds(replica.process.pid) or 0.0 for replica in running]
    start = time.monotonic()
    with ThreadPoolExecutor(connections) as pool:
        requests = sum(pool.map(client, range(connections)))
    elapsed = time.monotonic() - start
    used = sum(cpu_seconds(replica.process.pid) or 0.0 for replica in running) - sum(before)
    return Throughput(len(running), requests, elapsed, used)


def throughput_rows(results: list[Throughput]) -> Iterator[tuple[str, str]]:
    """The rows of the report: totals over all rounds."""
    totals = {}
    for count in (1, 2):
        chosen = [one for one in results if one.replicas == count]
        totals[count] = Throughput(
            count,
            sum(one.requests for one in chosen),
            sum(one.seconds for one in chosen),
            sum(one.cpu_seconds for one in chosen),
        )
    for count, total in totals.items():
        share = total.cpu_seconds / total.seconds / count
        yield (
            f"{count} replica{'s' * (count > 1)}",
            f"{total.rate:.2f} requests/s, {1000 * total.cpu_seconds / total.requests:.0f} ms of CPU a request, "
            f"{share:.0%} of a core each, normalised {total.normalised_rate:.2f} requests/s",
        )
    yield "speed-up as measured", f"{totals[2].rate / totals[1].rate:.2f}"
    yield "speed-up by CPU time", f"{totals[2].normalised_rate / totals[1].normalised_rate:.2f}"


def table(rows: Iterator[tuple[str, str]]) -> str:
    """The rows as Markdown."""
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)])


def main() -> int:
    """Run the campaign from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100_000, help="requests during replacements; 0: none")
    parser.add_argument("--rate", type=float, default=300.0, help="requests per second")
    parser.add_argument("--kills", type=int, default=5, help="replicas to kill; 0: none")
    parser.add_argument("--throughput", metavar="MODEL", help="measure one and two replicas of this bundle instead")
    parser.add_argument("--rounds", type=int, default=3, help="with --throughput")
    parser.add_argument("--seconds", type=float, default=20.0, help="with --throughput: seconds of each measurement")
    options = parser.parse_args()
    problems = False
    with tempfile.TemporaryDirectory() as folder:
        if options.throughput:
            print(
                table(
                    throughput_rows(
                        measure_throughput(Path(folder), options.throughput, options.rounds, options.seconds)
                    )
                )
            )
            return 0
        if options.requests:
            rolled = roll(Path(folder), options.requests, options.rate, PRE_STOP_SECONDS)
            print(table(rolled.rows()), *rolled.bad_exits, sep="\n", flush=True)
            problems |= bool(rolled.failed or rolled.bad_exits)
        if options.kills:
            killed = kill(Path(folder), options.kills, options.rate)
            print(table(killed.rows()))
            problems |= killed.failed > sum(killed.killed) or bool(killed.other_response_errors)
    return int(problems)


if __name__ == "__main__":
    sys.exit(main())
