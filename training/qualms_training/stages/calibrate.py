"""Stage 6: calibrate the exported graph on held-out images, and write graph and manifest as one file."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from rich.markup import escape

from qualms.bundle import golden
from qualms.bundle.calibration_data import AsSent
from qualms.bundle.file import graph_digest, open_bundle, write_bundle
from qualms.bundle.manifest import Golden, Manifest
from qualms.bundle.runtime import GraphRunner, Outputs, check_golden
from qualms.bundle.scores import DEFAULT_TRUST_SCORE, SCORES, as_uncertainty
from qualms.decisions.calibration import CalibrationSource, trust_grid
from qualms_training.calibration_run import CalibrationPlan, run_calibration
from qualms_training.files import fingerprint
from qualms_training.reporting.evaluation import detection
from qualms_training.stages import base, combine, export, fit
from qualms_training.stages.context import RunContext
from qualms_training.stages.features import extractor
from qualms_training.stages.provenance import provenance


def run(context: RunContext) -> None:
    """Calibrate and write the bundle."""
    if not is_up_to_date(context):
        context.check_may_run("calibrate")
        graph = context.graph_file.read_bytes()
        write_bundle(context.bundle_file, graph, _manifest(context, graph))
        context.record_stage("calibrate", _inputs_fingerprint(context))
    bundle = open_bundle(context.bundle_file)
    as_sent = bundle.manifest.calibration.as_sent
    sent = f", sent as {', '.join(as_sent.encodings)} ({as_sent.form})" if as_sent else ""
    context.display.note(
        f"  {bundle.manifest.calibration.n:,} held-out images{sent}; wrote {escape(str(context.bundle_file))}"
    )


def is_up_to_date(context: RunContext) -> bool:
    """Whether the bundle exists and was made from the present graph, data and recipe."""
    if not export.is_up_to_date(context):
        context.check_may_run("export")
    return context.is_up_to_date("calibrate", _inputs_fingerprint(context), context.bundle_file)


def _inputs_fingerprint(context: RunContext) -> str:
    graph = graph_digest(context.graph_file.read_bytes())
    return fingerprint(graph, context.data.record, context.recipe.model_dump(mode="json"), context.seed)


def _manifest(context: RunContext, graph: bytes) -> Manifest:
    operating, parts, record = context.recipe.operating, context.data.parts, context.data.record
    specs = {name: SCORES[name] for name in context.recipe.scores}
    section, held_out = context.recipe.calibration, parts["calibration"]
    runner = GraphRunner(graph)
    with context.display.bar("choosing candidate thresholds", len(parts["fit"].labels)) as advance:
        fit_outputs = runner(parts["fit"].images, progress=advance)
    trust_scores = {name: as_uncertainty(fit_outputs[name], specs[name].direction) for name in specs}
    wrong = fit_outputs["prediction"] != parts["fit"].labels
    if (advice := better_trust_score(operating.trust_score, trust_scores, wrong)) is not None:
        context.display.note(f"  {advice}")
    as_sent = AsSent(encodings=section.as_sent, form=section.form, seed=context.seed) if section.as_sent else None
    calibration, reference = run_calibration(
        runner,
        held_out.stored,
        held_out.labels,
        CalibrationPlan(
            input=context.recipe.input.spec,
            scores=specs,
            classes=len(context.data.classes),
            operating=operating,
            sets=section.sets,
            grid=trust_grid(trust_scores[operating.trust_score]),
        ),
        CalibrationSource(
            split="calibration",
            data=record["id"],
            data_sha256=record["sha256"][context.recipe.data.held_out],
            as_sent=as_sent,
        ),
        context.display,
    )
    training = fit.results(context)
    manifest = Manifest(
        name=context.recipe.name,
        version=context.recipe.version,
        classes=list(context.data.classes),
        input=context.recipe.input.spec,
        prediction=context.recipe.prediction,
        alpha="joined",
        flag_terms=combine.flag_terms(context),
        scores=specs,
        operating=operating,
        sets=section.sets,
        calibration=calibration,
        reference=reference,
        golden=_golden(context, runner),
        provenance=provenance(
            context.recipe,
            context.seed,
            base.frozen_base(context),
            extractor(context).tapped.names,
            fit.fitted_meta(context),
            {key: training[key] for key in ("best_epoch", "best_value")},
            record,
        ),
        graph_sha256=graph_digest(graph),
    )
    check_golden(runner, manifest)
    return manifest


def better_trust_score(
    trust_score: str, uncertainty: Mapping[str, NDArray[np.float64]], wrong: NDArray[np.bool_]
) -> str | None:
    """A sentence if the default trust score separates errors better than the recipe's `trust_score`, else None.

    uncertainty: by score, (N,) of the fit split; wrong (N,): whether its predictions are wrong.
    """
    if trust_score == DEFAULT_TRUST_SCORE or not 0 < wrong.sum() < len(wrong):
        return None
    given, default = (
        detection(uncertainty[name][~wrong], uncertainty[name][wrong])[0] for name in (trust_score, DEFAULT_TRUST_SCORE)
    )
    if default <= given:
        return None
    return (
        f"The trust score {DEFAULT_TRUST_SCORE}, from the softmax of the network that predicts, separates the errors of the "
        f"fit split better than {trust_score}: AUROC {default:.1f} % against {given:.1f} %."
    )


def _golden(context: RunContext, runner: GraphRunner) -> Golden:
    images = golden.draw(context.recipe.input.spec)
    outputs: Outputs = runner(images)
    return Golden(count=len(images), input_sha256=golden.digest(images), outputs=outputs)
