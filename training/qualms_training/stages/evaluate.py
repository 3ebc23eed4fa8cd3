"""Stage 7: the bundle on test images and strangers; the results go into its manifest and beside it."""

import numpy as np
from numpy.typing import NDArray

from qualms.bundle.file import Bundle, open_bundle, write_bundle
from qualms.bundle.manifest import Evaluation
from qualms.bundle.runtime import GraphRunner
from qualms_training.data.prepare import ood_sets
from qualms_training.files import fingerprint, save_json
from qualms_training.reporting.evaluation import evaluate
from qualms_training.reporting.plots import save_plots
from qualms_training.stages import base, calibrate
from qualms_training.stages.context import RunContext


def run(context: RunContext) -> None:
    """Evaluate, and write evaluation.json and plots."""
    if not calibrate.is_done(context):
        context.must_make("calibrate")
    bundle = open_bundle(context.bundle_file)
    recipe = context.recipe
    mark = fingerprint(
        bundle.manifest.graph_sha256, context.data.record, recipe.data.model_dump(), recipe.report_targets
    )
    if context.done("evaluate", mark, context.folder / "evaluation.json") and bundle.manifest.evaluation:
        return
    context.must_make("evaluate")
    result = _evaluate(context, bundle)
    write_bundle(context.bundle_file, bundle.graph, bundle.manifest.model_copy(update={"evaluation": result}))
    save_json(context.folder / "evaluation.json", result.model_dump(mode="json"))
    context.record("evaluate", mark)


def _evaluate(context: RunContext, bundle: Bundle) -> Evaluation:
    test = context.data.parts["test"]
    others = ood_sets(context.recipe, test, context.data_dir, context.display)
    runner = GraphRunner(bundle.graph)
    total = len(test.labels) + sum(len(images) for images in others.values())
    with context.display.bar("evaluating", total) as advance:
        known = runner(test.images, progress=advance)
        strange = {name: runner(images, progress=advance) for name, images in others.items()}
    save_plots(context.folder / "plots", bundle.manifest, known, strange)
    return evaluate(
        bundle.manifest,
        context.recipe.data.id,
        test.labels,
        known,
        strange,
        targets=context.recipe.report_targets,
        base_predictions=_base_predictions(context),
    )


def _base_predictions(context: RunContext) -> NDArray[np.int64] | None:
    """The base's own classes (N,), where they are those of the data."""
    return base.logits(context, "test").argmax(axis=1) if context.recipe.prediction == "base" else None
