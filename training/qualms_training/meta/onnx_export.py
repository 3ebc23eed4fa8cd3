"""Export a graph to ONNX and check that ONNX Runtime agrees with PyTorch on real inputs."""

import logging
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from onnxscript import ir, opset18
from torch import nn

from qualms.bundle.runtime import INPUT, GraphRunner
from qualms.errors import first_line
from qualms_training.errors import ExportError
from qualms_training.meta.graph import BundleGraph

OPSET = 18
"""the newest with CUDA kernels for all our operators in every ONNX Runtime that pyproject.toml accepts"""
op: Any = opset18  # its operators take values of the exporter, which are not what their annotations name
LOG_ALPHA_TOLERANCE = 1e-4
OUTPUT_TOLERANCE = 1e-3
"""of every other output, relative above 1 and absolute below; larger than the changes that log α's tolerance causes"""


def to_onnx(module: nn.Module, example: NDArray[Any], outputs: Sequence[str]) -> bytes:
    """An ONNX model of `module` with a dynamic batch size.

    `example` (N ≥ 2, ...) fixes the type and shape of the only input, which is named INPUT so that GraphRunner accepts
    the model; `outputs` are the names of the outputs.
    """
    module = module.cpu().eval()
    # The exporter's warnings and log messages are meant for its developers.
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
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
                custom_translation_table={torch.ops.aten.adaptive_avg_pool2d.default: _adaptive_average_pool},
            )
    except Exception as error:
        raise ExportError(f"PyTorch cannot export this model: {first_line(error)}.") from error
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
    assert program is not None
    model = program.model_proto
    strip_debug_notes(model)
    return bytes(model.SerializeToString())


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


def export_graph(graph: BundleGraph, images: NDArray[np.uint8]) -> tuple[bytes, dict[str, float]]:
    """The checked ONNX file and its differences from PyTorch on `images` (N ≥ 2, H, W, C), by output."""
    data = to_onnx(graph, images[:2], graph.outputs)
    return data, compare(graph, GraphRunner(data), images)


@torch.inference_mode()
def compare(graph: BundleGraph, runner: GraphRunner, images: NDArray[np.uint8]) -> dict[str, float]:
    """Largest differences between PyTorch and ONNX Runtime by output; ExportError if one exceeds its tolerance."""
    expected = graph.cpu().eval().named(torch.from_numpy(images))
    actual = runner(images)
    if missing := [name for name in expected if name not in actual]:
        raise ExportError(f"The exported graph has no output {missing[0]}.")
    differences = {name: _difference(actual[name], value.numpy()) for name, value in expected.items()}
    with np.errstate(divide="ignore", invalid="ignore"):
        log_alpha = _difference(np.log(actual["alpha"]), expected["alpha"].log().numpy(), scaled=False)
    disagreements = int((actual["prediction"] != expected["prediction"].numpy()).sum())
    if log_alpha > LOG_ALPHA_TOLERANCE or disagreements:
        raise ExportError(
            f"The exported graph differs from PyTorch: log α by {log_alpha:.1e} "
            f"(at most {LOG_ALPHA_TOLERANCE:.0e} is accepted) and {disagreements} of {len(images)} predictions."
        )
    worst = max(differences, key=lambda name: differences[name])
    if differences[worst] > OUTPUT_TOLERANCE:
        raise ExportError(
            f"The exported graph differs from PyTorch: {worst} by {differences[worst]:.1e} "
            f"(at most {OUTPUT_TOLERANCE:.0e} is accepted)."
        )
    return {"log_alpha": log_alpha, **differences}


def _difference(actual: NDArray[Any], expected: NDArray[Any], *, scaled: bool = True) -> float:
    """Largest difference, over max(1, |expected|) if `scaled`; infinite if types or shapes differ or values are not finite."""
    if actual.dtype != expected.dtype or actual.shape != expected.shape or not np.isfinite(actual).all():
        return float("inf")
    size = np.maximum(1.0, np.abs(expected)) if scaled else 1.0
    return float(np.max(np.abs(actual - expected) / size))
