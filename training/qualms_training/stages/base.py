"""Stage 1: the base classifier, trained by the recipe or read from a file, then frozen."""

import copy
from itertools import count
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from qualms.errors import first_line
from qualms_training.errors import ModelError
from qualms_training.files import fingerprint, save_torch
from qualms_training.fitting import probe
from qualms_training.fitting.base_trainer import predict_logits, train_base
from qualms_training.fitting.loop import Hooks
from qualms_training.models import build, count_parameters, freeze, load_weights
from qualms_training.models.checkpoint import check_has_values
from qualms_training.models.logits import return_logits
from qualms_training.models.source import check_layers, load_base
from qualms_training.models.wrappers import unwrap_parts, unwrapped
from qualms_training.stages.context import RunContext


def run(context: RunContext) -> None:
    """Make the base and display its validation accuracy."""
    model = frozen_base(context)
    quality = "its classes are not the data's"
    if context.recipe.prediction == "base":
        right = logits(context, "validation").argmax(axis=1) == context.data.parts["validation"].labels
        quality = f"validation accuracy {100 * right.mean():.2f} %"
    context.display.note(f"  {context.recipe.base.model}: {count_parameters(model):,} parameters, {quality}")


def frozen_base(context: RunContext) -> nn.Module:
    """The base with its final weights, frozen."""
    return context.get_or_make("base", lambda: freeze(_build(context)))


def logits(context: RunContext, split: str) -> NDArray[np.float32]:
    """The base's logits for a split, (N, K)."""
    images = context.data.parts[split].images
    return predict_logits(frozen_base(context), context.normalise, images, context.device)


def inputs_fingerprint(context: RunContext) -> str:
    """Fingerprint of all settings and data that determine the base's weights."""
    section = context.recipe.base.model_dump(exclude={"taps"})
    return fingerprint(section, context.recipe.input.model_dump(), context.data.record, context.seed)


def new_base(context: RunContext) -> nn.Module:
    """The base with its given weights, or else with the random weights that its training starts from."""
    spec, section = context.recipe.input, context.recipe.base
    classes = len(context.data.classes)
    if context.given_base is not None:
        model = copied(context.given_base).float()
    elif section.weights is not None:
        known = classes if context.recipe.prediction == "base" else None
        sizes = {"channels": spec.channels, "height": spec.height, "width": spec.width}
        model = load_base(section.model, weights=section.weights, classes=known, **sizes).module
    else:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(context.seed)
            model = build(section.model, classes, spec.channels, spec.height, spec.width)
    with torch.no_grad():
        example = context.normalise.cpu()(torch.from_numpy(np.asarray(context.data.parts["train"].images[:2])))
    return return_logits(model, example, section.logits)


def copied(model: nn.Module) -> nn.Module:
    """A copy on the CPU in evaluation mode, so that the user's object stays as it is."""
    model = unwrapped(model)
    check_layers(model)
    check_has_values(model)
    computed = {id(value): value.detach().clone() for part in model.modules() for value in _computed_tensors(part)}
    try:
        return unwrap_parts(copy.deepcopy(model, computed)).cpu().eval()  # copies of these objects are known
    except Exception as error:  # the user's class may raise anything
        raise ModelError(
            f"{type(model).__name__} cannot be copied ({type(error).__name__}: {first_line(error)}); a model must support "
            "copy.deepcopy: remove attributes that do not, such as tensors of its last run in a list, locks and open files."
        ) from error


def _computed_tensors(part: nn.Module) -> list[torch.Tensor]:
    """Attributes of a module that its forward computed with gradients, such as its last features; copy.deepcopy refuses them."""
    values = (*vars(part).values(), *part.buffers(recurse=False))
    return [value for value in values if isinstance(value, torch.Tensor) and not value.is_leaf]


def _build(context: RunContext) -> nn.Module:
    if context.recipe.base.weights is not None:
        return new_base(context)
    # Bases with equal settings but different model code get the suffixes -1, -2 and so on.
    name = inputs_fingerprint(context)
    names = (f"{name}-{number}" if number else name for number in count())
    bases = (_load_or_train(context, context.cache / "bases" / f"{name}.pt") for name in names)
    return next(model for model in bases if model is not None)


def _load_or_train(context: RunContext, file: Path) -> nn.Module | None:
    """The base in `file`, trained now if there is no such file; None if it was trained with different model code."""
    model, probe_file = new_base(context), file.with_suffix(".probe.npz")
    if file.exists():
        load_weights(model, file)
        return model if probe.agrees_with_saved(probe_file, _probe_outputs(context, model)) else None
    context.check_may_run("base")
    _train(context, model, file)
    probe.save(probe_file, _probe_outputs(context, model))
    save_torch(file, model.cpu().state_dict())
    _checkpoint(file).unlink(missing_ok=True)
    return model


def _probe_outputs(context: RunContext, model: nn.Module) -> list[NDArray[np.float32]]:
    images = context.data.parts["train"].images[: probe.IMAGES]
    return [predict_logits(model, context.normalise, images, context.device)]


def _checkpoint(file: Path) -> Path:
    return file.with_suffix(".checkpoint.pt")


def _train(context: RunContext, model: nn.Module, file: Path) -> None:
    section, train = context.recipe.base, context.data.parts["train"]
    steps = section.epochs * -(-len(train.labels) // section.batch)
    with context.display.training_bar(f"training {section.model}", steps) as advance:
        train_base(
            model,
            context.normalise,
            train.images,
            train.labels,
            section,
            seed=context.seed,
            checkpoint=_checkpoint(file),
            fingerprint=inputs_fingerprint(context),
            device=context.device,
            hooks=Hooks(on_step=advance),
        )
