"""Stage 3: the meta-model, trained on cached features."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qualms_training.files import fingerprint, save_json, save_torch
from qualms_training.fitting import probe
from qualms_training.fitting.loop import Hooks
from qualms_training.fitting.meta_trainer import StoppingData, train_meta
from qualms_training.meta.meta_model import MetaModel, PooledMeta, build_meta
from qualms_training.meta.taps.tapped import tap_shapes
from qualms_training.models import count_parameters, identity, load_weights
from qualms_training.stages import base
from qualms_training.stages.context import RunContext
from qualms_training.stages.features import example, extractor, features, noisy_features

PROBE = "probe.npz"
_STOP_TASKS = {"ood": "against their noisy copies", "misclassification": "for misclassification"}


def run(context: RunContext) -> None:
    """Make the meta-model and display its size and best epoch."""
    model, section, training = fitted_meta(context), context.recipe.meta, results(context)
    context.display.note(
        f"  {section.form} meta-model: {count_parameters(model):,} parameters, best after epoch "
        f"{training['best_epoch']} of {section.epochs} "
        f"(validation AUROC {100 * training['best_value']:.2f} {_STOP_TASKS[section.stop_task]})"
    )


def fitted_meta(context: RunContext) -> MetaModel:
    """The trained meta-model, on the CPU."""
    return context.get_or_make("meta", lambda: _load_or_train(context))


def results(context: RunContext) -> dict[str, Any]:
    """The best epoch, its validation AUROC, and the history of the training."""
    content: dict[str, Any] = json.loads((context.folder / "fit.json").read_text())
    return content


def inputs_fingerprint(context: RunContext) -> str:
    """Fingerprint of all settings and weights that determine the meta-model's weights."""
    tapped = extractor(context).tapped
    # The base's own fingerprint has only the path of given weights; its identity has their values.
    base_inputs = [base.inputs_fingerprint(context), identity(tapped.base), tapped.names]
    return fingerprint(base_inputs, context.recipe.meta.model_dump(), context.seed)


def new_meta(context: RunContext) -> MetaModel:
    """An untrained meta-model of the recipe's form."""
    shapes = tap_shapes(base.frozen_base(context).cpu(), extractor(context).tapped.names, example(context))
    widths = [extractor(context).reduce.output_shape(shape) for shape in shapes]
    return build_meta(context.recipe.meta, widths, len(context.data.classes), context.seed)


def _load_or_train(context: RunContext) -> MetaModel:
    model = new_meta(context)
    file = context.folder / "meta.pt"
    up_to_date = context.is_up_to_date("fit", inputs_fingerprint(context), file, context.folder / "fit.json")
    # The fingerprint covers the base's weights but not its code. If the code has changed, later stages are outdated too.
    code_changed = up_to_date and not probe.agrees_with_saved(context.folder / PROBE, _probe_outputs(context))
    if up_to_date and not code_changed:
        load_weights(model, file)
        return model.cpu().eval()
    context.check_may_run("fit")
    if code_changed:
        context.clear_stage_record()
    _train(context, model, file)
    return model.cpu().eval()


def _probe_outputs(context: RunContext) -> list[NDArray[np.float32]]:
    return probe.outputs(extractor(context), context.data.parts["train"].images, context.device)


def _train(context: RunContext, model: MetaModel, file: Path) -> None:
    section, train = context.recipe.meta, context.data.parts["train"]
    train_features = features(context, "train")
    if isinstance(model, PooledMeta):
        model.fit_scales(train_features.taps)
    validation = context.data.parts["validation"]
    stopping = StoppingData(features(context, "validation"), validation.labels, noisy_features(context))
    checkpoint = context.folder / "meta.checkpoint.pt"
    steps = section.epochs * -(-len(train.labels) // section.batch)
    with context.display.training_bar("training the meta-model", steps) as advance:
        progress = train_meta(
            model,
            train_features,
            train.labels,
            stopping,
            section,
            seed=context.seed,
            checkpoint=checkpoint,
            fingerprint=inputs_fingerprint(context),
            device=context.device,
            hooks=Hooks(on_step=advance),
        )
    probe.save(context.folder / PROBE, _probe_outputs(context))
    training = {"best_epoch": progress.best_epoch, "best_value": progress.best_value, "history": progress.history}
    save_json(context.folder / "fit.json", training)
    save_torch(file, model.cpu().state_dict())
    context.record_stage("fit", inputs_fingerprint(context))
    checkpoint.unlink(missing_ok=True)
