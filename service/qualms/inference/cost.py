"""The cost of batches and the best batch size, learned from the runs that requests cause.

Measuring all sizes at start would take seconds and, with a large network, more than a gigabyte of memory, for batches that
may gain nothing. So only single images are known at start, larger batches are tried one doubling at a time while requests
bring them, and batches stop growing where throughput stops growing.
"""

import math
from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property

import numpy as np

TRIALS = 3
"""runs after which a size may be kept; the first one also allocates memory"""
REJECTION_TRIALS = 8
"""runs after which a size that did not gain is given up: noise can hide a gain, but hardly feign one"""
MIN_GAIN = 0.03
"""a doubling of the batch is kept if it reduces the seconds per image by this share"""
RUN_OVERHEAD_SECONDS = 0.0003
"""what a run takes outside of the model: forming the batch, decisions, metrics; larger batches share it among more images"""
PARTIAL_TRIAL = 1 / 16
"""of a trial: how much a run counts that fills less than three quarters of its size, because it shows less of the gain"""
FIRST_REVISIT, REVISIT_FACTOR, LAST_REVISIT = 256, 4, 4096
"""full runs after which a size that did not gain is tried again, because the verdict may have been noise"""
_RISE = 0.01
"""weight of a run that is slower than the estimate; noise only adds time, so a faster run replaces the estimate"""
_PUBLISHED_CHANGE = 0.02
"""relative change of an estimate from which the curve is computed again"""


@dataclass(frozen=True)
class CostCurve:
    """Seconds per batch, by its size: known at some sizes and interpolated linearly between them."""

    sizes: tuple[int, ...]
    seconds: tuple[float, ...]

    def __call__(self, rows: int) -> float:
        """Seconds for one batch of `rows`; proportional to `rows` beyond the largest known size."""
        table = self._table
        return table[rows] if rows < len(table) else table[-1] * rows / self.sizes[-1]

    @cached_property
    def _table(self) -> list[float]:
        """Seconds by number of rows; a table, because admission uses it twice per request."""
        return [float(value) for value in np.interp(range(self.sizes[-1] + 1), self.sizes, self.seconds)]


class CostLearner:
    """Learns the cost curve and the batch limit, from one thread at a time.

    Runs are grouped by the power of two at or above their size.
    """

    def __init__(self, max_batch: int, max_run_seconds: float = math.inf) -> None:
        """`max_batch` is never exceeded; a size whose runs take longer than `max_run_seconds` is not used."""
        self._sizes = sorted({min(1 << power, max_batch) for power in range(max_batch.bit_length() + 1)})
        self._max_run_seconds = max_run_seconds
        self._image_seconds = [math.inf] * len(self._sizes)
        """estimated seconds per image in batches of each size"""
        self._published = list(self._image_seconds)
        """the estimates that `cost` was computed from"""
        self._trials = [0.0] * len(self._sizes)
        self._kept = 0
        """index of the largest size that gained"""
        self._full_runs, self._revisit_after = 0, FIRST_REVISIT
        self.changed = False
        """set whenever `cost` and `max_batch` are computed again"""
        self.cost = CostCurve((1,), (0.0,))
        self.max_batch = 1
        """the largest batch to run; beyond the sizes that gained, at most one doubling that is being tried"""

    def observe(self, rows: int, seconds: float) -> None:
        """Learn from a run of `rows` images that took `seconds`."""
        if rows > self._sizes[-1]:
            return
        index = bisect_left(self._sizes, rows)
        known, measured = self._image_seconds[index], seconds / rows
        self._image_seconds[index] = new = (
            measured if measured < known else known + _RISE * (min(measured, 2 * known) - known)
        )
        published, on_trial = self._published[index], self._trials[index] < REJECTION_TRIALS
        self._trials[index] += 1 if 4 * rows >= 3 * self._sizes[index] else PARTIAL_TRIAL
        if on_trial or abs(new - published) > _PUBLISHED_CHANGE * published:
            self._update()
        elif self._sizes[index] == self.max_batch:
            self._count_full_run(index)

    def too_large(self, rows: int) -> None:
        """Never run `rows` images again: they need more memory than is allowed."""
        self._sizes = [size for size in self._sizes if size < rows] or [1]
        del (
            self._image_seconds[len(self._sizes) :],
            self._published[len(self._sizes) :],
            self._trials[len(self._sizes) :],
        )
        self._kept = min(self._kept, len(self._sizes) - 1)
        self._update()

    def _count_full_run(self, index: int) -> None:
        """Try the next size again after many full runs, ever more rarely."""
        self._full_runs += 1
        if self._full_runs < self._revisit_after or index + 1 == len(self._sizes):
            return
        self._full_runs, self._revisit_after = 0, min(REVISIT_FACTOR * self._revisit_after, LAST_REVISIT)
        self._trials[index + 1], self._image_seconds[index + 1] = 0.0, math.inf
        self._update()

    def _update(self) -> None:
        """Compute curve and batch limit from the estimates."""
        self._published = list(self._image_seconds)
        seconds = [size * value for size, value in zip(self._sizes, self._image_seconds, strict=True)]
        # A smaller batch never costs more: noise only adds time, so the lower of the two estimates is right.
        for index in range(len(seconds) - 2, -1, -1):
            seconds[index] = min(seconds[index], seconds[index + 1])
        points = [(size, value) for size, value in zip(self._sizes, seconds, strict=True) if value < math.inf]
        if points:
            sizes, values = zip(*points, strict=True)
            self.cost = CostCurve(sizes, values)
        self.max_batch = self._sizes[self._limit(seconds)]
        self.changed = True

    def _limit(self, seconds: list[float]) -> int:
        """Index of the largest size to run: the last one that gained, or the next one if it is still to be tried."""
        last = 0
        for index in range(1, len(self._sizes)):
            if not self._trials[last] or seconds[last] > self._max_run_seconds:
                break
            if not self._trials[index]:
                return index
            if seconds[index] > self._max_run_seconds:
                break
            if self._trials[index] < TRIALS:
                return index
            # A size that was kept before is given up only if it is slower: otherwise noise would change the limit often.
            gain = 0.0 if index <= self._kept else MIN_GAIN
            if self._effective(index) > (1 - gain) * self._effective(last):
                if self._trials[index] < REJECTION_TRIALS:
                    return index
                break
            last = index
        if last > self._kept:
            self._full_runs, self._revisit_after = 0, FIRST_REVISIT
        self._kept = last
        return last

    def _effective(self, index: int) -> float:
        """Seconds per image, with its share of what a run takes outside of the model."""
        return self._image_seconds[index] + RUN_OVERHEAD_SECONDS / self._sizes[index]
