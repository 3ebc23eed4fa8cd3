"""The printed tables of the comparison: throughput and latency, decoding and CPU time, and those of `--profile`."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from qualms.bench.load.closed_loop import LoadResult, Replies, run_closed_loop
from qualms.bench.machine_limit import Limit
from qualms.bench.servers.instructions import Instructions, InstructionsRow
from qualms.bench.servers.process_tree import RequestMemory
from qualms.bench.servers.processes import get

_MB = 1e6
_STAGES = ("queue", "decode", "inference")
_BATCH_SIZE = re.compile(r"^qualms_batch_size_(sum|count)\{[^}]*\} (\S+)$", re.MULTILINE)


@dataclass(frozen=True)
class ServerLoad:
    """What one server did under load at one concurrency."""

    load: LoadResult
    cpu: float | None
    """CPU seconds per successful reply, of the server's process and its descendants; None if unknown"""


@dataclass(frozen=True)
class ComparisonRow:
    """Measurements at one concurrency; `plain` and `limit` are None if no bundle was given."""

    concurrency: int
    ours: ServerLoad
    plain: ServerLoad | None
    limit: Limit | None

    @property
    def requests_per_second(self) -> float:
        """Of the service."""
        return self.ours.load.requests_per_second

    @property
    def share_of_limit(self) -> float | None:
        """Requests/s divided by the limit of one core that decodes with Pillow."""
        return None if self.limit is None else self.requests_per_second / self.limit.images_per_second

    @property
    def share_of_limit_with_our_decoder(self) -> float | None:
        """Requests/s divided by the limit of one core that decodes as the service does."""
        return None if self.limit is None else self.requests_per_second / self.limit.with_our_decoder

    @property
    def throughput_ratio(self) -> float | None:
        """Requests/s divided by those of the plain server."""
        return None if self.plain is None else self.requests_per_second / self.plain.load.requests_per_second

    @property
    def latency_ratio(self) -> float | None:
        """Median latency divided by that of the plain server."""
        return None if self.plain is None else self.ours.load.p50 / self.plain.load.p50

    @property
    def cpu_ratio(self) -> float | None:
        """CPU seconds per reply divided by those of the plain server."""
        if self.plain is None or self.ours.cpu is None or not self.plain.cpu:
            return None
        return self.ours.cpu / self.plain.cpu


def print_comparison(rows: Sequence[ComparisonRow], console: Console) -> None:
    """Print one table and a summary."""
    headers = ("concurrency", "", "requests/s", "p50 ms", "p99 ms", "errors", "of\nlimit", "of\nplain", "p50 of\nplain")
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for header in headers:
        table.add_column(header, justify="right" if header else "left", no_wrap=True)
    for index, row in enumerate(rows):
        if index:
            table.add_row()
        if row.limit is not None:
            table.add_row(str(row.concurrency), "limit", _rate(row.limit.images_per_second))
        ratios = [_ratio(value) for value in (row.share_of_limit, row.throughput_ratio, row.latency_ratio)]
        table.add_row("" if row.limit else str(row.concurrency), "[bold]qualms", *_figures(row.ours.load), *ratios)
        if row.plain is not None:
            share_of_limit = row.plain.load.requests_per_second / row.limit.images_per_second if row.limit else None
            table.add_row("", "plain", *_figures(row.plain.load), _ratio(share_of_limit))
    console.print(table)
    last = rows[-1]
    if last.share_of_limit is not None and last.throughput_ratio is not None:
        console.print(
            f"At concurrency {last.concurrency}: {last.share_of_limit:.2f} of the limit, "
            f"{last.throughput_ratio:.2f} times the plain server's requests/s."
        )
    if rows[0].concurrency == 1 and rows[0].latency_ratio is not None:
        console.print(f"At concurrency 1: p50 is {rows[0].latency_ratio:.2f} of the plain server's.")


def print_costs(rows: Sequence[ComparisonRow], console: Console) -> None:
    """Print decoding time, the limit with the service's decoders, and CPU time; cells are empty if unknown."""
    decoding = ("Pillow\nµs", "qualms\nµs", "of\nPillow", "limit", "of\nlimit")
    cpu = ("qualms\nCPU s", "plain\nCPU s", "of\nplain")
    title = "Decoding per image, the limit with qualms' decoding, CPU time per 1,000 requests"
    table = _breakdown_table(title, *decoding, *cpu)
    for row in rows:
        cells = [""] * 5
        if row.limit is not None:
            cells = [
                f"{1e6 * row.limit.decode:,.0f}",
                f"{1e6 * row.limit.our_decode:,.0f}",
                _ratio(row.limit.our_decode / row.limit.decode),
                _rate(row.limit.with_our_decoder),
                _ratio(row.share_of_limit_with_our_decoder),
            ]
        seconds = [_cpu(row.ours), "" if row.plain is None else _cpu(row.plain), _ratio(row.cpu_ratio)]
        table.add_row(str(row.concurrency), *cells, *seconds)
    console.print(table)


def print_memory(memory: Mapping[str, RequestMemory | None], console: Console) -> None:
    """Print how much memory one request takes, for each server by name."""
    parts = [
        f"{name} {server.rise / _MB:.1f} MB above the {server.idle / _MB:.1f} MB of the idle server"
        for name, server in memory.items()
        if server is not None
    ]
    console.print(f"Peak memory, one request at a time: {'; '.join(parts) or 'unknown'}.")


def print_breakdown(
    url: str, files: list[bytes], seconds: float, rows: Sequence[ComparisonRow], console: Console
) -> None:
    """Load the service once more at each concurrency; print latency by stage and time per reply."""
    latency = _breakdown_table("Latency by stage, medians in ms", "p50", *_STAGES, "other", "images/run")
    for row in rows:
        before = _batch_counts(url)
        replies = run_closed_loop(f"{url}/predict", files, seconds, row.concurrency)
        images, runs = _batch_counts(url) - before
        medians = (f"{1e3 * value:.3f}" for value in _stage_medians(replies))
        latency.add_row(str(row.concurrency), *medians, f"{images / runs:.1f}")
    console.print(latency)
    cost = _breakdown_table("Time per reply, µs", "1 ÷ requests/s", "decode", "inference", "encode", "other")
    for row in rows:
        if row.limit is not None:
            whole = 1 / row.requests_per_second
            parts = (row.limit.our_decode, row.limit.inference, row.limit.encode)
            cost.add_row(str(row.concurrency), *(f"{1e6 * part:.0f}" for part in (whole, *parts, whole - sum(parts))))
    if cost.row_count:
        console.print(cost)
        console.print(
            "Decoding, inference and encoding are measured in process. Other: HTTP, the event loop, the hand-over to "
            "the runner, metrics, smaller batches, and at low concurrency the time in which the service waits for the "
            "client."
        )


def print_instructions(rows: Sequence[InstructionsRow], tool: str, console: Console) -> None:
    """Print instructions per request by library, as far as the tool attributes them."""
    parts = ("ONNX Runtime", "decoders", "rest", "rest of\nplain") if rows[0].ours.rest is not None else ()
    title = f"Instructions per request in user space, thousands, counted by {tool}"
    table = _breakdown_table(title, "", "total", "of\nplain", *parts)
    for row in rows:
        ours, plain = row.ours, row.plain
        rest = _ratio(ours.rest / plain.rest) if ours.rest is not None and plain.rest is not None else ""
        total, *shares = _thousands(ours)
        cells = (total, _ratio(ours.total / plain.total), *shares, rest)
        table.add_row(str(row.concurrency), "[bold]qualms", *cells[: len(parts) + 2])
        total, *shares = _thousands(plain)
        table.add_row("", "plain", total, "", *shares)
    console.print(table)


def _thousands(count: Instructions) -> list[str]:
    parts = (count.total, count.inference, count.decode, count.rest)
    return [f"{part / 1e3:,.1f}" for part in parts if part is not None]


def _figures(load: LoadResult) -> tuple[str, str, str, str]:
    return _rate(load.requests_per_second), f"{1e3 * load.p50:.2f}", f"{1e3 * load.p99:.2f}", str(load.errors)


def _rate(value: float) -> str:
    """A rate with at least three digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _cpu(server: ServerLoad) -> str:
    return "" if server.cpu is None else f"{1e3 * server.cpu:.4g}"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _stage_medians(replies: Replies) -> list[float]:
    """Medians in seconds: total latency, each stage of Server-Timing, and the remainder."""
    stages = np.array(
        [[replies.timing(index).get(stage, 0.0) for stage in _STAGES] for index in range(len(replies.timings))]
    )
    whole = np.array(replies.latencies)
    return [float(np.median(part)) for part in (whole, *stages.T, whole - stages.sum(axis=1))]


def _batch_counts(url: str) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Number of images and number of runs so far, from the service's metrics (2,)."""
    values = dict(_BATCH_SIZE.findall(get(f"{url}/metrics").decode()))
    return np.array([float(values["sum"]), float(values["count"])])


def _breakdown_table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for column in ("concurrency", *columns):
        table.add_column(column, justify="right", no_wrap=True)
    return table
