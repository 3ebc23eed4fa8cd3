"""Execution of chunks: an executor maps chunks to parts, in their order. All else of a run does not depend on it.

`LocalExecutor` uses processes of this machine, each with a model of its own that runs on one core. Each process has its own pipe,
and ends when the pipe is closed, so that none is left behind if this process is killed. `qualms.score.ray_executor` uses the nodes
of a Ray cluster.
"""

import multiprocessing
import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Protocol

from qualms.errors import QualmsError
from qualms.score.chunks import Chunk
from qualms.score.items import ScoreError
from qualms.score.scorer import ScoreOptions, open_scorer

_AHEAD = 4
"""chunks for each process that may be finished before their turn"""
_END_SECONDS = 10.0


class Executor(Protocol):
    """Scores chunks somewhere."""

    def __enter__(self) -> "Executor": ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...

    def map(self, chunks: Iterable[Chunk]) -> Iterator[bytes]:
        """The parts as JSON lines (`Part.to_json`), in the order of the chunks; chunks are taken as they are needed.

        An executor may pickle `chunks` and iterate over it in another process of this machine.
        """


class LocalExecutor:
    """Processes of this machine."""

    def __init__(self, model: str, options: ScoreOptions, processes: int) -> None:
        """`model` is the path of the bundle."""
        self._model, self._options, self._number = model, options, processes
        self._processes: dict[Connection, multiprocessing.process.BaseProcess] = {}

    def __enter__(self) -> "LocalExecutor":
        context = multiprocessing.get_context("spawn")
        resource_tracker.ensure_running()  # would end the blocking of SIGINT if it were started with the first process
        try:
            with _interrupts_deferred():
                for _ in range(self._number):
                    ours, theirs = context.Pipe()
                    process = context.Process(target=_work, args=(theirs, self._model, self._options), daemon=True)
                    process.start()
                    theirs.close()
                    self._processes[ours] = process
        except BaseException:
            self._end(at_once=True)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end(at_once=kind is not None)

    def _end(self, *, at_once: bool) -> None:
        """End all processes, which end by themselves when they have nothing to do and their pipe is closed."""
        for connection, process in self._processes.items():
            if at_once:
                process.terminate()
            connection.close()
            process.join(_END_SECONDS)
            if process.is_alive():
                process.kill()
                process.join()
        self._processes.clear()

    def map(self, chunks: Iterable[Chunk]) -> Iterator[bytes]:
        """As in `Executor`."""
        waiting = iter(chunks)
        running: dict[Connection, tuple[int, str]] = {}
        finished: dict[int, bytes] = {}
        idle = list(self._processes)
        given = turn = 0
        more = True
        while True:
            while more and idle and given < turn + _AHEAD * self._number:
                chunk = next(waiting, None)
                if chunk is None:
                    more = False
                    break
                connection = idle.pop()
                running[connection] = given, chunk.items[0].path
                given += 1
                self._send(connection, chunk, running[connection][1])
            if not running and not finished:
                return
            for ready in wait(list(running)) if turn not in finished else []:
                assert isinstance(ready, Connection)
                number, first = running.pop(ready)
                finished[number] = self._receive(ready, first)
                idle.append(ready)
            while turn in finished:
                yield finished.pop(turn)
                turn += 1

    def _send(self, connection: Connection, chunk: Chunk, first: str) -> None:
        try:
            connection.send(chunk)
        except OSError:
            self._receive(connection, first)

    def _receive(self, connection: Connection, first: str) -> bytes:
        try:
            reply = connection.recv()
        except (EOFError, OSError):
            process = self._processes[connection]
            process.join(_END_SECONDS)
            raise ScoreError(
                f"A scoring process ended with exit code {process.exitcode} while it scored the files from {first} on, perhaps "
                "because there is not enough memory; run the same command again to continue, with fewer --processes."
            ) from None
        if isinstance(reply, Exception):
            raise reply
        assert isinstance(reply, bytes)
        return reply


@contextmanager
def _interrupts_deferred() -> Iterator[None]:
    """Start processes that ignore Ctrl-C, which reaches all processes of a terminal; it is raised here when all are started.

    Processes inherit that the signal is blocked. That is not enough for this one: a blocked signal goes to another thread, and
    Python would run its handler in this one while a process is half started.
    """
    came: list[int] = []
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    is_main = threading.current_thread() is threading.main_thread()
    handler = signal.signal(signal.SIGINT, lambda number, _: came.append(number)) if is_main else None
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if is_main:
            signal.signal(signal.SIGINT, handler)
    if came:
        raise KeyboardInterrupt


def _work(connection: Connection, model: str, options: ScoreOptions) -> None:
    """Score the chunks that come through a pipe until it is closed."""
    try:
        scorer = open_scorer(model, options)
    except QualmsError as error:
        connection.send(error)
        return
    try:
        while True:
            chunk: Chunk = connection.recv()
            connection.send(scorer.score(chunk).to_json())
    except QualmsError as error:
        connection.send(error)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the run has ended
    finally:
        scorer.close()
