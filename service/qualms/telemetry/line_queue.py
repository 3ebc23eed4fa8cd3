"""A bounded queue of lines that a thread writes to a file descriptor, so that callers never wait for stdout.

If the queue is full because writing blocks, or if writing fails, lines are dropped and counted. The thread writes to the
descriptor itself: a thread that is blocked inside `sys.stdout` holds its lock, and the interpreter would wait for it at exit.
"""

import errno
import os
import queue
import select
import sys
import threading
from bisect import bisect_right
from collections.abc import Callable
from contextlib import suppress
from itertools import accumulate

MAX_LINES = 10_000
MAX_BYTES = 4 * 2**20
CLOSE_SECONDS = 1.0
_BATCH_SECONDS = 0.01
"""time for which the first line of a write waits for others, because waking the thread for each line costs more than the line"""
_PERMANENT = frozenset({errno.EPIPE, errno.EBADF})
"""errors after which no write can succeed: nobody can read the pipe any more, or the descriptor is not open for writing"""
_STDERR = 2


class LineQueue:
    """Writes lines to a copy of `descriptor`, several in one write. If the descriptor is None, all lines are dropped.

    `report` returns the line that reports a number of dropped lines. It is written when writing works again.
    """

    def __init__(
        self,
        descriptor: int | None,
        report: Callable[[int], bytes],
        *,
        max_lines: int = MAX_LINES,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self._report, self._max_lines, self._max_bytes = report, max_lines, max_bytes
        self._queue: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._lock = threading.RLock()  # reentrant, because a signal handler may log while its thread is in `put`
        self._given = self._taken = 0  # bytes; each is changed by one side only
        self._refused = self._failed = self._reported = 0  # lines
        self._errors: set[int | None] = set()  # kinds that have been reported on stderr
        self._line_incomplete = False
        """whether the last write ended within a line"""
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._usable = descriptor is not None
        if descriptor is None:
            _report_on_stderr("stdout is closed")
        else:
            # A copy, because a file that is opened after the original was closed could get the original's number.
            self._descriptor = os.dup(descriptor)
            self._thread = threading.Thread(target=self._work, name="log", daemon=True)
            self._thread.start()

    @property
    def dropped(self) -> int:
        """Lines that were not written because the queue was full or writing failed."""
        return self._refused + self._failed

    def put(self, line: bytes) -> None:
        """Queue a line, which ends with a newline, or drop it; returns at once."""
        size = len(line)
        with self._lock:
            if (
                self._usable
                and self._queue.qsize() < self._max_lines
                and self._given - self._taken + size <= self._max_bytes
            ):
                self._given += size
                self._queue.put(line)
            else:
                self._refused += 1

    def close(self, timeout: float = CLOSE_SECONDS) -> None:
        """Write the queued lines, for at most `timeout` seconds; later lines are dropped."""
        self._usable = False
        self._closing.set()
        self._queue.put(None)
        if self._thread is not None:
            self._thread.join(timeout)

    def _work(self) -> None:
        closed = False
        while not closed:
            batch = [self._queue.get()]
            self._closing.wait(_BATCH_SECONDS)
            with suppress(queue.Empty):
                while True:
                    batch.append(self._queue.get_nowait())
            closed = None in batch
            self._write_batch([line for line in batch if line is not None])
        os.close(self._descriptor)

    def _write_batch(self, lines: list[bytes]) -> None:
        unreported = self.dropped - self._reported
        start = b"\n" if self._line_incomplete else b""
        data = b"".join([start, *lines, self._report(unreported) if unreported else b""])
        written = self._write(data)
        if written == len(data):
            self._reported += unreported
        else:
            ends = list(accumulate(map(len, lines), initial=len(start)))[1:]
            self._failed += len(lines) - bisect_right(ends, written)
        if written:
            self._line_incomplete = data[written - 1 : written] != b"\n"
        self._taken += sum(map(len, lines))

    def _write(self, data: bytes) -> int:
        """Return the number of bytes that were written, which is less than all after an error."""
        view, written = memoryview(data), 0
        while written < len(data):
            try:
                written += os.write(self._descriptor, view[written:])
            except BlockingIOError:  # a non-blocking stdout whose buffer is full
                _writable(self._descriptor, timeout=None)
            except OSError as error:
                self._fail(error)
                break
        return written

    def _fail(self, error: OSError) -> None:
        if error.errno in _PERMANENT:
            self._usable = False
        if error.errno not in self._errors:
            self._errors.add(error.errno)
            _report_on_stderr((error.strerror or str(error)).lower())


def _writable(descriptor: int, timeout: float | None) -> bool:
    """Wait until a write would not block, for at most `timeout` milliseconds."""
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return bool(poll.poll(timeout))


def _report_on_stderr(reason: str) -> None:
    """Report on stderr why lines are lost, unless that would block."""
    sentence = f"qualms: Log lines cannot be written ({reason}); qualms_log_lines_dropped_total counts them.\n"
    with suppress(OSError):
        if sys.__stderr__ is not None and _writable(_STDERR, timeout=0):
            os.write(_STDERR, sentence.encode())
