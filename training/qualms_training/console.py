"""Progress of a run on the console: lines of text, and a progress bar during long steps."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class Display:
    """Text and progress bars on a console; without a terminal, text only."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console()

    def note(self, text: str) -> None:
        """Print one line, with rich's markup."""
        self.console.print(text, highlight=False, soft_wrap=True, emoji=False)  # `module:function:` is not an emoji

    @contextmanager
    def bar(self, title: str, total: int) -> Iterator[Callable[[int], None]]:
        """A bar over `total` units; yields a function to call with the number of units just finished."""
        with self._progress() as progress:
            task = progress.add_task(title, total=total, detail="")
            yield lambda units: progress.advance(task, units)

    @contextmanager
    def training_bar(self, title: str, steps: int) -> Iterator[Callable[[int, float], None]]:
        """A bar over training steps that displays the loss; yields a function to call with step and loss."""
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
