"""The console for results of commands."""

from rich.console import Console

UNLIMITED = 10_000
"""columns of output that is not a terminal's: nothing in it is wrapped"""


def default_console() -> Console:
    """The standard output: as wide as the terminal, and of unlimited width if it is redirected."""
    console = Console()
    return console if console.is_terminal else Console(width=UNLIMITED)
