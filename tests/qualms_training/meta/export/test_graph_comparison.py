"""Differences from PyTorch are judged by the spread of each score over known images."""

import re
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from qualms.bundle.runtime import GraphRunner, Images
from qualms_training.errors import ExportError
from qualms_training.meta.export.graph_comparison import by_torch, compare
from qualms_training.meta.graph import BundleGraph

KNOWN, DRAWN = 40, 8
Outputs = dict[str, NDArray[Any]]


@pytest.fixture(scope="module")
def graph(pooled_graph: Callable[[str], BundleGraph]) -> BundleGraph:
    return pooled_graph("base")


@pytest.fixture(scope="module")
def images() -> NDArray[np.uint8]:
    return np.random.default_rng(0).integers(0, 256, (DRAWN + KNOWN, 16, 16, 3), dtype=np.uint8)


@pytest.fixture
def outputs(graph: BundleGraph, images: NDArray[np.uint8]) -> Outputs:
    return by_torch(graph, images)


def runner(outputs: Outputs) -> GraphRunner:
    """A stand-in for ONNX Runtime that returns these outputs."""
    return cast(GraphRunner, lambda _: dict(outputs))


def test_equal_outputs_have_no_difference(graph: BundleGraph, images: NDArray[np.uint8], outputs: Outputs) -> None:
    differences = compare(graph, runner(outputs), images, DRAWN)
    assert set(differences) == {*graph.outputs, "log_alpha"}
    assert set(differences.values()) == {0.0}


@pytest.mark.parametrize(("deviations", "accepted"), [(0.008, True), (0.02, False)])
def test_a_score_may_differ_by_a_hundredth_of_its_spread_over_known_images(
    deviations: float, accepted: bool, graph: BundleGraph, images: NDArray[np.uint8], outputs: Outputs
) -> None:
    # The spread of drawn images does not count.
    outputs["distance"] = outputs["distance"].copy()
    spread = outputs["distance"][DRAWN:].std()
    assert deviations * spread > 1e-3 * outputs["distance"].max(), "the rule of relative differences would accept it"
    outputs["distance"][DRAWN + 3] += np.float32(deviations * spread)
    if accepted:
        assert compare(graph, runner(outputs), images, DRAWN)["distance"] > 0
    else:
        with pytest.raises(
            ExportError, match=r"distance by .* \(at most .* is accepted\)\. If the base's weights are not"
        ):
            compare(graph, runner(outputs), images, DRAWN)


def test_the_error_names_remedies(graph: BundleGraph, images: NDArray[np.uint8], outputs: Outputs) -> None:
    outputs["fused"] = outputs["fused"] * np.float32(1.5)
    with pytest.raises(
        ExportError, match=r"convert them; .*--taps .*--no-distance \(distance = false at the top level"
    ):
        compare(graph, runner(outputs), images, DRAWN)


@pytest.mark.parametrize(("column", "term"), [(0, "softmax"), (1, "evidence"), (2, "distance")])
def test_the_error_names_the_term_and_the_tap_that_differ(
    column: int, term: str, graph: BundleGraph, images: NDArray[np.uint8], outputs: Outputs
) -> None:
    outputs["fused_terms"] = outputs["fused_terms"].copy()
    outputs["fused_terms"][DRAWN, column] += 10
    with pytest.raises(ExportError, match=f"differs most is {term}") as raised:
        compare(graph, runner(outputs), images, DRAWN)
    tap = re.search(r"to which tap '(.*)' adds", str(raised.value))
    if term == "softmax":  # it depends on the logits alone
        assert tap is None
    else:
        assert tap is not None
        (other,) = set(graph.extractor.tapped.names) - {tap[1]}
        assert f"--taps {other}, without that tap" in str(raised.value)


def test_without_known_images_only_relative_differences_count(
    graph: BundleGraph, images: NDArray[np.uint8], outputs: Outputs
) -> None:
    outputs["distance"] = outputs["distance"] * np.float32(1.002)
    with pytest.raises(ExportError, match="distance by 2.0e-03"):
        compare(graph, runner(outputs), images, len(images))


@pytest.mark.parametrize(("gap", "accepted"), [(1e-5, True), (1e-2, False)])
def test_predictions_may_differ_only_between_tied_classes(
    gap: float,
    accepted: bool,
    graph: BundleGraph,
    images: NDArray[np.uint8],
    outputs: Outputs,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    classes = outputs["prediction"]
    other = (classes + 1) % 4
    rows = np.arange(len(classes))
    tied = dict(outputs)
    tied["base_probabilities"] = outputs["base_probabilities"].copy()
    tied["base_probabilities"][rows, other] = outputs["base_probabilities"][rows, classes] * np.float32(1 - gap)
    monkeypatch.setattr("qualms_training.meta.export.graph_comparison.by_torch", lambda *_: dict(tied))
    swapped = {**tied, "prediction": np.where(rows == 5, other, classes)}
    if accepted:
        compare(graph, runner(swapped), images, DRAWN)
    else:
        with pytest.raises(ExportError, match=f"in 1 of {len(images)} predictions"):
            compare(graph, runner(swapped), images, DRAWN)


def test_torch_is_given_as_many_images_as_the_batch_rule_allows(
    graph: BundleGraph, images: NDArray[np.uint8], outputs: Outputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = list[int]()

    class Recorded:
        shape = images.shape

        def __len__(self) -> int:
            return len(images)

        def __getitem__(self, rows: slice) -> NDArray[np.uint8]:
            part = images[rows]
            sizes.append(len(part))
            return part

    monkeypatch.setattr("qualms.bundle.runtime.BATCH_VALUES", 10 * images[0].size)
    lazy: Images = Recorded()
    for name, values in by_torch(graph, lazy).items():
        np.testing.assert_allclose(values, outputs[name], rtol=1e-4, atol=1e-4, err_msg=name)
    assert sizes == [10, 10, 10, 10, 8]
