"""The table of GPU placement: which nodes of the exported graphs each onnxruntime-gpu can run with CUDA."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path

import onnx

from qualms.files import write_bytes
from qualms_training.bench.random_networks import random_graph, random_images
from qualms_training.console import Display
from qualms_training.errors import DataError, ExportError
from qualms_training.gpu import kernels
from qualms_training.gpu.placement import Placement, optimise, place, read_graph
from qualms_training.gpu.wheels import Opened, unpacked, wheel_files
from qualms_training.meta.export.onnx_export import to_onnx
from qualms_training.recipe import Recipe, load_recipe

NETWORKS = {
    "LeNet": "mnist-lenet-pooled",
    "LeNet, published meta-model": "mnist-lenet",
    "ResNet-20": "cifar10-resnet20",
    "VGG16": "cifar10-vgg16-pooled",
    "WRN-16-4": "cifar10-vgg16-pooled",
    "EfficientNet-Lite0": "transfer-cifar10",
}
"""by network: the recipe whose graph is exported; WRN-16-4 takes the place of that recipe's base"""
WRN = {"model": "wrn16-4", "taps": ["group2", "group3", "pool"]}

INTRODUCTION = """# Graphs on a GPU

No GPU was available: nothing here was run on one. The table says, for every release of onnxruntime-gpu, which nodes of an
exported graph have a CUDA kernel for their operator version and tensor types, and which nodes ONNX Runtime nevertheless
places on the CPU because they compute on shapes. If any node is left on the CPU, `QUALMS_DEVICE=cuda` refuses the model.
The kernels are those registered in the published wheels (`training/qualms_training/gpu/cuda_kernels.json`), and the rule of
placement is ONNX Runtime's (`training/qualms_training/gpu/placement.py`). Weights are random; they do not matter here.
"Kernels" counts the different ones that the graph uses.
"""
WITH_WHEELS = """
The last column is no prediction: each release opened the graph, with stubs in place of the CUDA libraries
(`training/qualms_training/gpu/wheels.py`), and reported the number of nodes that it placed on the CPU.
"""


def networks() -> Iterator[tuple[str, Recipe]]:
    """The recipe of every network of the table."""
    for name, recipe_name in NETWORKS.items():
        recipe = load_recipe(recipe_name)
        if name == "WRN-16-4":
            recipe = recipe.model_copy(update={"base": recipe.base.model_copy(update=WRN)})
        yield name, recipe


def export(recipe: Recipe) -> bytes:
    """The recipe's whole graph with random weights."""
    graph = random_graph(recipe)
    return to_onnx(graph, random_images(recipe, 2), graph.outputs)


def gpu_table(
    out: Path | None = None, files: Sequence[Path] = (), wheels: Path | None = None, display: Display | None = None
) -> str:
    """Print the table in Markdown, write it to `out` if given, and return it.

    `files` are further ONNX files, one row each. If `wheels` is a folder of wheels, their releases also open the graphs.
    """
    display = display or Display()
    graphs = {file.stem: _read(file) for file in files}
    for name, recipe in networks():
        with display.console.status(f"exporting {name}"):
            graphs[name] = export(recipe)
    opened = {} if wheels is None else _open(graphs, wheels, display)
    options = [f"--graph {file.name}" for file in files] + (["--wheels WHEELS"] if opened else [])
    made_by = f"Made by `{' '.join(['qualms gpu-table', *options])}`."
    text = "\n".join([INTRODUCTION + (WITH_WHEELS if opened else ""), *_rows(graphs, opened), "", made_by, ""])
    display.console.print(text, markup=False, highlight=False, soft_wrap=True)
    if out is not None:
        write_bytes(out, text.encode())
    return text


def _read(file: Path) -> bytes:
    data = file.read_bytes()
    try:
        optimise(data)
    except ExportError as error:
        raise DataError(f"{file} cannot be used. {error}") from error
    return data


def _open(graphs: Mapping[str, bytes], wheels: Path, display: Display) -> dict[tuple[str, str], Opened]:
    """How each release in the folder of wheels places each graph, by graph and release."""
    results: dict[tuple[str, str], Opened] = {}
    for release, file in wheel_files(wheels).items():
        with display.console.status(f"opening the graphs with {release}"), unpacked(release, file) as wheel:
            results |= {(name, release): wheel.open(data) for name, data in graphs.items()}
    return results


def _rows(graphs: Mapping[str, bytes], opened: Mapping[tuple[str, str], Opened]) -> Iterator[str]:
    titles = ["graph", "opset", "nodes", "onnxruntime-gpu", "kernels", "nodes without kernel", "other nodes on the CPU"]
    titles += ["`device=cuda`", *(["nodes on the CPU as opened"] if opened else [])]
    yield f"| {' | '.join(titles)} |"
    yield f"|---|{'---:|' * 2}---|{'---:|' * 3}---|" + ("---:|" if opened else "")
    for name, data in graphs.items():
        model = onnx.load_from_string(data)
        opset = next(entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx"))
        graph = read_graph(optimise(data))
        cells = [
            (release.release, _cells(place(graph, release), opened.get((name, release.release)), bool(opened)))
            for release in kernels.all_releases()
        ]
        for values, same in groupby(cells, key=lambda pair: pair[1]):
            releases = [release for release, _ in same]
            span = releases[0] if len(releases) == 1 else f"{releases[0]} to {releases[-1]}"
            yield f"| {' | '.join([name, str(opset), str(len(model.graph.node)), span, *values])} |"


def _cells(placement: Placement, opened: Opened | None, has_opened: bool) -> list[str]:
    """Number of kernels, nodes without one, nodes moved to the CPU, and the outcome."""
    cells = [str(placement.kernels), _count(placement.without_kernel), _count(placement.cpu_preferred)]
    cells.append("accepted" if placement.runs_on_cuda_alone else "refused")
    return [*cells, *(["–" if opened is None else str(opened.on_cpu)] if has_opened else [])]


def _count(nodes: Sequence[object]) -> str:
    """The number of nodes, with their operators."""
    operators = sorted({str(node).partition(" ")[0] for node in nodes})
    return f"{len(nodes)} ({', '.join(operators)})" if nodes else "0"
