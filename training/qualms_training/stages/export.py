"""Stage 5: the whole graph as ONNX, written only if ONNX Runtime agrees with PyTorch on real images."""

import json

import numpy as np
import torch

from qualms.bundle import golden
from qualms.bundle.runtime import GraphRunner
from qualms.files import write_bytes
from qualms_training.checks.trial_export import TOLERANCE
from qualms_training.files import fingerprint, save_json
from qualms_training.fitting import probe
from qualms_training.fitting.base_trainer import predict_logits
from qualms_training.meta.export.onnx_export import OPSET, export_graph
from qualms_training.meta.graph import BundleGraph
from qualms_training.models import identity
from qualms_training.stages import base, combine, fit
from qualms_training.stages.context import RunContext
from qualms_training.stages.features import extractor

KNOWN_IMAGES = 256
"""test images on which the graph is compared with PyTorch, beside the golden ones"""


def run(context: RunContext) -> None:
    """Export the graph and display its largest difference from PyTorch."""
    differences_file = context.folder / "export.json"
    if not is_up_to_date(context) or not _has_this_base(context):
        context.check_may_run("export")
        graph = BundleGraph(
            extractor(context), fit.fitted_meta(context), *combine.fitted(context), context.recipe.prediction
        )
        drawn = golden.draw(context.recipe.input.spec)
        images = np.concatenate([drawn, context.data.parts["test"].images[:KNOWN_IMAGES]])
        with context.display.status("exporting the graph"):
            data, differences = export_graph(graph, images, drawn=len(drawn))
        write_bytes(context.graph_file, data)
        save_json(differences_file, differences)
        context.record_stage("export", _inputs_fingerprint(context))
    difference = json.loads(differences_file.read_text())["log_alpha"]
    context.display.note(
        f"  {context.graph_file.stat().st_size / 1e6:.2f} MB, largest difference to PyTorch {difference:.1e} in log α"
    )


def is_up_to_date(context: RunContext) -> bool:
    """Whether the graph exists and was exported from the present meta-model."""
    products = context.graph_file, context.folder / "export.json"
    return context.is_up_to_date("export", _inputs_fingerprint(context), *products)


def _has_this_base(context: RunContext) -> bool:
    """Whether the graph computes what the base computes: its code may change a little while weights and features stay valid."""
    images = context.data.parts["train"].images[: probe.IMAGES]
    logits = predict_logits(base.frozen_base(context), context.normalise, images, context.device)
    expected = torch.from_numpy(logits).softmax(dim=1).numpy()
    computed = GraphRunner(context.graph_file.read_bytes())(images)["base_probabilities"]
    return bool(computed.shape == expected.shape and np.abs(computed - expected).max() <= TOLERANCE)


def _inputs_fingerprint(context: RunContext) -> str:
    identities = [identity(module) for module in (fit.fitted_meta(context), *combine.fitted(context))]
    parts = [fit.inputs_fingerprint(context), *identities]
    return fingerprint(parts, context.recipe.prediction, context.recipe.scores, OPSET, torch.__version__)
