"""Start time and memory of both servers, measured on a small bundle; the figures themselves are not asserted."""

import io
import os
from pathlib import Path

import pytest
from rich.console import Console

from qualms.bench.servers.processes import BenchError
from qualms.bench.startup import CONCURRENCIES, read_memory, run_startup


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs /proc/PID/smaps_rollup")
def test_memory_is_read_in_bytes() -> None:
    memory = read_memory(os.getpid())
    assert 2**20 < memory.pss <= memory.rss < 2**36


def test_the_memory_of_a_process_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(BenchError, match=r"^The memory of process 999999999 cannot be read: "):
        read_memory(999_999_999)


def test_a_url_is_refused() -> None:
    with pytest.raises(BenchError, match="starts its own servers; it accepts a bundle or a model's name, not 'http://"):
        run_startup("http://127.0.0.1:1")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs /proc/PID/smaps_rollup")
def test_both_servers_are_started_loaded_and_printed(bundle_file: Path) -> None:
    console = Console(file=io.StringIO(), width=100)
    results = run_startup(str(bundle_file), seconds=0.2, rounds=1, console=console)
    assert list(results) == ["qualms", "plain"]
    for (one,) in results.values():
        assert 0 < one.ready < one.first_answer
        assert set(one.loads) == set(CONCURRENCIES)
        assert all(load.errors == 0 and load.requests_per_second > 0 for load in one.loads.values())
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    for text in ("ready, s", "PSS after load, MB", "of limit, concurrency 16", "p99, ms, concurrency 1"):
        assert text in printed
