"""What a person sees while a run goes on: one line a stage, a bar while it lasts."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class Display:
    """Progress on a console; on one that is not a terminal, finished lines only."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console()

    def note(self, text: str) -> None:
        """One line that stays."""
        self.console.print(text, highlight=False, soft_wrap=True, emoji=False)  # `module:function:` is none

    @contextmanager
    def bar(self, title: str, total: int) -> Iterator[Callable[[int], None]]:
        """A bar over `total` units; call what it yields with the units just done."""
        with self._progress() as progress:
            task = progress.add_task(title, total=total, detail="")
            yield lambda units: progress.advance(task, units)

    @contextmanager
    def training_bar(self, title: str, steps: int) -> Iterator[Callable[[int, float], None]]:
        """A bar over training steps that shows the loss; call what it yields with step and loss."""
        with self._progress() as progress:
            task = progress.add_task(title, total=steps, detail="")
            yield lambda step, loss: progress.update(task, completed=step, detail=f"loss {loss:.4f}")

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
            disable=not self.console.is_terminal,
        )
