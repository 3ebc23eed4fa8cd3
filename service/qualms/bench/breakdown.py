"""Where the time goes: by the service's own Server-Timing, and by what the same work costs in process."""

import re
from collections.abc import Sequence

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from qualms.bench.closed_loop import Replies, drive
from qualms.bench.processes import get
from qualms.bench.report import Row

_STAGES = ("queue", "decode", "inference")
_BATCHES = re.compile(r"^qualms_batch_size_(sum|count)\{[^}]*\} (\S+)$", re.MULTILINE)


def break_down(url: str, pictures: list[bytes], seconds: float, rows: Sequence[Row], console: Console) -> None:
    """Drive the service once more at each concurrency, and print what replies waited for and what they cost."""
    latency = _table("What a reply waits for, medians in ms", "p50", *_STAGES, "the rest", "images a run")
    for row in rows:
        before = _batches(url)
        replies = drive(f"{url}/predict", pictures, seconds, row.concurrency)
        images, runs = _batches(url) - before
        latency.add_row(
            str(row.concurrency), *(f"{1e3 * part:.3f}" for part in _waits(replies)), f"{images / runs:.1f}"
        )
    console.print(latency)
    cost = _table("What a reply costs, µs", "1 ÷ requests/s", "decode", "inference", "encode", "the rest")
    for row in rows:
        if row.limit is not None:
            whole = 1 / row.ours.requests_per_second
            parts = (row.limit.decode, row.limit.inference, row.limit.encode)
            cost.add_row(str(row.concurrency), *(f"{1e6 * part:.0f}" for part in (whole, *parts, whole - sum(parts))))
    if cost.row_count:
        console.print(cost)
        console.print(
            "Decoding, inference and encoding as measured in process; the rest is HTTP, the event loop, handing over "
            "to the runner, metrics, smaller batches, and at low concurrency waiting for the client."
        )


def _waits(replies: Replies) -> list[float]:
    """Medians of the latency, of each stage the service tells of, and of what remains."""
    stages = np.array(
        [[replies.timing(index).get(stage, 0.0) for stage in _STAGES] for index in range(len(replies.timings))]
    )
    whole = np.array(replies.latencies)
    return [float(np.median(part)) for part in (whole, *stages.T, whole - stages.sum(axis=1))]


def _batches(url: str) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """How many images the service has run, and in how many runs."""
    found = dict(_BATCHES.findall(get(f"{url}/metrics").decode()))
    return np.array([float(found["sum"]), float(found["count"])])


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for column in ("concurrency", *columns):
        table.add_column(column, justify="right", no_wrap=True)
    return table
