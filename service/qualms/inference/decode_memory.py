"""The memory of images that are being decoded."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from qualms.inference.batch import Expired

_WORKERS_SHARE = 0.75


class MemoryBudget:
    """Estimated memory of all decodes under way; threads wait until their share is free.

    Three quarters are open to worker processes. The other quarter is left to plain files, so that they need not wait for
    files that are not plain unless they are very large themselves.
    """

    def __init__(self, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.total = total
        self.for_workers = int(_WORKERS_SHARE * total)
        self._clock = clock
        self._used = {False: 0, True: 0}
        """bytes by whether they are used by workers"""
        self._waiting: dict[bool, deque[object]] = {False: deque(), True: deque()}
        """in order of arrival, so that a large share is not passed over for ever"""
        self._changed = threading.Condition()

    @contextmanager
    def share(self, size: int, deadline: float, *, worker: bool) -> Iterator[None]:
        """Hold `size` bytes, or the whole budget if that is less; raises Expired if they are not free before the deadline."""
        size = min(size, self.for_workers if worker else self.total)
        ticket, waiting = object(), self._waiting[worker]

        def is_free() -> bool:
            fits = sum(self._used.values()) + size <= self.total
            return waiting[0] is ticket and fits and (not worker or self._used[True] + size <= self.for_workers)

        with self._changed:
            waiting.append(ticket)
            try:
                if not self._changed.wait_for(is_free, max(0.0, deadline - self._clock())):
                    raise Expired
                self._used[worker] += size
            finally:
                waiting.remove(ticket)
                self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._used[worker] -= size
                self._changed.notify_all()
