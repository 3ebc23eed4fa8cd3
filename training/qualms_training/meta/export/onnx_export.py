"""Export a graph to ONNX; `graph_comparison` checks that ONNX Runtime computes the same."""

import logging
import re
import warnings
from collections.abc import Sequence
from contextlib import redirect_stderr
from io import StringIO
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from onnxscript import ir, opset18
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from qualms.bundle.runtime import INPUT, GraphRunner, Images
from qualms.errors import first_line
from qualms_training.errors import ExportError
from qualms_training.meta.export.graph_comparison import compare
from qualms_training.meta.export.onnx_translations import TRANSLATIONS
from qualms_training.meta.graph import BundleGraph

OPSET = 18
"""the newest with CUDA kernels for all our operators in every ONNX Runtime that pyproject.toml accepts"""
op: Any = opset18  # its operators take values of the exporter, which are not what their annotations name
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
MAX_BYTES = 2**31 - 2**24
"""weights of a graph: a protobuf file has at most 2 GiB, of which nodes and the manifest take a few megabytes"""


def to_onnx(module: nn.Module, example: NDArray[Any], outputs: Sequence[str]) -> bytes:
    """An ONNX model of `module` with a dynamic batch size.

    `example` (N ≥ 2, ...) fixes the type and shape of the only input, which is named INPUT so that GraphRunner accepts
    the model; `outputs` are the names of the outputs.
    """
    _check_size(module)
    module = module.cpu().eval()
    enabled = logging.root.manager.disable
    try:
        logging.disable(
            logging.CRITICAL
        )  # messages for the exporter's developers; if it fails, it prints the whole graph
        # Fused kernels of attention cannot be decomposed for all shapes.
        with warnings.catch_warnings(), redirect_stderr(StringIO()), sdpa_kernel(SDPBackend.MATH):
            warnings.simplefilter("ignore")
            program = torch.onnx.export(
                module,
                (torch.from_numpy(example),),
                dynamo=True,
                verbose=False,
                opset_version=OPSET,
                input_names=[INPUT],
                output_names=list(outputs),
                dynamic_shapes=({0: torch.export.Dim("batch", min=1)},),
                custom_translation_table={
                    torch.ops.aten.adaptive_avg_pool2d.default: _adaptive_average_pool,
                    **TRANSLATIONS,
                },
            )
    except Exception as error:
        raise ExportError(
            f"PyTorch cannot export this model ({_reason(error)}): its forward must consist of PyTorch operations on tensors, "
            "without NumPy, branches on values (use torch.where) and quantised layers."
        ) from error
    finally:
        logging.disable(enabled)
    assert program is not None
    model = program.model_proto
    del program  # it has another copy of the weights
    strip_debug_notes(model)
    return bytes(model.SerializeToString())


def _reason(error: Exception) -> str:
    """The first line of the innermost cause, which is the exporter's reason; its own message lists steps to debug it."""
    while isinstance(error.__cause__, Exception):
        error = error.__cause__
    return f"{type(error).__name__}: {_COLOURS.sub('', first_line(error)).rstrip('.')}"


def _check_size(module: nn.Module) -> None:
    """ExportError if the weights do not fit in one ONNX file."""
    size = sum(tensor.numel() * tensor.element_size() for tensor in (*module.parameters(), *module.buffers()))
    if size > MAX_BYTES:
        raise ExportError(
            f"The graph would have {size / 1e9:.2f} GB of weights; an ONNX file has at most {MAX_BYTES / 1e9:.2f} GB, which "
            f"are {MAX_BYTES // 4_000_000:,} million parameters: use a smaller base."
        )


def _adaptive_average_pool(x: Any, output_size: Sequence[int]) -> Any:
    """ONNX form of `adaptive_avg_pool2d` for x (N, C, H, W).

    PyTorch decomposes it into operators whose indices are computed from the batch size if x is channels-last. ONNX Runtime
    runs such nodes on the CPU even if the rest of the graph runs on a GPU.
    """
    sizes = [int(size) for size in x.shape[2:]]
    if list(output_size) == [1, 1]:
        return op.ReduceMean(x, op.Constant(value_ints=[2, 3]), keepdims=1)
    if all(size % cells == 0 for size, cells in zip(sizes, output_size, strict=True)):
        cell = [size // cells for size, cells in zip(sizes, output_size, strict=True)]
        return op.AveragePool(x, kernel_shape=cell, strides=cell)
    rows, columns = (_cell_weights(*pair).astype(x.dtype.numpy()) for pair in zip(sizes, output_size, strict=True))
    by_rows = op.MatMul(op.Constant(value=ir.tensor(rows)), x)
    return op.MatMul(by_rows, op.Constant(value=ir.tensor(columns.T.copy())))


def _cell_weights(size: int, cells: int) -> NDArray[np.float64]:
    """Weights (cells, size) of each position in the mean of each cell; neighbouring cells may share a position."""
    weights = np.zeros((cells, size))
    for cell in range(cells):
        start, end = cell * size // cells, -(-(cell + 1) * size // cells)
        weights[cell, start:end] = 1 / (end - start)
    return weights


def strip_debug_notes(model: Any) -> None:
    """Drop the exporter's notes on each node: they contain stack traces with paths, and double the size of small files."""
    del model.metadata_props[:]
    model.graph.doc_string = ""
    del model.graph.metadata_props[:]
    del model.graph.value_info[:]
    for node in model.graph.node:
        node.doc_string = ""
        del node.metadata_props[:]
    for value in (*model.graph.input, *model.graph.output, *model.graph.initializer):
        value.doc_string = ""
        del value.metadata_props[:]


def export_graph(graph: BundleGraph, images: Images, drawn: int = 0) -> tuple[bytes, dict[str, float]]:
    """The checked ONNX file and its differences from PyTorch on `images` (N ≥ 2, H, W, C), by output.

    The first `drawn` images are no known ones; the spread of a score is that over the others.
    """
    data = to_onnx(graph, np.asarray(images[:2]), graph.outputs)
    return data, compare(graph, GraphRunner(data), images, drawn)
