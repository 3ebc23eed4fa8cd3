"""The entry point of the `qualms` command.

It handles signals before the slow imports: the kernel discards SIGTERM to the first process of a container, PID 1, until the
process has a handler, so a container that is stopped while it starts would run until it is killed.
"""

import os
import signal
import sys


def main() -> None:
    """Run the command line. `qualms serve` exits with code 0 on SIGTERM and SIGINT until the server handles them."""
    if sys.argv[1:2] == ["serve"]:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, _exit)
    from qualms.cli import main as run  # noqa: PLC0415  # takes tenths of a second

    run()


def _exit(number: int, frame: object) -> None:
    """Exit at once: an exception could be caught by a module that is being imported."""
    os._exit(0)
