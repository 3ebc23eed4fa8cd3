"""The flags of the last half hour, in intervals of equal length: enough to see drift without Prometheus."""

import time
from collections.abc import Callable
from dataclasses import dataclass

INTERVAL_SECONDS = 30
INTERVALS = 60


@dataclass(slots=True)
class Interval:
    """Counts of one interval."""

    images: int = 0
    flagged: int = 0


class RecentFlags:
    """Counts images and flags at the default operating point in a ring of intervals; used on the event loop only."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._current = int(clock() // INTERVAL_SECONDS)
        """number of the interval that was counted last"""
        self._ring = [Interval() for _ in range(INTERVALS)]

    def add(self, images: int, flagged: int) -> None:
        """Count one batch."""
        self._advance()
        interval = self._ring[self._current % INTERVALS]
        interval.images += images
        interval.flagged += flagged

    def intervals(self) -> list[Interval]:
        """The intervals, oldest first; the last one is not over yet."""
        self._advance()
        first = self._current + 1
        return [self._ring[(first + index) % INTERVALS] for index in range(INTERVALS)]

    def _advance(self) -> None:
        """Empty the intervals that have begun since the last call."""
        now = int(self._clock() // INTERVAL_SECONDS)
        for number in range(max(self._current, now - INTERVALS) + 1, now + 1):
            self._ring[number % INTERVALS] = Interval()
        self._current = max(self._current, now)
