"""Processes that score chunks: how they start and end."""

import os
import signal
import sys
import threading
from dataclasses import dataclass
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import pytest

from qualms.bundle.file import Bundle
from qualms.score.executor import LocalExecutor
from qualms.score.scorer import ScoreOptions


@dataclass(frozen=True)
class InterruptedOptions(ScoreOptions):
    """Options during whose transfer to a new process Ctrl-C comes."""

    def __reduce__(self) -> tuple[Any, ...]:
        os.kill(os.getpid(), signal.SIGINT)
        return ScoreOptions, (self.point, self.alpha)


def children() -> set[str]:
    """Ids of the processes that this one started and that have not ended, or were not waited for."""
    return set(Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split())


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_an_interrupt_while_processes_start_leaves_none_behind(bundle: Bundle) -> None:
    resource_tracker.ensure_running()
    before = children()
    ended = threading.Event()
    # The signal is delivered to this thread, as to those of libraries, because it is blocked in the main thread.
    other = threading.Thread(target=ended.wait)
    other.start()
    handler = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(KeyboardInterrupt):
            LocalExecutor(str(bundle.path), InterruptedOptions(), 2).__enter__()
    finally:
        ended.set()
        other.join()
    assert children() == before
    assert signal.getsignal(signal.SIGINT) is handler
