import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import IO

import pytest

from qualms.bench.servers.process_tree import (
    PeakMemory,
    cpu_seconds,
    find_listener,
    measure_requests,
    pids_of_tree,
    reset_peak,
    resident,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are read from /proc")

ENDED = 2**30
"""more than the largest pid"""

# Runs the lines of its standard input, in itself or in its child, and prints a line when each has run.
PARENT = """
import subprocess, sys
code = "import sys\\nfor line in sys.stdin:\\n    exec(line)\\n    print(flush=True)"
child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
def in_child(line):
    child.stdin.write(line + "\\n")
    child.stdin.flush()
    child.stdout.readline()
in_child("pass")
print(child.pid, flush=True)
for line in sys.stdin:
    exec(line)
    print(flush=True)
"""
SPEND_CPU = "import time; t = time.process_time(); exec('while time.process_time() < t + 0.2: pass')"
ALLOCATE = "x = b'x' * 50_000_000"


class Parent:
    """A process with one child; both run the code that they are given."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdin
        assert process.stdout
        self.pid = process.pid
        self._input: IO[str] = process.stdin
        self._output: IO[str] = process.stdout
        self.child = int(process.stdout.readline())

    def run(self, line: str) -> None:
        self._input.write(line + "\n")
        self._input.flush()
        assert self._output.readline() == "\n"

    def run_in_child(self, line: str) -> None:
        self.run(f"in_child({line!r})")


@pytest.fixture
def parent() -> Iterator[Parent]:
    command = [sys.executable, "-c", PARENT]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        started = Parent(process)
        yield started
        assert process.stdin
        started.run("child.kill(); child.wait()")
        process.stdin.close()


def test_the_tree_contains_descendants_only(parent: Parent) -> None:
    assert pids_of_tree(parent.pid) == [parent.pid, parent.child]
    assert {os.getpid(), parent.pid, parent.child} <= set(pids_of_tree(os.getpid()))
    assert pids_of_tree(ENDED) == []


def test_cpu_time_includes_children_that_run_and_that_have_ended(parent: Parent) -> None:
    before = cpu_seconds(parent.pid) or 0.0
    parent.run_in_child(SPEND_CPU)
    running = cpu_seconds(parent.pid) or 0.0
    assert running >= before + 0.15
    parent.run("child.kill(); child.wait()")
    assert pids_of_tree(parent.pid) == [parent.pid]
    assert (cpu_seconds(parent.pid) or 0.0) >= running
    assert cpu_seconds(ENDED) is None


@pytest.mark.parametrize("run", [Parent.run, Parent.run_in_child], ids=["parent", "child"])
def test_memory_includes_children(parent: Parent, run: Callable[[Parent, str], None]) -> None:
    before = resident(parent.pid) or 0
    run(parent, ALLOCATE)
    assert before + 45_000_000 < (resident(parent.pid) or 0) < before + 60_000_000
    run(parent, "del x")
    assert (resident(parent.pid) or 0) < before + 25_000_000
    assert resident(ENDED) is None


def test_the_peak_contains_samples_of_children_and_the_record_of_the_first_process(parent: Parent) -> None:
    parent.run_in_child(ALLOCATE)
    parent.run(f"{ALLOCATE}; del x")  # before the peak is reset
    before = resident(parent.pid) or 0
    peak = PeakMemory(parent.pid)
    with peak.sampled():
        pass
    assert before <= (peak.value or 0) < before + 10_000_000
    parent.run("y = b'y' * 150_000_000; del y")  # after the last sample
    assert (peak.value or 0) > 150_000_000
    assert PeakMemory(ENDED).value is None


def test_the_peak_is_sampled_while_the_block_runs(parent: Parent) -> None:
    before = resident(parent.pid) or 0
    peak = PeakMemory(parent.pid)
    with peak.sampled():
        parent.run_in_child(ALLOCATE)
        while (peak.value or 0) < before + 45_000_000:  # ends with the next sample
            parent.run("pass")
        parent.run_in_child("del x")
    assert (resident(parent.pid) or 0) < before + 25_000_000
    assert (peak.value or 0) >= before + 45_000_000


@pytest.mark.parametrize("run", [Parent.run, Parent.run_in_child], ids=["parent", "child"])
def test_short_rises_of_memory_are_measured(parent: Parent, run: Callable[[Parent, str], None]) -> None:
    run(parent, f"{ALLOCATE}; del x")  # an earlier peak does not count
    memory = measure_requests(parent.pid, lambda: run(parent, "y = b'y' * 30_000_000; del y"))
    assert memory is not None
    assert memory.idle > 10**6
    assert 25_000_000 < memory.rise < 40_000_000
    assert measure_requests(ENDED, list) is None


def test_the_record_of_an_ended_process_cannot_be_reset() -> None:
    assert reset_peak(os.getpid())
    assert not reset_peak(ENDED)


@pytest.mark.parametrize(("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_the_process_that_listens_on_a_port_is_found(family: int, host: str) -> None:
    with closing(socket.socket(family)) as listener:
        try:
            listener.bind((host, 0))
        except OSError:
            pytest.skip(f"{host} is not available")
        port = listener.getsockname()[1]
        assert find_listener(port) is None
        listener.listen()
        assert find_listener(port) == os.getpid()
        # A child that has inherited the socket does not listen by itself.
        with subprocess.Popen(
            [sys.executable, "-c", "print(flush=True); input()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[listener.fileno()],
        ) as child:
            assert child.stdin
            assert child.stdout
            child.stdout.readline()
            assert find_listener(port) == os.getpid()
            child.stdin.close()
