"""Cost of uncertainty at run time: the full graph against the base alone, and the scores by themselves."""

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from rich.table import Table
from torch import nn

from qualms.bundle.runtime import INPUT, GraphRunner
from qualms_training.bench.random_networks import CLASSES, random_images, random_ood_scores, random_parts
from qualms_training.bench.score_accuracy import scores_model
from qualms_training.bench.timing import medians
from qualms_training.console import Display
from qualms_training.meta.graph import BaseGraph, BundleGraph
from qualms_training.meta.onnx_export import to_onnx
from qualms_training.recipe import load_recipe

BATCHES = (1, 32)


def bench_graph(recipe_name: str, repeats: int, display: Display | None = None) -> dict[int, float]:
    """Print the times of the base alone and of the graph with the meta-model and the fused score, and that of the scores.

    Returns the time of the whole graph relative to the base alone, by batch size.
    """
    display = display or Display()
    recipe = load_recipe(recipe_name)
    extractor, meta = random_parts(recipe)
    ood_scores = random_ood_scores(recipe, extractor)
    example = random_images(recipe, 2)
    with display.console.status("exporting"):
        graphs = {"base alone": to_onnx(BaseGraph(extractor), example, ["prediction", "base_probabilities"])}
        not_fused = BundleGraph(extractor, meta)
        graphs["with meta-model"] = to_onnx(not_fused, example, not_fused.outputs)
        if ood_scores is not None:
            fused = BundleGraph(extractor, meta, ood_scores=ood_scores)
            graphs["with fused score"] = to_onnx(fused, example, fused.outputs)
        scores = scores_model(CLASSES)
    table = Table("batch", *graphs, "of the base alone", title=f"{recipe.name} on the CPU", title_justify="left")
    ratios = {}
    for batch in BATCHES:
        images = random_images(recipe, batch)
        times = list(medians({name: _run(graph, images) for name, graph in graphs.items()}, repeats).values())
        ratios[batch] = times[-1] / times[0]
        shares = " → ".join(f"{value / times[0]:.3f}" for value in times[1:])
        table.add_row(str(batch), *(f"{1e3 * value:.3f} ms" for value in times), shares)
    display.console.print(table)
    sizes = ", ".join(f"{name} {_nodes(graph)} ({len(graph) / 1e6:.2f} MB)" for name, graph in graphs.items())
    display.note(f"Nodes: {sizes}; the Dirichlet scores {_nodes(scores)}.")
    display.note(f"The scores add {_score_microseconds(scores):.0f} µs at batch 1.")
    return ratios


def _run(graph: bytes, inputs: NDArray[Any], threads: int = 0) -> Callable[[], object]:
    session = GraphRunner(graph, threads).session
    return lambda: session.run(None, {INPUT: inputs})


def _nodes(graph: bytes) -> int:
    return len(onnx.load_from_string(graph).graph.node)


def _score_microseconds(scores: bytes) -> float:
    """Time of the graph of scores, minus that of an ONNX Runtime call that only copies its input."""
    z = torch.randn(1, CLASSES).numpy()
    copy = to_onnx(nn.Identity(), np.zeros((2, CLASSES), np.float32), ["copy"])
    times = medians({"scores": _run(scores, z, threads=1), "call": _run(copy, z, threads=1)}, 3000, warm_up=200)
    return 1e6 * (times["scores"] - times["call"])
