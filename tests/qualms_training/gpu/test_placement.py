"""The prediction of GPU placement: each rule on a small graph that breaks it."""

import numpy as np
import onnx
import pytest
from onnx import helper
from tests.qualms_training.gpu.small_graphs import CASES, FLOAT, NEWEST_WITHOUT, Case, model, node

from qualms_training.errors import ExportError
from qualms_training.gpu import kernels
from qualms_training.gpu.placement import optimise, place, read_graph


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_nodes_on_the_cpu(case: Case) -> None:
    placement = place(read_graph(case.graph), kernels.of_release(case.release))
    assert tuple(node.operator for node in placement.without_kernel) == case.without_kernel
    assert tuple(node.operator for node in placement.cpu_preferred) == case.moved
    assert placement.runs_on_cuda_alone == (not case.without_kernel and not case.moved)
    assert placement.nodes == len(onnx.load_from_string(case.graph).graph.node)


def test_nodes_of_the_same_operator_version_and_types_share_a_kernel() -> None:
    data = model(node("Relu", "x", "a"), node("Relu", "a", "b"), node("Neg", "b", "y"))
    assert place(read_graph(data), kernels.of_release(NEWEST_WITHOUT)).kernels == 2


def test_types_versions_and_constants_of_a_graph() -> None:
    data = model(
        node("Constant", "", "axes", value_ints=[1]),
        node("ReduceSum", "x axes", "total"),
        node("Cast", "total", "y", to=onnx.TensorProto.DOUBLE),
        output=onnx.TensorProto.DOUBLE,
        unused=np.zeros(101),
    )
    graph = read_graph(data)
    assert [str(each) for each in graph.nodes] == ["ReduceSum-13 (total)", "Cast-13 (y)"]
    assert graph.nodes[0].types["T"] == "float"
    assert (graph.nodes[1].types["T1"], graph.nodes[1].types["T2"]) == ("float", "double")
    assert graph.inputs == {"x"}
    assert graph.small_initialisers == {"axes"}


def test_basic_optimisation_folds_constants_as_onnx_runtime_does_before_placement() -> None:
    data = model(
        node("Shape", "table", "shape"), node("Gather", "shape first", "rows"), node("Cast", "rows", "count", to=FLOAT),
        node("Mul", "x count", "y"), table=np.zeros((7, 6), np.float32), first=np.int64(0),
    )  # fmt: skip
    release = kernels.of_release(NEWEST_WITHOUT)
    assert not place(read_graph(data), release).runs_on_cuda_alone
    assert [each.operator for each in read_graph(optimise(data)).nodes] == ["Mul"]
    assert place(read_graph(optimise(data)), release).runs_on_cuda_alone


def test_an_unknown_operator_is_an_error_that_names_it() -> None:
    made = onnx.load_from_string(model(node("Relu", "x", "y")))
    made.graph.node[0].domain = "com.example"
    made.opset_import.append(helper.make_opsetid("com.example", 1))
    with pytest.raises(ExportError, match=r"^The graph's operator com\.example:Relu is not known\.$"):
        read_graph(made.SerializeToString())
