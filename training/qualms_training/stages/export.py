"""Stage 5: the whole graph as ONNX, kept only if ONNX Runtime agrees with PyTorch on real images."""

import json

import numpy as np
import torch

from qualms.bundle import golden
from qualms.files import write_bytes
from qualms_training.files import fingerprint, save_json
from qualms_training.meta.export import OPSET, export_graph
from qualms_training.meta.graph import BundleGraph
from qualms_training.models import identity
from qualms_training.stages import combine, fit
from qualms_training.stages.context import RunContext
from qualms_training.stages.features import extractor


def run(context: RunContext) -> None:
    """Export, and say how far the graph is from PyTorch."""
    facts = context.folder / "export.json"
    if not is_done(context):
        context.must_make("export")
        meta, doubter = fit.fitted_meta(context), combine.doubter(context)
        graph = BundleGraph(extractor(context), meta, context.recipe.prediction, doubter)
        images = np.concatenate([golden.draw(context.recipe.input.spec), context.data.parts["test"].images[:256]])
        with context.display.console.status("  exporting the graph"):
            data, differences = export_graph(graph, images)
        write_bytes(context.graph_file, data)
        save_json(facts, differences)
        context.record("export", _mark(context))
    difference = json.loads(facts.read_text())["log_alpha"]
    context.display.note(
        f"  {context.graph_file.stat().st_size / 1e6:.2f} MB, largest difference to PyTorch {difference:.1e} in log α"
    )


def is_done(context: RunContext) -> bool:
    """Whether the graph is there and is that of the present meta-model."""
    return context.done("export", _mark(context), context.graph_file, context.folder / "export.json")


def _mark(context: RunContext) -> str:
    doubter = combine.doubter(context)
    parts = [fit.mark(context), identity(fit.fitted_meta(context)), None if doubter is None else identity(doubter)]
    return fingerprint(parts, context.recipe.prediction, OPSET, torch.__version__)
