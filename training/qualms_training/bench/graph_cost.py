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
from qualms_training.bench.random_networks import CLASSES, random_graph, random_images
from qualms_training.bench.score_accuracy import joined_scores_model
from qualms_training.bench.timing import medians
from qualms_training.console import Display
from qualms_training.meta.graph import BaseGraph
from qualms_training.meta.onnx_export import to_onnx
from qualms_training.recipe import load_recipe

BATCHES = (1, 4, 32)


def bench_graph(recipe_name: str, repeats: int, display: Display | None = None) -> dict[int, float]:
    """Print the times of the base alone and of the whole graph on one core, and that of the Dirichlet scores.

    Returns the time of the whole graph relative to the base alone, by batch size.
    """
    display = display or Display()
    recipe = load_recipe(recipe_name)
    example = random_images(recipe, 2)
    with display.console.status("exporting"):
        graph = random_graph(recipe)
        graphs = {
            "base alone": to_onnx(BaseGraph(graph.extractor), example, ["prediction", "base_probabilities"]),
            "whole graph": to_onnx(graph, example, graph.outputs),
        }
        scores = joined_scores_model(CLASSES)
    table = Table("batch", *graphs, "added", title=f"{recipe.name} on one core", title_justify="left")
    ratios = {}
    for batch in BATCHES:
        images = random_images(recipe, batch)
        times = medians({name: _run(data, images) for name, data in graphs.items()}, repeats)
        ratios[batch] = times["whole graph"] / times["base alone"]
        cells = [f"{1e3 * value:.3f} ms" for value in times.values()]
        table.add_row(str(batch), *cells, f"{100 * (ratios[batch] - 1):+.1f} %")
    display.console.print(table)
    sizes = ", ".join(f"{name} {_nodes(data)} ({len(data) / 1e6:.2f} MB)" for name, data in graphs.items())
    display.note(f"Nodes: {sizes}; the Dirichlet scores {_nodes(scores)}.")
    display.note(f"The scores add {_score_microseconds(scores):.0f} µs at batch 1.")
    return ratios


def _run(graph: bytes, inputs: NDArray[Any], threads: int = 1) -> Callable[[], object]:
    session = GraphRunner(graph, threads).session
    return lambda: session.run(None, {INPUT: inputs})


def _nodes(graph: bytes) -> int:
    return len(onnx.load_from_string(graph).graph.node)


def _score_microseconds(scores: bytes) -> float:
    """Time of the graph of scores, minus that of an ONNX Runtime call that only copies its input."""
    z = torch.randn(1, CLASSES + 1).numpy()
    copy = to_onnx(nn.Identity(), np.zeros((2, CLASSES + 1), np.float32), ["copy"])
    times = medians({"scores": _run(scores, z), "call": _run(copy, z)}, 3000, warm_up=200)
    return 1e6 * (times["scores"] - times["call"])
