"""Stage 3: the meta-model, trained on cached features."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from qualms_training.files import fingerprint, save_json, save_torch
from qualms_training.fitting import probe
from qualms_training.fitting.feature_cache import said
from qualms_training.fitting.loop import Hooks
from qualms_training.fitting.meta_trainer import StoppingData, train_meta
from qualms_training.meta.meta_model import MetaModel, PooledMeta, build_meta
from qualms_training.meta.taps import tap_shapes
from qualms_training.models import identity, load_weights
from qualms_training.reporting.provenance import parameters
from qualms_training.stages import base
from qualms_training.stages.context import RunContext
from qualms_training.stages.features import example, extractor, features, noisy_features

PROBE = "probe.npz"


def run(context: RunContext) -> None:
    """Make the meta-model and say where training stopped."""
    model, section, found = fitted_meta(context), context.recipe.meta, facts(context)
    context.display.note(
        f"  {section.form} meta-model: {parameters(model):,} parameters, best after epoch {found['best_epoch']} of "
        f"{section.epochs} (validation AUROC {100 * found['best_value']:.2f} for {section.stop_task})"
    )


def fitted_meta(context: RunContext) -> MetaModel:
    """The trained meta-model, on the CPU."""
    return context.once("meta", lambda: _fitted(context))


def facts(context: RunContext) -> dict[str, Any]:
    """Best epoch, its value, and the history of the training."""
    found: dict[str, Any] = json.loads((context.folder / "fit.json").read_text())
    return found


def mark(context: RunContext) -> str:
    """Fingerprint of all that decides the meta-model's weights."""
    tapped = extractor(context).tapped
    # The base's mark knows given weights by their file's name only; its identity knows what is in the file.
    made_from = [base.mark(context), identity(tapped.base), tapped.names]
    return fingerprint(made_from, context.recipe.meta.model_dump(), context.seed)


def new_meta(context: RunContext) -> MetaModel:
    """An untrained meta-model of the recipe's form."""
    shapes = tap_shapes(base.frozen_base(context).cpu(), extractor(context).tapped.names, example(context))
    widths = [extractor(context).reduce.output_shape(shape) for shape in shapes]
    return build_meta(context.recipe.meta, widths, len(context.data.classes), context.seed)


def _fitted(context: RunContext) -> MetaModel:
    model = new_meta(context)
    file = context.folder / "meta.pt"
    done = context.done("fit", mark(context), file, context.folder / "fit.json")
    # The mark knows the base's weights, not its code; if that is another, no later stage of this folder is done either.
    edited = done and not probe.agrees_with_kept(context.folder / PROBE, _said(context))
    if done and not edited:
        load_weights(model, file)
        return model.cpu().eval()
    context.must_make("fit")
    if edited:
        context.forget()
    _train(context, model, file)
    return model.cpu().eval()


def _said(context: RunContext) -> list[NDArray[np.float32]]:
    return said(extractor(context), context.data.parts["train"].images[: probe.IMAGES], context.device)


def _train(context: RunContext, model: MetaModel, file: Path) -> None:
    section, train = context.recipe.meta, context.data.parts["train"]
    known = features(context, "train")
    if isinstance(model, PooledMeta):
        model.fit_scales([torch.from_numpy(np.array(tap)) for tap in known.taps])
    validation = context.data.parts["validation"]
    stopping = StoppingData(features(context, "validation"), validation.labels, noisy_features(context))
    checkpoint = context.folder / "meta.checkpoint.pt"
    steps = section.epochs * -(-len(train.labels) // section.batch)
    with context.display.training_bar("training the meta-model", steps) as advance:
        progress = train_meta(
            model,
            known,
            train.labels,
            stopping,
            section,
            seed=context.seed,
            checkpoint=checkpoint,
            fingerprint=mark(context),
            device=context.device,
            hooks=Hooks(on_step=advance),
        )
    probe.save(context.folder / PROBE, _said(context))
    found = {"best_epoch": progress.best_epoch, "best_value": progress.best_value, "history": progress.history}
    save_json(context.folder / "fit.json", found)
    save_torch(file, model.cpu().state_dict())
    context.record("fit", mark(context))
    checkpoint.unlink(missing_ok=True)
