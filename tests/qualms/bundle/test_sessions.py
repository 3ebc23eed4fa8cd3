"""Sessions whose memory is bounded."""

from collections.abc import Callable
from typing import Any

import numpy as np
import onnxruntime
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from qualms.bundle.runtime import GraphRunner
from qualms.bundle.sessions import FOLDING_BYTES, failure, is_out_of_memory, open_session
from qualms.errors import BundleError

LIMIT = 32 * 2**20
FOLDING_KEY = "optimization.constant_folding_max_output_size_in_bytes"


def integers(name: str, *values: int) -> TensorProto:
    return numpy_helper.from_array(np.array(values, np.int64), name)


def graph_of(nodes: list[Any], initializers: list[Any]) -> bytes:
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("Cast", ["image"], ["pixels"], to=TensorProto.FLOAT), *nodes],
        "one",
        [value("image", TensorProto.UINT8, ["N", 6, 5, 3])],
        [value("out", TensorProto.FLOAT, None)],
        initializers,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return bytes(model.SerializeToString())


def expanding(elements: int) -> bytes:
    """A graph whose run needs this many float32 values."""
    nodes = [
        helper.make_node("ReduceSum", ["pixels"], ["sum"], keepdims=0),
        helper.make_node("Expand", ["sum", "shape"], ["large"]),
        helper.make_node("ReduceMax", ["large"], ["out"], keepdims=1),
    ]
    return graph_of(nodes, [integers("shape", elements)])


def one_image() -> NDArray[np.uint8]:
    return np.ones((1, 6, 5, 3), np.uint8)


def folding_limit(graph: bytes) -> int:
    options = onnxruntime.SessionOptions()
    open_session(onnxruntime, graph, options, ["CPUExecutionProvider"])
    return int(options.get_session_config_entry(FOLDING_KEY))


def test_a_run_beyond_the_memory_limit_is_a_bundle_error() -> None:
    runner = GraphRunner(expanding(10**9), threads=1, max_memory=LIMIT)
    with pytest.raises(BundleError) as caught:
        runner(one_image())
    assert str(caught.value) == (
        "The graph cannot be run on 1 images: it needs more than the 33,554,432 bytes of memory that it may take."
    )


def test_each_session_has_a_limit_of_its_own() -> None:
    graph, images = expanding(10 * 2**20), one_image()
    small, large = (GraphRunner(graph, threads=1, max_memory=limit) for limit in (LIMIT, 4 * LIMIT))
    with pytest.raises(BundleError, match="33,554,432 bytes"):
        small(images)
    assert large(images)["out"] == [90]
    assert GraphRunner(expanding(2**20), threads=1, max_memory=LIMIT)(images)["out"] == [90]


def test_outputs_do_not_depend_on_the_memory_limit(
    graph: bytes, runner: GraphRunner, draw_images: Callable[[int, int], NDArray[np.uint8]]
) -> None:
    images = draw_images(0, 5)
    limited = GraphRunner(graph, threads=1, max_memory=LIMIT)(images)
    for name, values in runner(images).items():
        np.testing.assert_array_equal(limited[name], values)


def test_other_errors_are_reported_as_they_are() -> None:
    error = RuntimeError("Something else.\nDetails")
    assert not is_out_of_memory(error)
    assert failure(error, LIMIT) == "Something else"


# Constants that are computed at load


def constants(count: int) -> list[Any]:
    return [helper.make_node("Neg", ["one"], [f"c{index}"]) for index in range(count)]


ONE = numpy_helper.from_array(np.ones(1, np.float32), "one")
OUT = helper.make_node("Add", ["pixels", "one"], ["out"])


@pytest.mark.parametrize("count", [1, 7])
def test_all_folded_constants_share_one_limit(count: int) -> None:
    assert folding_limit(graph_of([*constants(count), OUT], [ONE])) == FOLDING_BYTES // count


def test_nodes_that_depend_on_the_image_do_not_count(graph: bytes) -> None:
    assert folding_limit(graph_of([OUT], [ONE])) == FOLDING_BYTES
    assert folding_limit(graph) == FOLDING_BYTES


def test_shapes_and_what_follows_from_them_count() -> None:
    nodes = [
        helper.make_node("Shape", ["pixels"], ["shape"], start=1),
        helper.make_node("Neg", ["shape"], ["negative"]),
        OUT,
    ]
    assert folding_limit(graph_of(nodes, [ONE])) == FOLDING_BYTES // 2


def test_nodes_of_subgraphs_count() -> None:
    branch = helper.make_graph(
        [helper.make_node("Neg", ["pixels"], ["inner"])],
        "branch",
        [],
        [helper.make_tensor_value_info("inner", TensorProto.FLOAT, None)],
    )
    nodes = [
        helper.make_node("ReduceSum", ["pixels"], ["sum"], keepdims=0),
        helper.make_node("Cast", ["sum"], ["condition"], to=TensorProto.BOOL),
        helper.make_node("If", ["condition"], ["out"], then_branch=branch, else_branch=branch),
    ]
    assert folding_limit(graph_of(nodes, [])) == FOLDING_BYTES // 2


def test_bytes_are_always_read_as_an_onnx_model(graph: bytes) -> None:
    options = onnxruntime.SessionOptions()
    open_session(onnxruntime, graph, options, ["CPUExecutionProvider"])
    assert options.get_session_config_entry("session.load_model_format") == "ONNX"
