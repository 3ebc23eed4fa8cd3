"""Stage 4: the whole graph as ONNX, kept only if ONNX Runtime agrees with PyTorch on real images."""

import json

import numpy as np
import torch

from service.bundle import golden
from service.bundle.atomic import write_bytes
from training.context import RunContext
from training.export import OPSET, export_graph
from training.files import fingerprint, save_json
from training.graph import BundleGraph
from training.stages import fit
from training.stages.features import extractor


def run(context: RunContext) -> None:
    """Export, and say how far the graph is from PyTorch."""
    facts = context.folder / "export.json"
    mark = fingerprint(fit.mark(context), OPSET, torch.__version__)
    if not context.done("export", mark, context.graph_file):
        context.must_make("export")
        graph = BundleGraph(extractor(context), fit.fitted_meta(context))
        images = np.concatenate([golden.draw(context.recipe.input.spec), context.data.parts["test"].images[:256]])
        with context.display.console.status("  exporting the graph"):
            data, differences = export_graph(graph, images)
        write_bytes(context.graph_file, data)
        save_json(facts, differences)
        context.record("export", mark)
    difference = json.loads(facts.read_text())["log_alpha"]
    context.display.note(
        f"  {context.graph_file.stat().st_size / 1e6:.2f} MB, largest difference to PyTorch {difference:.1e} in log α"
    )
