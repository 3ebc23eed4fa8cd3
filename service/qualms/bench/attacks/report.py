"""The result of an attack, its checks, and the printed table."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table

from qualms.bench.attacks.attacker import AttackCounts
from qualms.bench.attacks.definition import Attack
from qualms.bench.attacks.registry import find_attacks
from qualms.bench.attacks.well_behaved import ClientResult

_MAX_SLOWDOWN = 5.0
"""p99 beside an attack divided by p99 alone"""
_MIN_ALLOWED_P99 = 0.025
"""seconds that are always allowed, because a multiple of a very short time says little"""
_MAX_PEAK = 600_000_000
"""bytes"""
GRACE_SECONDS = 30.0
"""the default of QUALMS_GRACE_SECONDS"""
_EXIT_SECONDS = 1.0
"""time that the process may take beyond that to exit"""
_MB = 1e6


@dataclass(frozen=True)
class Stop:
    """How the service ended after SIGTERM."""

    seconds: float
    code: int
    """exit code, or the negative number of the signal that killed it"""


@dataclass(frozen=True)
class AttackResult:
    """What the client, the service's memory and the attacker showed during one attack."""

    attack: Attack
    client: ClientResult
    alone: ClientResult
    peak: int | None
    """maximum memory of the service with all its processes in bytes; None if the service ended"""
    after: int | None
    """memory a second after the attack, likewise"""
    recovered: bool
    """whether the service was ready a second after the attack"""
    stop: Stop | None
    """how SIGTERM ended the service while the attack was repeated; None if it did not"""
    counts: AttackCounts

    @property
    def faults(self) -> list[str]:
        """What the attack achieved; empty if the service withstood it."""
        allowed = max(_MAX_SLOWDOWN * self.alone.p99, _MIN_ALLOWED_P99)
        checks = {
            "failures": self.client.failures > 0,
            "p99": self.client.p99 > allowed,
            "memory": self.peak is None or self.peak >= _MAX_PEAK,
            "not ready": not self.recovered,
            "does not stop": self.stop is None or self.stop.seconds > GRACE_SECONDS + _EXIT_SECONDS,
            "exit code": self.stop is not None and self.stop.code != 0,
        }
        return [name for name, failed in checks.items() if failed]


def print_attacks(alone: ClientResult, results: Sequence[AttackResult], console: Console) -> None:
    """Print one row per attack and a summary."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, expand=True)
    table.add_column("attack", no_wrap=True)
    for header in ("sent", "failed", "p50\nms", "p99\nms", "peak\nMB", "after\nMB", "stops\ns"):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("result", no_wrap=True)
    table.add_column("the attacker got", no_wrap=True, overflow="ellipsis", ratio=1)
    table.add_row("none", *_client(alone))
    for result in results:
        faults = f"FAIL: {', '.join(result.faults)}" if result.faults else "pass"
        memory = (_megabytes(result.peak), _megabytes(result.after))
        stop = "–" if result.stop is None else f"{result.stop.seconds:.1f}"
        table.add_row(result.attack.name, *_client(result.client), *memory, stop, faults, describe(result.counts))
    console.print(table)
    passed = sum(not result.faults for result in results)
    console.print(
        f"{passed} of {len(results)} attacks passed: no failure, p99 at most {_MAX_SLOWDOWN:g} times that without an "
        f"attack or {1e3 * _MIN_ALLOWED_P99:g} ms, peak memory below {_MAX_PEAK / _MB:g} MB, ready after the attack, "
        f"ended by SIGTERM within {GRACE_SECONDS:g} s while the attack goes on. Memory is the sum over all processes of the "
        "service; pages that they share count for each, those of files once."
    )


def print_list(console: Console) -> None:
    """Print the names and descriptions of all attacks."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    for attack in find_attacks(["all"]):
        table.add_row(f"[bold]{attack.name}", attack.description)
    console.print(table)


def describe(counts: AttackCounts) -> str:
    """What the attacker got, for example "200 × 12, 3 of 8 connections closed"."""
    parts = [f"{status} × {number:,}" for status, number in sorted(counts.statuses.items())]
    if counts.invalid:
        parts.append(f"invalid HTTP × {counts.invalid:,}")
    if counts.not_opened:
        parts.append(f"not connected × {counts.not_opened:,}")
    parts.append(f"{counts.closed:,} of {counts.opened:,} connections closed")
    if counts.bytes_sent >= _MB:
        parts.append(f"{counts.bytes_sent / _MB:,.0f} MB sent")
    return ", ".join(parts)


def _client(result: ClientResult) -> tuple[str, str, str, str]:
    return str(result.sent), str(result.failures), f"{1e3 * result.p50:.1f}", f"{1e3 * result.p99:.1f}"


def _megabytes(size: int | None) -> str:
    return "–" if size is None else f"{size / _MB:.0f}"
