"""Benchmarks run on small inputs; their measurements are not asserted."""

import numpy as np
import pytest

from qualms_training.bench.fit_speed import bench_fit
from qualms_training.bench.graph_cost import bench_graph
from qualms_training.bench.score_accuracy import exact_scores
from qualms_training.bench.timing import medians

pytestmark = pytest.mark.slow


def test_medians_interleave_the_actions() -> None:
    calls: list[str] = []
    times = medians({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, repeats=3, warm_up=1)
    assert calls == ["a", "b", "a", "b", "a", "b", "a", "b"]
    assert set(times) == {"a", "b"}


def test_bench_fit_prints_ratio_cache_and_memory(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_fit("tiny", images=256, epochs=2) > 0
    printed = capsys.readouterr().out
    for line in ("faster, filling included", "cache on disk", "peak memory"):
        assert line in printed


def test_bench_graph_prints_both_batches_and_the_scores_microseconds(capsys: pytest.CaptureFixture[str]) -> None:
    assert set(bench_graph("tiny", repeats=5)) == {1, 32}
    assert "The scores add" in capsys.readouterr().out


def test_exact_scores_of_the_uniform_dirichlet() -> None:
    exact = exact_scores(np.zeros(10, np.float32))  # α = 1: uniform over the simplex of volume 1/9!
    assert float(exact["differential_entropy"]) == pytest.approx(-np.log(362880.0))
    assert float(exact["entropy"]) == pytest.approx(np.log(10))
    assert float(exact["precision"]) == 10
