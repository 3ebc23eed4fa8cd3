"""Decoding in worker processes that can be killed: for files that are not plain.

Neither `concurrent.futures` nor loky can kill one worker without losing the others, and pebble's workers are children of the
service, with its memory and descriptors. So the pool is a small one of our own: `qualms.images.worker_process` forks the
workers, and each call of `WorkerPool.preprocess` uses one of them, blocking its thread until the reply, the deadline or
the end of the worker.
"""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from qualms.errors import ImageError
from qualms.images.input_spec import InputSpec
from qualms.images.worker_process import END, FORK, MESSAGE_BYTES, cpu_seconds

KilledFor = Literal["cpu", "deadline", "crash"]
KILLED_FOR: tuple[KilledFor, ...] = ("cpu", "deadline", "crash")
"""why a worker ended: its file took too much CPU time, its request's deadline passed, or the decoder crashed"""
_ENVIRONMENT = ("PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH")
"""variables that the template needs to start; others may hold secrets"""
_SPEC_FIELDS = ("height", "width", "colour", "resize", "fit", "shorter_side")
"""those of `pillow_decoder.TargetSpec`"""
_MAX_FILES = 500
"""files after which a worker is replaced, so that leaks in decoders do not add up"""
_KEPT_BYTES = 2**20
"""size to which a memory file is reduced after each use"""


class DeadlinePassed(Exception):  # noqa: N818
    """The request's deadline passed while its file was decoded."""


class _Worker:
    """One worker process: its socket, the memory file that it shares with the service, and its process id."""

    def __init__(self, pid: int, connection: socket.socket, memory: int) -> None:
        self.pid, self.connection, self.memory = pid, connection, memory
        self.files = 0
        """number of files it has decoded"""

    def close(self) -> None:
        self.connection.close()
        os.close(self.memory)


class WorkerPool:
    """Decodes files in at most `size` worker processes; they are started when they are first needed."""

    def __init__(
        self,
        size: int,
        *,
        on_killed: Callable[[KilledFor], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`on_killed` is called, in any thread, for every worker that ended before it replied."""
        self._on_killed = on_killed
        self._clock = clock
        self._lock = threading.Lock()
        self._free = threading.BoundedSemaphore(size)
        self._idle: list[_Worker] = []
        self._control: socket.socket | None = None
        self._template: subprocess.Popen[bytes] | None = None
        self._closed = False

    def preprocess(
        self,
        data: bytes,
        spec: InputSpec,
        *,
        max_pixels: int,
        max_side: int,
        max_memory: int,
        deadline: float,
        pixels: int | None = None,
    ) -> NDArray[np.uint8]:
        """As `qualms.images.preprocess.preprocess`, in a worker; blocks until the `deadline` at most.

        `max_memory` is what the worker may allocate for this file, in bytes, and `pixels` the size of the image as far as
        its headers show, from which the limit on CPU time follows. Raises ImageError, or DeadlinePassed.
        """
        if not self._free.acquire(timeout=max(0.0, deadline - self._clock())):
            raise DeadlinePassed
        try:
            worker = self._take()
        except BaseException:
            self._free.release()
            raise
        reply: dict[str, Any] | None = None
        try:
            request = {
                "bytes": len(data),
                "memory": max_memory,
                "cpu_seconds": cpu_seconds(min(max_pixels, max_pixels if pixels is None else pixels)),
                "max_pixels": max_pixels,
                "max_side": max_side,
                "min_jpeg_side": spec.min_jpeg_side,
                "spec": {name: getattr(spec, name) for name in _SPEC_FIELDS},
            }
            _write(worker.memory, data)
            reply = self._exchange(worker, request, deadline)
            if reply is not None and "bytes" in reply:
                return _read(worker.memory, reply["bytes"], spec)
        finally:
            worker.files += 1
            if reply is None or worker.files == _MAX_FILES:
                killed_for = self._end(worker, deadline)
            else:
                self._keep(worker)
            self._free.release()
        if reply is not None:
            raise ImageError(reply["error"], reason=reply["reason"])
        self._on_killed(killed_for)
        raise _error(killed_for, data)

    def close(self) -> None:
        """End all processes; calls of `preprocess` in other threads fail."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            control, self._control = self._control, None
        for worker in idle:
            worker.close()
        if control is not None:
            control.close()  # the template kills the others
        if self._template is not None:
            self._template.wait()

    def _take(self) -> _Worker:
        """An idle worker, or a new one."""
        with self._lock:
            if self._idle:
                return self._idle.pop()
            try:
                return self._fork()
            except OSError:  # the template has ended
                return self._fork()

    def _keep(self, worker: _Worker) -> None:
        os.ftruncate(worker.memory, _KEPT_BYTES)
        with self._lock:
            if not self._closed:
                self._idle.append(worker)
                return
        worker.close()

    def _fork(self) -> _Worker:
        """Start a worker; the caller holds the lock."""
        if self._closed:
            raise DeadlinePassed
        if self._control is None:
            self._start_template()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        memory = os.memfd_create("qualms-image")
        try:
            pid = int(self._command(FORK, [theirs.fileno(), memory]))
        except BaseException:
            ours.close()
            os.close(memory)
            self._discard_template()
            raise
        finally:
            theirs.close()
        return _Worker(pid, ours, memory)

    def _start_template(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-P", "-m", "qualms.images.worker_process", str(theirs.fileno())]
        environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        with theirs:
            self._template = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # libraries print about damaged files
                env=environment,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C must reach the service alone
            )

    def _discard_template(self) -> None:
        """Forget a template that has failed; the next file starts another."""
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._template is not None:
            self._template.kill()
            self._template.wait()

    def _command(self, command: bytes, descriptors: list[int]) -> bytes:
        """Send a command to the template and return its reply; the caller holds the lock."""
        assert self._control is not None
        socket.send_fds(self._control, [command], descriptors)
        reply = self._control.recv(MESSAGE_BYTES)
        if not reply:
            raise OSError("the process that forks workers has ended")
        return reply

    def _exchange(self, worker: _Worker, request: dict[str, Any], deadline: float) -> dict[str, Any] | None:
        """The worker's reply, or None if it has ended or the deadline has passed."""
        try:
            worker.connection.send(json.dumps(request).encode())
            poll = select.poll()
            poll.register(worker.connection, select.POLLIN)
            if not poll.poll(max(0.0, deadline - self._clock()) * 1e3):
                return None
            message = worker.connection.recv(MESSAGE_BYTES)
        except OSError:
            return None
        return json.loads(message) if message else None

    def _end(self, worker: _Worker, deadline: float) -> KilledFor:
        """End a worker that did not reply, and return why."""
        worker.close()
        with self._lock:
            try:
                code = int(self._command(b"%s %d" % (END, worker.pid), [])) if self._control is not None else 0
            except OSError:
                self._discard_template()
                code = 0
        if code == -signal.SIGPROF:
            return "cpu"
        return "deadline" if self._clock() >= deadline else "crash"


def _error(killed_for: KilledFor, data: bytes) -> Exception:
    if killed_for == "deadline":
        return DeadlinePassed()
    if killed_for == "cpu":
        return ImageError(
            f"The image of {len(data):,} bytes takes more CPU time to decode than its size allows; send it as a baseline "
            "JPEG or a PNG.",
            reason="costly",
        )
    return ImageError(
        f"The image of {len(data):,} bytes is damaged: its decoder failed; send a complete file.", reason="malformed"
    )


def _write(memory: int, data: bytes) -> None:
    view = memoryview(data)
    offset = 0
    while offset < len(view):
        offset += os.pwrite(memory, view[offset:], offset)


def _read(memory: int, size: int, spec: InputSpec) -> NDArray[np.uint8]:
    pixels = np.frombuffer(os.pread(memory, size, 0), np.uint8)  # a regular file, so the result is complete
    return pixels.reshape(spec.shape)
