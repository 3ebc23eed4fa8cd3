"""Small graphs that break one rule of GPU placement each, with the nodes that are expected on the CPU."""

from typing import Any, NamedTuple

import numpy as np
from onnx import TensorProto, helper, numpy_helper

FLOAT, DOUBLE, HALF, INT64 = TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.INT64
NEWEST_WITHOUT, FIRST_WITH = "1.26.0", "1.27.0"
"""releases without and with kernels of Equal-19, ReduceMax-20 and ReduceMin-20"""


class Case(NamedTuple):
    """A graph, and the operators that `release` places on the CPU."""

    graph: bytes
    without_kernel: tuple[str, ...]
    moved: tuple[str, ...]
    release: str


def node(operator: str, inputs: str, output: str, **attributes: Any) -> Any:
    """A node whose inputs are named by one string; '-' is an omitted one."""
    names = ["" if name == "-" else name for name in inputs.split()]
    return helper.make_node(operator, names, [output], name=output, **attributes)


def model(*nodes: Any, opset: int = 18, element: int = FLOAT, output: int | None = None, **constants: Any) -> bytes:
    """x (N, 6) through `nodes`, the last of which computes the output."""
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info("x", element, ["n", 6])],
        [helper.make_tensor_value_info(nodes[-1].output[0], element if output is None else output, None)],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    return bytes(made.SerializeToString())


ROW: dict[str, Any] = {"first": np.int64(0), "rest": np.array([6]), "axis": np.array([0])}
SHAPE_OF_X = (
    node("Shape", "x", "shape"),
    node("Gather", "shape first", "rows"),
    node("Unsqueeze", "rows axis", "row"),
    node("Concat", "row rest", "sizes", axis=0),
)


def reduce_max(opset: int) -> bytes:
    return model(node("ReduceMax", "x axes", "y", keepdims=1), opset=opset, axes=np.array([1]))


CASES = {
    "no node": Case(reduce_max(18), (), (), NEWEST_WITHOUT),
    "ReduceMax of opset 20": Case(reduce_max(20), ("ReduceMax",), (), NEWEST_WITHOUT),
    "ReduceMax of opset 20 in a later release": Case(reduce_max(20), (), (), FIRST_WITH),
    "float64 without a kernel": Case(
        model(
            *(node("Reshape", "x image", "pixels"), node("Reshape", "x points", "grid")),
            node("GridSample", "pixels grid", "y"),
            element=DOUBLE,
            image=np.array([-1, 1, 2, 3]),
            points=np.array([-1, 1, 3, 2]),
        ),
        ("GridSample",),
        (),
        NEWEST_WITHOUT,
    ),
    "a shape that is computed": Case(
        model(*SHAPE_OF_X, node("Reshape", "x sizes", "y"), **ROW),
        (),
        ("Gather", "Unsqueeze", "Concat"),
        NEWEST_WITHOUT,
    ),
    "indices that are computed": Case(
        model(
            *(
                node("Shape", "x", "shape"),
                node("Gather", "shape first", "rows"),
                node("Range", "first rows one", "range"),
            ),
            node("Gather", "x range", "y", axis=0),
            first=np.int64(0),
            one=np.int64(1),
        ),
        (),
        ("Gather",),  # Range reads the CPU's memory, and its own output is on the GPU
        NEWEST_WITHOUT,
    ),
    "a shape that is only copied": Case(
        model(node("Shape", "x", "shape"), node("Reshape", "x shape", "y")), (), (), NEWEST_WITHOUT
    ),
    "a large constant": Case(
        model(
            *(
                node("Shape", "x", "shape"),
                node("Cast", "shape", "sizes", to=FLOAT),
                node("Concat", "sizes large", "y", axis=0),
            ),
            large=np.zeros(101, np.float32),
        ),
        (),
        ("Cast",),
        NEWEST_WITHOUT,
    ),
    "a constant of 100 elements": Case(
        model(
            *(
                node("Shape", "x", "shape"),
                node("Cast", "shape", "sizes", to=FLOAT),
                node("Concat", "sizes small", "y", axis=0),
            ),
            small=np.zeros(100, np.float32),
        ),
        (),
        ("Cast", "Concat"),
        NEWEST_WITHOUT,
    ),
    "half precision": Case(
        model(
            *(node("Shape", "x", "shape"), node("Cast", "shape", "half", to=HALF), node("Add", "half half", "sum")),
            node("Cast", "sum", "y", to=FLOAT),
        ),
        (),
        ("Cast",),
        NEWEST_WITHOUT,
    ),
    "an omitted input": Case(
        model(*(node("Shape", "x", "shape"), node("Clip", "shape - most", "y")), output=INT64, most=np.int64(5)),
        (),
        (),
        NEWEST_WITHOUT,
    ),
    "an input of the graph": Case(
        model(
            *(
                node("Shape", "x", "shape"),
                node("Gather", "shape first", "rows"),
                node("Cast", "rows", "count", to=FLOAT),
            ),
            node("Div", "x count", "y"),
            first=np.int64(0),
        ),
        (),
        ("Gather", "Cast", "Div"),
        NEWEST_WITHOUT,
    ),
    "after a node without a kernel": Case(
        model(
            *(
                node("Shape", "x", "shape"),
                node("ReduceMax", "shape axes", "most"),
                node("Cast", "most", "y", to=FLOAT),
            ),
            opset=20,
            axes=np.array([0]),
        ),
        ("ReduceMax",),
        ("Cast",),
        NEWEST_WITHOUT,
    ),
}
