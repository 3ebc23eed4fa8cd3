"""Stage 1: the base classifier, trained by the recipe or read from a file, then frozen."""

from itertools import count
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from qualms_training.files import fingerprint, save_torch
from qualms_training.fitting import probe
from qualms_training.fitting.base_trainer import predict_logits, train_base
from qualms_training.fitting.loop import Hooks
from qualms_training.models import build, freeze, load_weights
from qualms_training.reporting.provenance import parameters
from qualms_training.stages.context import RunContext


def run(context: RunContext) -> None:
    """Make the base and say how good it is."""
    model = frozen_base(context)
    quality = "its classes are not the data's"
    if context.recipe.prediction == "base":
        right = logits(context, "validation").argmax(axis=1) == context.data.parts["validation"].labels
        quality = f"validation accuracy {100 * right.mean():.2f} %"
    context.display.note(f"  {context.recipe.base.model}: {parameters(model):,} parameters, {quality}")


def frozen_base(context: RunContext) -> nn.Module:
    """The base, frozen."""
    return context.once("base", lambda: freeze(_build(context)))


def logits(context: RunContext, split: str) -> NDArray[np.float32]:
    """What the base alone says about a split, (N, K)."""
    images = context.data.parts[split].images
    return predict_logits(frozen_base(context), context.normalise, images, context.device)


def mark(context: RunContext) -> str:
    """Fingerprint of all that decides the base's weights."""
    section = context.recipe.base.model_dump(exclude={"taps"})
    return fingerprint(section, context.recipe.input.model_dump(), context.data.record, context.seed)


def new_base(context: RunContext) -> nn.Module:
    """The base with the weights the recipe gives, or with those that its training starts from."""
    spec, section = context.recipe.input, context.recipe.base
    classes, given = len(context.data.classes), section.weights_file
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(context.seed)
        return build(section.model, classes, spec.channels, spec.height, spec.width, weights=given)


def _build(context: RunContext) -> nn.Module:
    if context.recipe.base.weights is not None:
        return new_base(context)
    names = (f"{mark(context)}-{number}" if number else mark(context) for number in count())
    built = (_stored(context, context.cache / "bases" / f"{name}.pt") for name in names)
    return next(model for model in built if model is not None)


def _stored(context: RunContext, file: Path) -> nn.Module | None:
    """The base in `file`, trained now if it is missing; None if the model's code was another when it was trained."""
    model, kept = new_base(context), file.with_suffix(".probe.npz")
    if file.exists():
        load_weights(model, file)
        return model if probe.agrees_with_kept(kept, _said(context, model)) else None
    context.must_make("base")
    _train(context, model, file)
    return model


def _said(context: RunContext, model: nn.Module) -> list[NDArray[np.float32]]:
    images = context.data.parts["train"].images[: probe.IMAGES]
    return [predict_logits(model, context.normalise, images, context.device)]


def _train(context: RunContext, model: nn.Module, file: Path) -> None:
    section, train = context.recipe.base, context.data.parts["train"]
    checkpoint = file.with_suffix(".checkpoint.pt")
    steps = section.epochs * -(-len(train.labels) // section.batch)
    with context.display.training_bar(f"training {section.model}", steps) as advance:
        train_base(
            model,
            context.normalise,
            train.images,
            train.labels,
            section,
            seed=context.seed,
            checkpoint=checkpoint,
            fingerprint=mark(context),
            device=context.device,
            hooks=Hooks(on_step=advance),
        )
    probe.save(file.with_suffix(".probe.npz"), _said(context, model))
    save_torch(file, model.cpu().state_dict())
    checkpoint.unlink(missing_ok=True)
