"""The benchmark of `qualms score`."""

import io

import pytest
from rich.console import Console

from qualms.bench.scoring import ScoreRun, Scoring, run_scoring
from qualms.bench.servers.processes import BenchError
from qualms.bundle.file import Bundle


@pytest.mark.slow
def test_all_files_become_rows_and_a_continued_run_has_the_same_bytes(bundle: Bundle) -> None:
    console = Console(file=io.StringIO(), width=150)
    result = run_scoring(str(bundle.path), files=2000, console=console)
    assert result.resumed_equal
    assert result.limit > 0
    for few, every in result.runs.values():
        assert (few.rows, every.rows) == (200, 2000)
    assert "2,000 files (digits, one of 100 broken), tiny" in console.file.getvalue()  # type: ignore[attr-defined]


def test_the_rate_leaves_out_the_time_to_start() -> None:
    runs = {1: (ScoreRun(3.0, 2.0, None, 100), ScoreRun(12.0, 6.5, None, 1000))}
    result = Scoring(1000, 200.0, 250.0, runs, True)
    assert (result.rate(1), result.cpu_rate(1)) == (100.0, 200.0)


def test_a_url_is_refused() -> None:
    with pytest.raises(BenchError, match="--score needs a bundle or a model's name"):
        run_scoring("http://127.0.0.1:8000")
