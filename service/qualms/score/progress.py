"""Progress of a run: a bar with rate and time left on a terminal, otherwise a line every ten seconds."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

_LINE_SECONDS = 10.0

Report = Callable[[int], None]
"""called with the number of files that are scored"""


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text("" if task.speed is None else f"{task.speed:,.0f} files/s")


@contextmanager
def progress(total: int, done: int, console: Console, clock: Callable[[], float] = time.monotonic) -> Iterator[Report]:
    """Report progress while the block runs; `done` files were scored by an earlier run."""
    if not console.is_terminal:
        yield _lines(total, done, console, clock)
        return
    columns = (TextColumn("scoring"), BarColumn(), MofNCompleteColumn(), _Rate(), TimeRemainingColumn())
    with Progress(*columns, console=console, speed_estimate_period=60) as bar:
        task = bar.add_task("", total=total, completed=done)
        yield lambda count: bar.update(task, completed=count)


def _lines(total: int, done: int, console: Console, clock: Callable[[], float]) -> Report:
    started = last = clock()

    def report(count: int) -> None:
        nonlocal last
        now = clock()
        if now - last < _LINE_SECONDS and count < total:
            return
        last = now
        rate = (count - done) / max(now - started, 1e-9)
        left = f", {(total - count) / rate:,.0f} s left" if rate > 0 and count < total else ""
        console.print(
            f"scored {count:,} of {total:,} files, {rate:,.0f} files/s{left}", highlight=False, soft_wrap=True
        )

    return report
