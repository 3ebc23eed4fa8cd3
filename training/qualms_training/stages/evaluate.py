"""Stage 7: evaluate the bundle on the test set and on OOD sets; the results go into its manifest and evaluation.json."""

import numpy as np
from numpy.typing import NDArray

from qualms.bundle.evaluation_results import Evaluation
from qualms.bundle.file import Bundle, open_bundle, write_bundle
from qualms.bundle.runtime import GraphRunner
from qualms_training.data.noise import CORRUPTION
from qualms_training.data.prepare import ood_sets, stored_ood_sets
from qualms_training.files import fingerprint, save_json
from qualms_training.fitting.base_trainer import predict_logits
from qualms_training.reporting.breakdown import encoding_results
from qualms_training.reporting.evaluation import check_not_calibrated_on, evaluate, observed_encodings, run_graph
from qualms_training.reporting.graph_runs import EvaluationRunner
from qualms_training.reporting.plots import save_plots
from qualms_training.stages import base, calibrate
from qualms_training.stages.context import RunContext

COMPARED = 1000
"""test images on which the served predictions are compared with those of PyTorch"""


def run(context: RunContext) -> None:
    """Evaluate, and write the bundle, evaluation.json and plots."""
    if not calibrate.is_up_to_date(context):
        context.check_may_run("calibrate")
    bundle = open_bundle(context.bundle_file)
    recipe, graph = context.recipe, bundle.manifest.graph_sha256
    reported = (recipe.report_targets, recipe.report_encodings, recipe.report_limit)
    inputs = fingerprint(graph, context.data.record, recipe.data.model_dump(), reported, CORRUPTION)
    if context.is_up_to_date("evaluate", inputs, context.folder / "evaluation.json") and bundle.manifest.evaluation:
        return
    context.check_may_run("evaluate")
    result = _evaluate(context, bundle)
    write_bundle(context.bundle_file, bundle.graph, bundle.manifest.model_copy(update={"evaluation": result}))
    save_json(context.folder / "evaluation.json", result.model_dump(mode="json"))
    context.record_stage("evaluate", inputs)


def _evaluate(context: RunContext, bundle: Bundle) -> Evaluation:
    test = context.data.parts["test"]
    stored = stored_ood_sets(context.recipe, test, context.data_dir)
    ood = ood_sets(context.recipe, test, context.data_dir, context.display, stored)
    runner, recipe = EvaluationRunner(GraphRunner(bundle.graph), bundle.manifest), context.recipe
    seen = check_not_calibrated_on(bundle.manifest, test.images, recipe.data.id)
    outputs, ood_outputs = run_graph(runner, test.images, ood, context.display)
    save_plots(context.folder / "plots", bundle.manifest, outputs, ood_outputs)
    result = evaluate(
        bundle.manifest,
        context.recipe.data.id,
        test.labels,
        outputs,
        ood_outputs,
        targets=context.recipe.report_targets,
        base_predictions=_base_predictions(context),
        **observed_encodings(bundle.manifest, test, stored),
    )
    del outputs, ood_outputs
    encodings = encoding_results(
        runner,
        bundle.manifest,
        test,
        stored,
        encodings=recipe.report_encodings,
        targets=recipe.report_targets,
        limit=recipe.report_limit,
        display=context.display,
    )
    return result.model_copy(update={"encodings": encodings, "calibrated_on": seen})


def _base_predictions(context: RunContext) -> NDArray[np.int64] | None:
    """The classes that the base alone predicts for the first test images, (n,); None if its classes are not the data's."""
    if context.recipe.prediction != "base":
        return None
    images = context.data.parts["test"].images[:COMPARED]
    logits = predict_logits(base.frozen_base(context), context.normalise, images, context.device)
    predictions: NDArray[np.int64] = logits.argmax(axis=1)
    return predictions
