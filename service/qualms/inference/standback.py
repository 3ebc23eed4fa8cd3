"""Who can only refuse leaves the core to the model.

Each turn of the event loop finds the core's caches full of the model, and leaves the model to find them full of its own:
a refusal between two others costs a fraction of one by itself. So refusals are made in bursts.
"""

import asyncio
import threading
from collections.abc import Callable

STAND_BACK_SECONDS = 0.01
"""the longest that the loop stands back"""


class StandBack:
    """Holds an event loop up while another thread runs the model; `run_ended` is that thread's."""

    def __init__(self, connections: Callable[[], int]) -> None:
        """`connections` tells how many are open."""
        self._connections = connections
        self._connected = 0
        """connections that were open when the loop last stood back, or was about to"""
        self._due = False
        self._ended = threading.Condition()
        self._runs_ended = 0

    def soon(self, loop: asyncio.AbstractEventLoop) -> None:
        """Stand back when all that the loop's pass brings has been answered: till the run ends, or for a moment."""
        if not self._due:
            self._due = True
            loop.call_soon(self._now, self._runs_ended)

    def run_ended(self) -> None:
        """The loop has something to do again."""
        with self._ended:
            self._runs_ended += 1
            self._ended.notify()

    def _now(self, runs_ended: int) -> None:
        self._due = False
        before, self._connected = self._connected, self._connections()
        if self._connected > before:  # a pass takes only one new connection, so there are more to be taken
            return
        with self._ended:
            self._ended.wait_for(lambda: self._runs_ended != runs_ended, STAND_BACK_SECONDS)
