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

from qualms.errors import ImageError, QualmsError
from qualms.images.input_spec import InputSpec
from qualms.images.worker_process import END, FORK, IDLE_PRIORITY, MESSAGE_BYTES, NO_WORKER, cpu_seconds

KilledFor = Literal["cpu", "deadline", "crash"]
KILLED_FOR: tuple[KilledFor, ...] = ("cpu", "deadline", "crash")
"""why a worker ended: its file took too much CPU time, its request's deadline passed, or the decoder crashed"""
_ENVIRONMENT = ("PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH")
"""variables that the template needs to start; others may hold secrets"""
_ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072", "MALLOC_ARENA_MAX": "1"}
"""settings of glibc with which workers return the memory of an image when it is decoded"""
_TEMPLATE_SECONDS = 10.0
"""time in which the template must start, fork or end a worker, unless the owner of the pool can wait longer"""
_NO_WORKER = "No process can be started that decodes the image; try again later."
_SPEC_FIELDS = ("height", "width", "colour", "resize", "fit", "shorter_side")
"""those of `pillow_decoder.TargetSpec`"""
_MAX_FILES = 500
"""files after which a worker is replaced, so that leaks in decoders do not add up"""
_KEPT_BYTES = 2**20
"""size to which a memory file is reduced after each use"""


class DeadlinePassed(Exception):  # noqa: N818
    """The request's deadline passed while its file was decoded."""


class NoWorkerError(QualmsError):
    """No worker process can be started, because the system allows no more processes, has no memory left or is too slow."""


class _Worker:
    """One worker process: its socket, the memory file that it shares with the service, and its process id."""

    def __init__(self, pid: int, connection: socket.socket, memory: int) -> None:
        self.pid, self.connection, self.memory = pid, connection, memory
        self.files = 0
        """number of files it has decoded"""
        self.ended = False

    def close(self) -> None:
        self.connection.close()
        os.close(self.memory)


class WorkerPool:
    """Decodes files in at most `size` worker processes; they are started when they are first needed."""

    def __init__(
        self,
        size: int,
        *,
        idle_priority: bool = True,
        on_killed: Callable[[KilledFor], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
        start_seconds: float = _TEMPLATE_SECONDS,
    ) -> None:
        """`on_killed` is called, in any thread, for every worker that ended before it replied.

        With `idle_priority`, workers run only while nothing else of the machine needs the cores. `start_seconds` is the time in
        which a worker must start.
        """
        self._arguments = [IDLE_PRIORITY] if idle_priority else []
        self._on_killed = on_killed
        self._clock = clock
        self._start_seconds = start_seconds
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
        request = {
            "bytes": len(data),
            "memory": max_memory,
            "cpu_seconds": cpu_seconds(min(max_pixels, max_pixels if pixels is None else pixels)),
            "max_pixels": max_pixels,
            "max_side": max_side,
            "min_jpeg_side": spec.min_jpeg_side,
            "spec": {name: getattr(spec, name) for name in _SPEC_FIELDS},
        }
        if not self._free.acquire(timeout=max(0.0, deadline - self._clock())):
            raise DeadlinePassed
        try:
            result = self._decode(data, request, spec, deadline)
            # The system may have killed the worker, so the file gets a second chance.
            if isinstance(result, str) and result == "crash":
                result = self._decode(data, request, spec, deadline)
        finally:
            self._free.release()
        if isinstance(result, str):
            raise _error(result, data)
        return result

    def _decode(
        self, data: bytes, request: dict[str, Any], spec: InputSpec, deadline: float
    ) -> NDArray[np.uint8] | KilledFor:
        """The pixels, or why the worker was killed."""
        worker = self._take()
        reply: dict[str, Any] | None = None
        try:
            _write(worker.memory, data)
            reply = self._exchange(worker, request, deadline)
            if reply is None:
                return self._killed(worker, deadline)
            if "error" in reply:
                raise ImageError(reply["error"], reason=reply["reason"])
            return _read(worker.memory, reply["bytes"], spec)
        finally:
            worker.files += 1
            if reply is not None and worker.files < _MAX_FILES:
                self._keep(worker)
            elif not worker.ended:
                self._end(worker)

    def _killed(self, worker: _Worker, deadline: float) -> KilledFor:
        """End a worker that did not reply, and return why."""
        is_late = self._clock() >= deadline
        code = self._end(worker)
        reason: KilledFor = "cpu" if code == -signal.SIGPROF else "deadline" if is_late else "crash"
        self._on_killed(reason)
        return reason

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
            _wait_or_kill(self._template)

    def _take(self) -> _Worker:
        """An idle worker, or a new one."""
        with self._lock:
            if self._idle:
                return self._idle.pop()
            try:
                return self._fork()
            except OSError:  # the template has ended
                pass
            try:
                return self._fork()
            except OSError as error:
                raise NoWorkerError(_NO_WORKER) from error

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
        memory = os.memfd_create("qualms-image")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        worker = _Worker(NO_WORKER, ours, memory)
        try:
            with theirs:
                worker.pid = int(self._command(FORK, [theirs.fileno(), memory]))
        except OSError:
            worker.close()
            self._discard_template()
            raise
        if worker.pid == NO_WORKER:
            worker.close()
            raise NoWorkerError(_NO_WORKER)
        return worker

    def _start_template(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(self._start_seconds)
        command = [sys.executable, "-P", "-m", "qualms.images.worker_process", str(theirs.fileno()), *self._arguments]
        environment = {**_ALLOCATOR, **{name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}}
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
        idle, self._idle = self._idle, []
        for worker in idle:  # they end when their socket is closed
            worker.close()

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

    def _end(self, worker: _Worker) -> int:
        """End a worker, and return its exit code; 0 if it is not known."""
        worker.ended = True
        worker.close()
        with self._lock:
            if self._control is None:
                return 0
            try:
                return int(self._command(b"%s %d" % (END, worker.pid), []))
            except OSError:
                self._discard_template()
                return 0


def _wait_or_kill(process: "subprocess.Popen[bytes]") -> None:
    try:
        process.wait(_TEMPLATE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _error(killed_for: KilledFor, data: bytes) -> Exception:
    if killed_for == "deadline":
        return DeadlinePassed()
    if killed_for == "cpu":
        return ImageError(
            f"The image of {len(data):,} bytes takes more CPU time to decode than its size allows; send it as a baseline "
            "JPEG or a PNG.",
            reason="failed",
        )
    return ImageError(
        f"The image of {len(data):,} bytes cannot be decoded: its decoder crashed; send a complete file.",
        reason="failed",
    )


def _write(memory: int, data: bytes) -> None:
    view = memoryview(data)
    offset = 0
    while offset < len(view):
        offset += os.pwrite(memory, view[offset:], offset)


def _read(memory: int, size: int, spec: InputSpec) -> NDArray[np.uint8]:
    pixels = np.frombuffer(os.pread(memory, size, 0), np.uint8)  # a regular file, so the result is complete
    return pixels.reshape(spec.shape)
