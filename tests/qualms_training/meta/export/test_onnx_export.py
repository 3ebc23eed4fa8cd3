"""The exported graph agrees with PyTorch, and a graph that does not is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import pytest
import torch
from numpy.typing import NDArray
from onnx import numpy_helper
from torch import Tensor, nn

import qualms_training
from qualms.bundle.runtime import GraphRunner
from qualms_training.errors import ExportError
from qualms_training.meta.export.graph_comparison import compare
from qualms_training.meta.export.onnx_export import export_graph, to_onnx
from qualms_training.meta.graph import BaseGraph, BundleGraph

pytestmark = pytest.mark.slow


class Exported(NamedTuple):
    graph: BundleGraph
    data: bytes
    differences: dict[str, float]
    images: NDArray[np.uint8]
    classes: int


@pytest.fixture(scope="module", params=["pooled, base predicts", "published, meta-model predicts"])
def exported(request: pytest.FixtureRequest) -> Exported:
    pooled = request.param.startswith("pooled")
    make = request.getfixturevalue("pooled_graph" if pooled else "published_graph")
    graph: BundleGraph = make("base" if pooled else "meta")
    shape, classes = ((16, 16, 3), 4) if pooled else ((32, 32, 1), 10)
    images = np.random.default_rng(0).integers(0, 256, (40, *shape), dtype=np.uint8)
    data, differences = export_graph(graph, images)
    return Exported(graph, data, differences, images, classes)


def by_torch(exported: Exported, images: NDArray[np.uint8]) -> dict[str, Tensor]:
    with torch.inference_mode():
        return exported.graph.named(torch.from_numpy(images))


@pytest.mark.parametrize("n", [1, 5, 40])
def test_onnx_runtime_agrees_with_torch_for_every_batch_size(exported: Exported, n: int) -> None:
    outputs = GraphRunner(exported.data)(exported.images[:n])
    for name, expected in by_torch(exported, exported.images[:n]).items():
        assert outputs[name].shape == tuple(expected.shape)
        np.testing.assert_allclose(outputs[name], expected, rtol=1e-4, atol=1e-5, err_msg=name)


def test_outputs_have_the_documented_names_types_and_shapes(exported: Exported) -> None:
    session = GraphRunner(exported.data).session
    (given,) = session.get_inputs()
    height, width, channels = exported.images.shape[1:]
    assert (given.name, given.type) == ("image", "tensor(uint8)")
    assert isinstance(given.shape[0], str)  # symbolic: any number of images
    assert given.shape[1:] == [height, width, channels]
    assert [output.name for output in session.get_outputs()] == list(exported.graph.outputs)
    vectors = dict.fromkeys(("base_probabilities", "probabilities", "alpha", "meta_alpha"), exported.classes)
    vectors["fused_terms"] = len(exported.graph.flag_score.names)
    for output in session.get_outputs():
        assert output.type == ("tensor(int64)" if output.name == "prediction" else "tensor(float)")
        assert output.shape[1:] == ([vectors[output.name]] if output.name in vectors else [])


def test_differences_are_reported_and_small(exported: Exported) -> None:
    assert set(exported.differences) == {"log_alpha", *exported.graph.outputs}
    assert exported.differences["prediction"] == 0
    assert max(exported.differences.values()) < 1e-4


def test_the_prediction_is_that_of_the_chosen_predictor(exported: Exported) -> None:
    outputs = GraphRunner(exported.data)(exported.images)
    source = "base_probabilities" if exported.graph.predicts_by == "base" else "meta_alpha"
    np.testing.assert_array_equal(outputs["prediction"], outputs[source].argmax(axis=1))
    np.testing.assert_array_equal(outputs["prediction"], outputs["alpha"].argmax(axis=1))
    assert (outputs["base_probabilities"].argmax(axis=1) != outputs["meta_alpha"].argmax(axis=1)).any()


def test_base_probabilities_are_the_softmax_of_the_base(exported: Exported) -> None:
    extractor = exported.graph.extractor
    with torch.inference_mode():
        logits = extractor.tapped.base(extractor.normalise(torch.from_numpy(exported.images)))
        prediction, probabilities = BaseGraph(extractor)(torch.from_numpy(exported.images))
    outputs = GraphRunner(exported.data)(exported.images)
    np.testing.assert_allclose(outputs["base_probabilities"], logits.softmax(dim=1), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(probabilities, logits.softmax(dim=1), rtol=1e-6)
    np.testing.assert_array_equal(prediction, logits.argmax(dim=1))


def test_outputs_of_an_image_do_not_depend_on_the_rest_of_the_batch(exported: Exported) -> None:
    runner = GraphRunner(exported.data)
    together = runner(exported.images[:6])
    alone = [runner(exported.images[row : row + 1]) for row in range(6)]
    for name in exported.graph.outputs:
        stacked = np.concatenate([one[name] for one in alone])
        np.testing.assert_allclose(stacked, together[name], rtol=1e-4, atol=1e-6, err_msg=name)


def test_the_file_contains_no_notes_of_the_exporter(exported: Exported) -> None:
    model = onnx.load_from_string(exported.data)
    onnx.checker.check_model(model)
    assert {node.domain for node in model.graph.node} <= {"", "ai.onnx"}
    assert not model.metadata_props
    assert not any(node.doc_string or node.metadata_props for node in model.graph.node)
    here = Path(qualms_training.__file__).parent.parent
    for trace in (str(here), ".py", "site-packages", "Traceback"):
        assert trace.encode() not in exported.data, trace


Tamper = Callable[[Any], None]


def change_a_weight(model: Any) -> None:
    """Add a constant to the bias of the meta-model's last layer, which changes no prediction."""
    for tensor in model.graph.initializer:
        if tensor.name.endswith("combine.bias"):
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) + np.float32(0.01), tensor.name))
            return
    raise AssertionError("the graph has no such bias")


def output_of(model: Any, name: str) -> tuple[Any, int]:
    """The node that computes an output, and the index among the node's outputs."""
    for node in model.graph.node:
        if name in node.output:
            return node, list(node.output).index(name)
    raise AssertionError(f"no node computes {name}")


def swap(first: str, second: str) -> Tamper:
    def tamper(model: Any) -> None:
        (one, i), (other, j) = output_of(model, first), output_of(model, second)
        one.output[i], other.output[j] = second, first

    return tamper


def rename_an_output(model: Any) -> None:
    node, index = output_of(model, "entropy")
    node.output[index] = "enthalpy"
    for output in model.graph.output:
        if output.name == "entropy":
            output.name = "enthalpy"


def append_operator(name: str, operator: str, *inputs: Any) -> Tamper:
    """Apply one more operator to an output."""

    def tamper(model: Any) -> None:
        node, index = output_of(model, name)
        node.output[index] = "before"
        given = ["before"]
        for position, value in enumerate(inputs):
            model.graph.initializer.append(numpy_helper.from_array(value, f"extra{position}"))
            given.append(f"extra{position}")
        model.graph.node.append(onnx.helper.make_node(operator, given, [name]))

    return tamper


@pytest.mark.parametrize(
    ("tamper", "message"),
    [
        (change_a_weight, "log α by|fused_terms by|meta_alpha by"),
        (swap("entropy", "mutual_information"), "entropy|mutual_information"),
        (append_operator("expected_entropy", "Mul", np.float32(1.01)), "expected_entropy"),
        (append_operator("precision", "Log"), "precision"),
        (append_operator("mutual_information", "Mul", np.float32("nan")), "mutual_information by inf"),
        (append_operator("alpha", "Neg"), "log α by inf"),
        (append_operator("prediction", "Sub", np.int64(1)), "40 of 40 predictions"),
        (rename_an_output, "has no output entropy"),
    ],
    ids=["weight", "swapped", "scaled", "logarithm", "NaN", "negative α", "classes", "renamed"],
)
def test_a_graph_that_differs_from_torch_is_refused(tamper: Tamper, message: str, exported: Exported) -> None:
    model = onnx.load_from_string(exported.data)
    tamper(model)
    with pytest.raises(ExportError, match=message):
        compare(exported.graph, GraphRunner(model.SerializeToString()), exported.images)


def test_an_unchanged_graph_passes_the_comparison(exported: Exported) -> None:
    again = onnx.load_from_string(exported.data).SerializeToString()
    assert compare(exported.graph, GraphRunner(again), exported.images) == exported.differences


class CannotBeExported(nn.Module):
    def forward(self, image: Tensor) -> Tensor:
        if image.float().mean() > 100:
            return image.float().mean((1, 2, 3))
        inner: Tensor = torch.special.i1(image.float())
        return inner.mean((1, 2, 3))


def test_the_error_for_a_model_that_torch_cannot_export_is_one_sentence(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(
        ExportError, match=r"PyTorch cannot export this model \(.*data-dependent.*torch\.where"
    ) as caught:
        to_onnx(CannotBeExported(), np.zeros((2, 4, 4, 3), np.uint8), ["value"])
    assert not set("\n\x1b") & set(str(caught.value))
    assert "def forward" not in "".join(capfd.readouterr())


def test_weights_that_do_not_fit_in_one_file_are_refused_before_the_export() -> None:
    with torch.device("meta"):
        module = nn.Linear(30_000, 20_000)
    with pytest.raises(ExportError, match=r"would have 2\.40 GB of weights; an ONNX file has at most 2\.13 GB"):
        to_onnx(module, np.zeros((2, 4), np.float32), ["value"])
