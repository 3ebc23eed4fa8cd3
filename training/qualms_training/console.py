"""Progress of a run on the console: lines of text, and during long steps a progress bar or, in a file, lines of progress."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from qualms.terminal import default_console

FIRST_WAIT, LONGEST_WAIT = 10.0, 60.0
"""seconds between two lines of progress: a tenth of the time elapsed, within these limits"""

Clock = Callable[[], float]


class Display:
    """Text and progress on a console: a bar on a terminal or in a notebook, else a line of progress now and then."""

    def __init__(self, console: Console | None = None, clock: Clock = time.monotonic) -> None:
        self.console = console or default_console()
        self._clock = clock

    def note(self, text: str) -> None:
        """Print one line, with rich's markup."""
        self.console.print(text, highlight=False, soft_wrap=True, emoji=False)  # `module:function:` is not an emoji

    @contextmanager
    def status(self, text: str) -> Iterator[None]:
        """Show a step of unknown length: a spinner while it runs, or one line in a file."""
        if not self.console.is_terminal:
            self.note(f"  {text}")
            yield
            return
        with self.console.status(f"  {text}"):
            yield

    @contextmanager
    def bar(self, title: str, total: int) -> Iterator[Callable[[int], None]]:
        """Progress over `total` units; yields a function to call with the number of units just finished, from any thread."""
        if not self.console.is_terminal:
            yield self._lines(title, total).advance
            return
        with self._progress() as progress:
            task = progress.add_task(title, total=total, detail="")
            yield lambda units: progress.advance(task, units)

    @contextmanager
    def training_bar(self, title: str, steps: int) -> Iterator[Callable[[int, float], None]]:
        """Progress over training steps with the loss; yields a function to call with step and loss."""
        if not self.console.is_terminal:
            lines = self._lines(title, steps)
            yield lambda step, loss: lines.update(step, f"loss {loss:.4f}")
            return
        with self._progress() as progress:
            task = progress.add_task(title, total=steps, detail="")
            yield lambda step, loss: progress.update(task, completed=step, detail=f"loss {loss:.4f}")

    def _lines(self, title: str, total: int) -> "ProgressLines":
        def write(line: str) -> None:
            self.console.print(line, markup=False, highlight=False, soft_wrap=True, emoji=False)

        return ProgressLines(title, total, write, self._clock)

    def _progress(self) -> Progress:
        return Progress(
            TextColumn("  {task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[detail]}"),
            console=self.console,
            transient=True,
        )


class ProgressLines:
    """Progress as lines of text: none in the first ten seconds, then at most one every ten."""

    def __init__(self, title: str, total: int, write: Callable[[str], None], clock: Clock) -> None:
        self._title, self._total, self._write, self._clock = title, total, write, clock
        self._done, self._lock = 0, threading.Lock()
        self._start = self._last = clock()

    def advance(self, units: int) -> None:
        """`units` more are done."""
        with self._lock:
            self._done += units
            self._show("")

    def update(self, done: int, detail: str) -> None:
        """`done` units are done in all."""
        with self._lock:
            self._done = done
            self._show(detail)

    def _show(self, detail: str) -> None:
        now = self._clock()
        elapsed = now - self._start
        if not self._done or now - self._last < min(LONGEST_WAIT, max(FIRST_WAIT, elapsed / 10)):
            return
        self._last = now
        left = elapsed * max(0, self._total - self._done) / self._done
        parts = [f"{self._done:,} of {self._total:,}", duration(elapsed), f"{duration(left)} left", detail]
        self._write(f"  {self._title}: {', '.join(part for part in parts if part)}")


def duration(seconds: float) -> str:
    """Seconds in words: 35 s, 12 min or 3 h 05 min."""
    whole = round(seconds)
    if whole < 120:
        return f"{whole} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02} min"
