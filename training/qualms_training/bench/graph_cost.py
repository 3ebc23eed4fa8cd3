"""What doubt costs at run time: the full graph against the base alone, and the scores by themselves."""

from collections import Counter
from collections.abc import Callable

import numpy as np
import onnx
import onnxruntime
import torch
from numpy.typing import NDArray
from rich.table import Table

from qualms.bundle.runtime import INPUT, GraphRunner
from qualms_training.bench.networks import CLASSES, random_doubter, random_images, random_parts
from qualms_training.bench.score_accuracy import scores_model
from qualms_training.bench.timing import medians
from qualms_training.console import Display
from qualms_training.meta.export import to_onnx
from qualms_training.meta.graph import BaseGraph, BundleGraph
from qualms_training.recipe import load_recipe

BATCHES = (1, 32)


def bench_graph(recipe_name: str, repeats: int, display: Display | None = None) -> dict[int, float]:
    """Print the time of the graph by what it holds, as shares of the base alone, and that of the scores at batch 1."""
    display = display or Display()
    recipe = load_recipe(recipe_name)
    extractor, meta = random_parts(recipe)
    doubter = random_doubter(recipe, extractor)
    example = random_images(recipe, 2)
    with display.console.status("exporting"):
        graphs = {"base alone": to_onnx(BaseGraph(extractor), example, ["prediction", "base_probabilities"])}
        without = BundleGraph(extractor, meta)
        graphs["with meta-model"] = to_onnx(without, example, without.outputs)
        if doubter is not None:
            fused = BundleGraph(extractor, meta, doubter=doubter)
            graphs["with fused score"] = to_onnx(fused, example, fused.outputs)
        scores = scores_model(CLASSES)
    table = Table("batch", *graphs, "of the base alone", title=f"{recipe.name} on the CPU", title_justify="left")
    ratios = {}
    for batch in BATCHES:
        images = random_images(recipe, batch)
        times = list(medians({name: _once(graph, images) for name, graph in graphs.items()}, repeats).values())
        ratios[batch] = times[-1] / times[0]
        shares = " → ".join(f"{value / times[0]:.3f}" for value in times[1:])
        table.add_row(str(batch), *(f"{1e3 * value:.3f} ms" for value in times), shares)
    display.console.print(table)
    sizes = ", ".join(f"{name} {_nodes(graph)} ({len(graph) / 1e6:.2f} MB)" for name, graph in graphs.items())
    display.note(f"Nodes: {sizes}; the Dirichlet's scores {_nodes(scores)}.")
    display.note(f"The scores add {_score_microseconds(scores):.0f} µs at batch 1.")
    return ratios


def _once(graph: bytes, images: NDArray[np.uint8]) -> Callable[[], object]:
    session = GraphRunner(graph).session
    return lambda: session.run(None, {INPUT: images})


def _nodes(graph: bytes) -> int:
    return sum(Counter(node.op_type for node in onnx.load_from_string(graph).graph.node).values())


def _score_microseconds(scores: bytes) -> float:
    """The scores' graph less what calling ONNX Runtime costs for one output that is a copy of the input."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(scores, options, providers=["CPUExecutionProvider"])
    z = torch.randn(1, CLASSES).numpy()
    node = onnx.helper.make_node("Identity", ["z"], ["copy"])
    kind = onnx.TensorProto.FLOAT
    tensors = [onnx.helper.make_tensor_value_info(name, kind, ["N", CLASSES]) for name in ("z", "copy")]
    trivial = onnx.helper.make_model(
        onnx.helper.make_graph([node], "call", tensors[:1], tensors[1:]),
        opset_imports=[onnx.helper.make_opsetid("", 20)],
        ir_version=10,
    )
    call = onnxruntime.InferenceSession(trivial.SerializeToString(), options, providers=["CPUExecutionProvider"])
    times = medians(
        {"scores": lambda: session.run(None, {"z": z}), "call": lambda: call.run(None, {"z": z})}, 3000, warm_up=200
    )
    return 1e6 * (times["scores"] - times["call"])
