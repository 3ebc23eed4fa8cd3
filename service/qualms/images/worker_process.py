"""The processes that decode files which are not plain. Started by `qualms.images.worker_pool`, never imported by the service.

One process, the template, imports Pillow once and forks the workers, so that a killed worker is replaced within a
millisecond and workers share the template's memory. The template and its workers hold no descriptors but their own socket and
memory file, have an empty environment, and import neither NumPy nor ONNX Runtime.

A worker decodes one file at a time. The file and the pixels are passed in the memory file; the socket carries the request and
the reply. The limit on memory is RLIMIT_AS; a decoder that exceeds it fails like any other. The limit on CPU time is a
timer whose signal ends the worker, because a decoder cannot be interrupted otherwise.
"""

import gc
import json
import os
import resource
import signal
import socket
import sys
from types import SimpleNamespace
from typing import Any

from PIL import Image

from qualms.errors import ImageError
from qualms.images.pillow_decoder import decode, to_target

MESSAGE_BYTES = 4096
"""maximum size of a request or a reply"""
FORK, END = b"fork", b"end"
"""commands to the template: fork a worker, which replies with its process id; end a worker and reply with its status"""
IDLE_PRIORITY = "idle"
"""argument of the template"""
NO_WORKER = -1
"""instead of a process id, if no worker can be forked"""
BASE_CPU_SECONDS = 0.5
CPU_SECONDS_PER_PIXEL = 0.25e-6
"""CPU time that a file may take; the slowest of the accepted formats takes a third of it on a slow machine"""
_MAX_ERROR = 1000
"""characters of a message"""


def cpu_seconds(pixels: int) -> float:
    """CPU time that decoding may take."""
    return BASE_CPU_SECONDS + CPU_SECONDS_PER_PIXEL * pixels


def run_template(control: socket.socket, *, idle_priority: bool) -> None:
    """Fork and end workers until the service closes the socket.

    With `idle_priority`, workers use the time that the service leaves: whatever they decode, small requests are answered first.
    This process keeps its priority: on a busy machine it would not fork in time.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the service ends its workers
    Image.init()
    gc.collect()
    gc.freeze()  # a garbage collection in a worker would copy the shared pages
    workers: set[int] = set()
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, MESSAGE_BYTES, 2)
        if not message:
            break
        command, _, argument = message.partition(b" ")
        if command == FORK:
            pid = _fork()
            if pid == 0:
                control.close()
                if idle_priority:
                    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
                run_worker(socket.socket(fileno=descriptors[0]), descriptors[1])
                os._exit(0)
            if pid != NO_WORKER:
                workers.add(pid)
            for descriptor in descriptors:
                os.close(descriptor)
            control.send(str(pid).encode())
        elif command == END:
            control.send(str(_end(int(argument))).encode())
            workers.discard(int(argument))
    for pid in workers:
        _end(pid)


def _fork() -> int:
    """As `os.fork`; NO_WORKER if there may be no more processes."""
    try:
        return os.fork()
    except OSError:
        return NO_WORKER


def _end(pid: int) -> int:
    """Kill a worker if it is still alive, and return its exit code, negative for a signal."""
    try:
        ended, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:  # forked by an earlier template
        return 0
    if not ended:
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


def run_worker(connection: socket.socket, memory: int) -> None:
    """Decode files until the service closes the socket."""
    base = _address_space()
    while message := connection.recv(MESSAGE_BYTES):
        reply = _limited(json.loads(message), memory, base)
        connection.send(json.dumps(reply, ensure_ascii=False).encode())


def _limited(request: dict[str, Any], memory: int, base: int) -> dict[str, Any]:
    """The reply to a request: the number of bytes of the pixels, or the error."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (base + request["memory"], hard))
    signal.setitimer(signal.ITIMER_PROF, request["cpu_seconds"])
    try:
        return _decode(request, memory)
    except ImageError as error:
        return {"error": str(error)[:_MAX_ERROR], "reason": error.reason}
    except MemoryError:
        return {"error": "Decoding the image takes too much memory.", "reason": "too_large"}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))


def _decode(request: dict[str, Any], memory: int) -> dict[str, Any]:
    image = decode(
        os.pread(memory, request["bytes"], 0),
        max_pixels=request["max_pixels"],
        max_side=request["max_side"],
        min_jpeg_side=request["min_jpeg_side"],
    )
    pixels = to_target(image, SimpleNamespace(**request["spec"])).tobytes()
    os.pwrite(memory, pixels, 0)
    return {"bytes": len(pixels)}


def _address_space() -> int:
    """Bytes of address space that this process uses."""
    with open("/proc/self/statm", "rb") as file:  # noqa: PTH123  # pathlib need not be imported
        return int(file.read().split()[0]) * resource.getpagesize()


if __name__ == "__main__":
    run_template(socket.socket(fileno=int(sys.argv[1])), idle_priority=IDLE_PRIORITY in sys.argv[2:])
