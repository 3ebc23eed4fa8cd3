"""Benchmarks run on small inputs; their measurements are not asserted."""

import numpy as np
import pytest
from scipy.special import softmax
from scipy.stats import dirichlet

from qualms.bundle.scores import DIRICHLET_SCORES
from qualms_training.bench.fit_speed import bench_fit
from qualms_training.bench.graph_cost import BATCHES, bench_graph, bench_model
from qualms_training.bench.score_accuracy import (
    exact_joined_scores,
    exact_meta_scores,
    joined_patterns,
    joined_scores_model,
    largest_errors,
    patterns,
    scores_model,
)
from qualms_training.bench.timing import medians
from qualms_training.console import Display

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


def test_bench_graph_prints_every_batch_size_and_the_scores_microseconds(capsys: pytest.CaptureFixture[str]) -> None:
    assert set(bench_graph("tiny", repeats=5)) == set(BATCHES)
    assert "The scores add" in capsys.readouterr().out


def test_bench_model_measures_any_base_with_the_given_number_of_classes(capsys: pytest.CaptureFixture[str]) -> None:
    assert set(bench_model("torchvision:resnet18", classes=300, size=32, repeats=2)) == {1}
    printed = capsys.readouterr().out
    assert "torchvision:resnet18, 300 classes, 32 pixels" in printed
    assert "% larger" in printed


def test_exact_scores_of_the_uniform_dirichlet() -> None:
    exact = exact_meta_scores(np.zeros(10, np.float32))  # α = 1: uniform over the simplex of volume 1/9!
    assert float(exact["differential_entropy"]) == pytest.approx(-np.log(362880.0))
    assert float(exact["entropy"]) == pytest.approx(np.log(10))
    assert float(exact["precision"]) == 10


def test_exact_scores_of_the_joined_alpha_agree_with_scipy() -> None:
    logits, log_evidence = np.array([0.5, -1.0, 2.0], np.float32), np.float32(3.0)
    exact = exact_joined_scores(np.r_[logits, log_evidence])
    alpha = 1 + np.exp(np.float64(log_evidence)) * softmax(logits.astype(np.float64))
    assert float(exact["differential_entropy"]) == pytest.approx(dirichlet(alpha).entropy())
    assert float(exact["precision"]) == pytest.approx(3 + np.exp(3.0))
    assert exact["meta_mutual_information"] == exact_meta_scores(logits)["mutual_information"]


@pytest.mark.parametrize("classes", [2, 10])
def test_the_exported_scores_have_no_more_error_than_rounding_to_float32(classes: int, display: Display) -> None:
    meta = largest_errors(scores_model(classes), np.stack(list(patterns(classes))), exact_meta_scores, display)
    joined = largest_errors(
        joined_scores_model(classes), np.stack(list(joined_patterns(classes))), exact_joined_scores, display
    )
    assert set(meta) == set(DIRICHLET_SCORES)
    assert set(joined) == {*DIRICHLET_SCORES, "meta_mutual_information"}
    assert max(*meta.values(), *joined.values()) < 6e-8
