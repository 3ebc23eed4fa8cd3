"""Predict where ONNX Runtime places the nodes of a graph that is opened with CUDA.

A node runs on the CPU if it has no CUDA kernel, or if it belongs to a computation on shapes: ONNX Runtime moves nodes that
depend only on small tensors in the CPU's memory to the CPU. One such node is enough that a session with
`session.disable_cpu_ep_fallback`, which `QUALMS_DEVICE=cuda` sets, is refused.

`cpu_preferred` follows GetCpuPreferredNodes in core/framework/fallback_cpu_capability.cc of ONNX Runtime, which the CUDA
provider calls after it has looked up the kernels (GetCapability in core/providers/cuda/cuda_execution_provider.cc).
"""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from qualms.bundle.runtime import onnxruntime
from qualms.errors import first_line
from qualms_training.errors import ExportError
from qualms_training.gpu.kernels import Kernels

SMALL = 100
"""elements of an initialiser up to which it does not keep a node on the GPU (kSmallInitializerThreshold)"""
HALF_TYPES = {"float16", "bfloat16", "float8e4m3fn", "float8e4m3fnuz", "float8e5m2", "float8e5m2fnuz"}
"""a node with such an input is not moved to the CPU"""


@dataclass(frozen=True)
class Node:
    """One operator of a graph."""

    name: str
    operator: str
    version: int
    """the version of the operator that the graph's opset selects"""
    types: Mapping[str, str]
    """element type by type constraint and by parameter of the operator; kernels are registered with either"""
    inputs: tuple[str, ...]
    input_types: tuple[str, ...]
    outputs: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.operator}-{self.version} ({self.name})"


@dataclass(frozen=True)
class Graph:
    """The nodes of a graph in topological order, and the tensors that no node computes."""

    nodes: tuple[Node, ...]
    inputs: frozenset[str]
    small_initialisers: frozenset[str]


@dataclass(frozen=True)
class Placement:
    """Where a release of onnxruntime-gpu runs the nodes of a graph."""

    nodes: int
    kernels: int
    """number of different CUDA kernels"""
    without_kernel: tuple[Node, ...]
    cpu_preferred: tuple[Node, ...]
    """nodes that have a CUDA kernel and are placed on the CPU nevertheless"""

    @property
    def runs_on_cuda_alone(self) -> bool:
        """Whether a session that may not use the CPU is opened."""
        return not self.without_kernel and not self.cpu_preferred


def place(graph: Graph, kernels: Kernels) -> Placement:
    """Predict the placement of a graph by one release."""
    found = [kernels.find(node.operator, node.version, node.types) for node in graph.nodes]
    on_cuda = [node for node, kernel in zip(graph.nodes, found, strict=True) if kernel is not None]
    without = tuple(node for node, kernel in zip(graph.nodes, found, strict=True) if kernel is None)
    return Placement(
        len(graph.nodes),
        len({id(kernel) for kernel in found if kernel}),
        without,
        cpu_preferred(graph, on_cuda, kernels),
    )


def cpu_preferred(graph: Graph, on_cuda: Sequence[Node], kernels: Kernels) -> tuple[Node, ...]:
    """Those of the nodes with a CUDA kernel that ONNX Runtime moves to the CPU."""
    has_kernel = {node.name for node in on_cuda}
    on_cpu: set[str] = set()
    """tensors in the CPU's memory"""
    moved: list[Node] = []
    for node in on_cuda:
        on_cpu |= {
            node.outputs[index] for index in kernels.outputs_on_cpu.get(node.operator, ()) if index < len(node.outputs)
        }
    for node in graph.nodes:
        if not on_cpu & set(node.inputs):
            continue
        if node.name not in has_kernel:
            on_cpu |= set(node.outputs)
        elif all(_allows_cpu(graph, node, index, on_cpu, kernels) for index in range(len(node.inputs))):
            on_cpu |= set(node.outputs)
            moved.append(node)
    return tuple(moved)


def _allows_cpu(graph: Graph, node: Node, index: int, on_cpu: set[str], kernels: Kernels) -> bool:
    """Whether this input lets the node be moved to the CPU; an omitted optional input, whose name is empty, does not."""
    name = node.inputs[index]
    if node.input_types[index] in HALF_TYPES:
        return False
    if name in graph.small_initialisers or name in graph.inputs:
        return True
    return name in on_cpu and index not in kernels.inputs_on_cpu.get(node.operator, ())


def read_graph(data: bytes) -> Graph:
    """The nodes of an ONNX file with their types; its Constant nodes are initialisers, as in ONNX Runtime."""
    model = onnx.shape_inference.infer_shapes(onnx.load_from_string(data))
    graph = model.graph
    opsets = {entry.domain: entry.version for entry in model.opset_import}
    constants = {
        node.output[0]: onnx.numpy_helper.to_array(_value(node)) for node in graph.node if node.op_type == "Constant"
    }
    sizes = {name: value.size for name, value in constants.items()}
    sizes |= {tensor.name: int(np.prod(tensor.dims)) for tensor in graph.initializer}
    types = {value.name: value.type.tensor_type.elem_type for value in (*graph.input, *graph.value_info, *graph.output)}
    types |= {tensor.name: tensor.data_type for tensor in graph.initializer}
    types |= {name: onnx.helper.np_dtype_to_tensor_dtype(value.dtype) for name, value in constants.items()}
    names = {name: _type_name(number) for name, number in types.items()}
    nodes = [node for node in graph.node if node.op_type != "Constant"]
    return Graph(
        tuple(_node(number, node, opsets, names) for number, node in enumerate(nodes)),
        frozenset(value.name for value in graph.input) - sizes.keys(),
        frozenset(name for name, size in sizes.items() if size <= SMALL),
    )


def _value(node: Any) -> Any:
    """The tensor of a Constant node."""
    (attribute,) = node.attribute
    if attribute.name == "value":
        return attribute.t
    value = onnx.helper.get_attribute_value(attribute)
    dtype = np.int64 if attribute.name in ("value_int", "value_ints") else np.float32
    return onnx.numpy_helper.from_array(np.array(value, dtype))


def _type_name(number: int) -> str:
    """ONNX Runtime's name of an element type."""
    return str(onnx.TensorProto.DataType.Name(number)).lower()


def _node(number: int, node: Any, opsets: Mapping[str, int], types: Mapping[str, str]) -> Node:
    domain = "" if node.domain == "ai.onnx" else node.domain
    try:
        schema = onnx.defs.get_schema(node.op_type, opsets[domain], domain)
    except (KeyError, onnx.defs.SchemaError) as error:
        raise ExportError(f"The graph's operator {domain}:{node.op_type} is not known.") from error
    by_constraint: dict[str, str] = {}
    for names, formal in ((node.input, schema.inputs), (node.output, schema.outputs)):
        for index, name in enumerate(names):
            if not name:
                continue
            if name not in types:
                raise ExportError(f"The type of {name}, a tensor of the graph, cannot be inferred.")
            parameter = formal[min(index, len(formal) - 1)]  # the last one may be variadic
            by_constraint |= {parameter.type_str: types[name], parameter.name: types[name]}
    return Node(
        node.name or f"{node.op_type}_{number}",
        node.op_type if not domain else f"{domain}:{node.op_type}",
        schema.since_version,
        by_constraint,
        tuple(node.input),
        tuple(types.get(name, "") for name in node.input),
        tuple(node.output),
    )


def optimise(data: bytes) -> bytes:
    """The graph after ONNX Runtime's basic optimisations, which it applies before it places nodes.

    The session that makes it is one for the CPU, in which nodes of half precision become float32.
    """
    ort = onnxruntime()
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.log_severity_level = 3
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "optimised.onnx"
        options.optimized_model_filepath = str(file)
        try:
            ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # the errors of ONNX Runtime have no common base class
            raise ExportError(f"ONNX Runtime cannot load the graph: {first_line(error)}.") from error
        return file.read_bytes()
