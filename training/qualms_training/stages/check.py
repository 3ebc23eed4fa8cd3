"""Checks before the first stage: an impossible recipe fails before anything is trained or written."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from qualms.decisions.flag import rank
from qualms_training.checks.given_base import check_given_base
from qualms_training.data import load_ood
from qualms_training.errors import ModelError, QualmsError
from qualms_training.files import fingerprint
from qualms_training.meta.surprisal import Surprisal
from qualms_training.models import freeze
from qualms_training.stages import base, fit
from qualms_training.stages.context import RunContext
from qualms_training.stages.features import extractor


def run(context: RunContext) -> None:
    """Check the target false-alarm rate, the data, taps and meta-model, and given weights on a few images."""
    recipe = context.recipe
    rank(recipe.data.splits.calibration, recipe.operating.target_fpr, recipe.operating.guarantee)
    for name in recipe.data.ood:
        load_ood(name, context.data_dir)
    given = recipe.base.weights is not None
    # Training changes neither module names nor shapes, so an untrained base is enough.
    checked = context if given else _untrained(context)
    _check_base(checked)
    fit.new_meta(checked)
    Surprisal(1, recipe.data.splits.fit)  # raises DataError if the fit split is too small
    if not given:
        _check_training(checked)
        return
    context.display.note("[bold]check[/bold]")
    # The values of the weights count, not only their path; a base that was let through is checked again without --allow-chance.
    inputs = fingerprint(fit.inputs_fingerprint(context), context.allow_chance)
    if context.is_up_to_date("check", inputs):
        context.display.note("  passed before with the same base and data")
        return
    check_given_base(context)
    context.record_stage("check", inputs)


def _untrained(context: RunContext) -> RunContext:
    """The run with a base whose weights are random."""
    with _errors_explained(_cannot_be_run(context)):
        return context.with_base(freeze(base.new_base(context)))


def _cannot_be_run(context: RunContext) -> str:
    shape = " × ".join(str(size) for size in context.recipe.input.shape)
    return f"Base {context.recipe.base.model!r} cannot be run on images of {shape}"


def _check_base(context: RunContext) -> None:
    """Run the base once: it must accept the recipe's images and, if it predicts, have as many classes as the data."""
    name, classes = context.recipe.base.model, len(context.data.classes)
    images = torch.from_numpy(context.data.parts["train"].images[:2])
    with _errors_explained(_cannot_be_run(context)):
        logits, _ = extractor(context)(images)
    if context.recipe.prediction == "base" and logits.shape[1] != classes:
        raise ModelError(
            f"Base {name!r} has {logits.shape[1]} logits, and the data have {classes} classes; "
            "with prediction = 'meta' in the recipe, the meta-model predicts."
        )


def _check_training(context: RunContext) -> None:
    """Run the base in training mode, where it may return something else or fail on a last batch of one image."""
    name, batch, classes = context.recipe.base.model, context.recipe.base.batch, len(context.data.classes)
    count = len(context.data.parts["train"].labels)
    model = base.frozen_base(context).train()
    images = context.normalise(torch.from_numpy(context.data.parts["train"].images[: min(2, batch)]))
    with _errors_explained(f"Base {name!r} cannot be trained"):
        logits = model(images)
    if not isinstance(logits, Tensor) or logits.ndim != 2:
        raise ModelError(
            f"Base {name!r} returns {type(logits).__name__} in training mode; it must return logits (N, {classes}) "
            "there too: give weights for it, or a package.module:function that returns logits only."
        )
    if count % batch == 1 and batch > 1:
        with _errors_explained(
            f"Base {name!r} cannot be trained on one image, and {count} images in batches of {batch} leave a last batch "
            "of one; change data.splits.train or base.batch"
        ):
            model(images[:1])


@contextmanager
def _errors_explained(message: str) -> Iterator[None]:
    """Turn errors of a model run inside into ModelError with `message`; torch's random state is restored."""
    try:
        with torch.inference_mode(), torch.random.fork_rng(devices=[]):
            yield
    except QualmsError:
        raise
    except Exception as error:  # the user's network may raise anything
        reason = " ".join(str(error).split()).rstrip(".")
        raise ModelError(f"{message}: {reason}.") from error
