"""Cost of uncertainty at run time: the full graph against the base alone, and the scores by themselves."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from rich.table import Table
from torch import nn

from qualms.bundle.runtime import INPUT, GraphRunner
from qualms_training.bench.large_bundles import large_recipe
from qualms_training.bench.random_networks import CLASSES, random_graph, random_images
from qualms_training.bench.score_accuracy import joined_scores_model
from qualms_training.bench.timing import medians
from qualms_training.console import Display
from qualms_training.meta.export.onnx_export import to_onnx
from qualms_training.meta.graph import BaseGraph
from qualms_training.recipe import Recipe, load_recipe

BATCHES = (1, 4, 32)
META = {"form": "pooled", "epochs": 1, "lr": 0.1}
"""the default meta-model; its training is not used"""


def bench_graph(recipe_name: str, repeats: int, display: Display | None = None) -> dict[int, float]:
    """Print the times of the base alone and of the whole graph on one core, and that of the Dirichlet scores.

    Returns the time of the whole graph relative to the base alone, by batch size.
    """
    recipe = load_recipe(recipe_name)
    return _bench(recipe.name, recipe, CLASSES, BATCHES, repeats, display or Display())


def bench_model(model: str, classes: int, size: int, repeats: int, display: Display | None = None) -> dict[int, float]:
    """`bench_graph` for any base, such as `torchvision:resnet50`, with random weights, and images of `size` × `size` × 3.

    Only batch 1 is measured: large networks take as long for each image of a larger batch.
    """
    recipe = large_recipe("random-weights", {"base": {"model": model, "epochs": 1, "lr": 0.1}, "meta": META}, size)
    title = f"{model}, {classes} classes, {size} pixels,"
    return _bench(title, recipe, classes, (1,), repeats, display or Display())


def _bench(
    title: str, recipe: Recipe, classes: int, batches: Sequence[int], repeats: int, display: Display
) -> dict[int, float]:
    example = random_images(recipe, 2)
    with display.console.status("exporting"):
        graph = random_graph(recipe, classes)
        graphs = {
            "base alone": to_onnx(BaseGraph(graph.extractor), example, ["prediction", "base_probabilities"]),
            "whole graph": to_onnx(graph, example, graph.outputs),
        }
        scores = joined_scores_model(classes)
    table = Table("batch", *graphs, "added", title=f"{title} on one core", title_justify="left")
    ratios = {}
    for batch in batches:
        images = random_images(recipe, batch)
        runs = {name: _run(data, images) for name, data in graphs.items()}
        seconds = _seconds(runs, repeats)
        # Both graphs run in turns, so that a change of the machine's speed hardly changes the ratio of a round.
        ratios[batch] = float(np.median(seconds["whole graph"] / seconds["base alone"]))
        cells = [f"{1e3 * np.median(values):.3f} ms" for values in seconds.values()]
        table.add_row(str(batch), *cells, f"{100 * (ratios[batch] - 1):+.1f} %")
    display.console.print(table)
    sizes = ", ".join(f"{name} {_nodes(data)} ({len(data) / 1e6:.2f} MB)" for name, data in graphs.items())
    larger = 100 * (len(graphs["whole graph"]) / len(graphs["base alone"]) - 1)
    display.note(f"Nodes: {sizes}; the Dirichlet scores {_nodes(scores)}. The whole graph is {larger:.1f} % larger.")
    display.note(f"The scores add {_score_microseconds(scores, classes):.0f} µs at batch 1.")
    return ratios


def _seconds(
    actions: Mapping[str, Callable[[], object]], repeats: int, warm_up: int = 3
) -> dict[str, NDArray[np.float64]]:
    """Seconds of each action in each round, (repeats,); a round runs all actions once."""
    for action in actions.values():
        for _ in range(warm_up):
            action()
    seconds = {name: np.zeros(repeats) for name in actions}
    for index in range(repeats):
        for name, action in actions.items():
            start = time.perf_counter()
            action()
            seconds[name][index] = time.perf_counter() - start
    return seconds


def _run(graph: bytes, inputs: NDArray[Any], threads: int = 1) -> Callable[[], object]:
    session = GraphRunner(graph, threads).session
    return lambda: session.run(None, {INPUT: inputs})


def _nodes(graph: bytes) -> int:
    return len(onnx.load_from_string(graph).graph.node)


def _score_microseconds(scores: bytes, classes: int) -> float:
    """Time of the graph of scores, minus that of an ONNX Runtime call that only copies its input."""
    z = torch.randn(1, classes + 1).numpy()
    copy = to_onnx(nn.Identity(), np.zeros((2, classes + 1), np.float32), ["copy"])
    times = medians({"scores": _run(scores, z), "call": _run(copy, z)}, 3000, warm_up=200)
    return 1e6 * (times["scores"] - times["call"])
