"""Images of an evaluation are run once, in chunks; kept outputs equal those of the graph."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from qualms.bundle.embedded import resolve_model
from qualms.bundle.file import Bundle, open_bundle
from qualms.bundle.runtime import GraphRunner, Outputs
from qualms.images.encodings import parse_encoding
from qualms.images.fingerprints import fingerprints
from qualms_training.console import Display
from qualms_training.data.dataset import Images, Selection
from qualms_training.reporting.breakdown import MIN_BY_ENCODING, affordable
from qualms_training.reporting.evaluation import run_graph, uncertainties
from qualms_training.reporting.graph_runs import (
    CHUNK,
    EvaluationRunner,
    pixel_fingerprints,
    prefetched,
    stored_fingerprints,
)


class Counting:
    """A graph that records how many images it ran on."""

    def __init__(self, runner: GraphRunner) -> None:
        self._runner, self.sizes = runner, list[int]()

    def __call__(self, images: NDArray[np.uint8], /) -> Outputs:
        self.sizes.append(len(images))
        return self._runner(images)


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    return open_bundle(resolve_model("demo"))


@pytest.fixture
def graph(bundle: Bundle) -> Counting:
    return Counting(GraphRunner(bundle.graph))


def pixels(count: int, bundle: Bundle, seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (count, *bundle.manifest.input.shape), dtype=np.uint8)


def selection(count: int, bundle: Bundle) -> Selection:
    return Selection(Images("noise", "test", pixels(count, bundle)), np.arange(count)[::-1].copy())


def ignore(_: int) -> None:
    """Progress that is not shown."""


def test_images_are_run_in_chunks_and_have_the_outputs_of_the_graph(bundle: Bundle, graph: Counting) -> None:
    images, done = pixels(CHUNK + 20, bundle), list[int]()
    outputs = EvaluationRunner(graph, bundle.manifest).with_probabilities(images, done.append)
    assert graph.sizes == done == [CHUNK, 20]
    direct = GraphRunner(bundle.graph)(images)
    for name in ("prediction", "probabilities", "base_probabilities", *bundle.manifest.scores):
        np.testing.assert_array_equal(outputs[name], direct[name])
    assert "alpha" not in outputs
    for name, values in uncertainties(direct, bundle.manifest).items():
        np.testing.assert_array_equal(uncertainties(outputs, bundle.manifest)[name], values)


def test_an_image_that_was_run_is_not_run_again(bundle: Bundle, graph: Counting) -> None:
    runner, images = EvaluationRunner(graph, bundle.manifest), pixels(30, bundle)
    first = runner.with_probabilities(images)
    some = np.array([7, 3, 7, 29])
    again = runner.scores(np.concatenate([images[some], pixels(2, bundle, seed=1), images[:1]]))
    assert graph.sizes == [30, 2]
    assert (runner.images, runner.seconds > 0) == (32, True)
    rows = [*some, 0]
    for name in ("prediction", *bundle.manifest.scores):
        np.testing.assert_array_equal(np.delete(again[name], [4, 5]), first[name][rows])
    assert "probabilities" not in again


def test_an_image_that_is_repeated_in_a_set_is_run_once(bundle: Bundle, graph: Counting) -> None:
    images = pixels(4, bundle)
    outputs = EvaluationRunner(graph, bundle.manifest).scores(images[[0, 1, 0, 2, 2, 3]])
    assert graph.sizes == [4]
    expected = GraphRunner(bundle.graph)(images)["fused"][[0, 1, 0, 2, 2, 3]]
    np.testing.assert_allclose(outputs["fused"], expected, rtol=1e-5)


def test_images_sent_without_losses_are_not_run_again(bundle: Bundle, graph: Counting) -> None:
    runner, stored = EvaluationRunner(graph, bundle.manifest), selection(12, bundle)
    before = runner.scores(stored.conformed(bundle.manifest.input))
    outputs, observed = runner.received(stored, parse_encoding("png"), 1, ignore)
    assert graph.sizes == [12]
    assert len(observed) == 12
    np.testing.assert_array_equal(outputs["fused"], before["fused"])
    runner.received(stored, parse_encoding("jpeg:50"), 1, ignore)
    assert graph.sizes == [12, 12]


def test_the_control_set_made_of_test_images_is_not_run_again(
    bundle: Bundle, graph: Counting, display: Display
) -> None:
    images = pixels(20, bundle)
    run_graph(EvaluationRunner(graph, bundle.manifest), images, {"x (itself)": images[::2]}, display)
    assert graph.sizes == [20]


def test_a_transfer_model_has_no_scores_of_its_base(bundle: Bundle, graph: Counting) -> None:
    manifest = bundle.manifest.model_copy(update={"prediction": "meta"})
    outputs = EvaluationRunner(graph, manifest).with_probabilities(pixels(3, bundle))
    assert not {"base_entropy", "base_max_probability", "base_probabilities"} & set(outputs)


def test_fingerprints_by_chunk_equal_those_of_all_images(bundle: Bundle) -> None:
    images = pixels(CHUNK + 3, bundle)
    np.testing.assert_array_equal(pixel_fingerprints(images), fingerprints(images))
    stored = selection(CHUNK + 3, bundle)
    expected = fingerprints(stored.conformed(bundle.manifest.input))
    np.testing.assert_array_equal(stored_fingerprints(stored, bundle.manifest.input), expected)


def test_chunks_are_made_in_order_and_an_error_in_one_is_raised() -> None:
    assert list(prefetched(lambda part: (part.start, part.stop), 2 * CHUNK + 1)) == [
        (0, CHUNK),
        (CHUNK, 2 * CHUNK),
        (2 * CHUNK, 2 * CHUNK + 1),
    ]
    assert list(prefetched(lambda part: part, 0)) == []

    def fail(part: slice) -> Any:
        raise ValueError(str(part.start))

    with pytest.raises(ValueError, match="^0$"):
        list(prefetched(fail, 10))


def test_a_slow_graph_runs_on_as_many_images_by_encoding_as_the_time_allows(bundle: Bundle, graph: Counting) -> None:
    times = iter(range(100))
    runner = EvaluationRunner(graph, bundle.manifest, clock=lambda: float(next(times)))
    runner.scores(pixels(100, bundle))  # 100 images in 1 second
    assert affordable(runner, 780, encodings=13, sets=5) == 780 * 100 / (13 * 1.5)
    assert affordable(runner, 1, encodings=13, sets=5) == MIN_BY_ENCODING
