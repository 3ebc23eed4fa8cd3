"""Before all stages: refuse what cannot work while nothing has been trained and nothing written."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from qualms.decisions.flag import rank
from qualms_training.data import load
from qualms_training.errors import ModelError
from qualms_training.meta.surprisal import Surprisal
from qualms_training.models import freeze
from qualms_training.stages import base, fit
from qualms_training.stages.context import RunContext
from qualms_training.stages.features import extractor


def run(context: RunContext) -> None:
    """Check the target, the data, the given weights, the taps and the meta-model's form."""
    recipe = context.recipe
    rank(recipe.data.splits.calibration, recipe.operating.target_fpr, recipe.operating.guarantee)
    for name in recipe.data.ood:
        load(name, "test", context.data_dir)
    # Names and shapes are the same before and after training.
    untrained = context.around(freeze(base.new_base(context)))
    _check_base(untrained)
    fit.new_meta(untrained)
    if recipe.base.weights is None:
        _check_training(untrained)
    if recipe.fuses:
        Surprisal(1, recipe.data.splits.fit)  # which refuses too few images


def _check_base(context: RunContext) -> None:
    """Run the base once: it must take the recipe's images and, if it is to predict, know as many classes as the data."""
    name, classes = context.recipe.base.model, len(context.data.classes)
    images = torch.from_numpy(context.data.parts["train"].images[:2])
    shape = " × ".join(str(size) for size in images.shape[1:])
    with _explained(f"Base {name!r} cannot be run on images of {shape}"):
        logits, _ = extractor(context)(images)
    if context.recipe.prediction == "base" and logits.shape[1] != classes:
        raise ModelError(
            f"Base {name!r} gives {logits.shape[1]} logits, and the data have {classes} classes; "
            "prediction = 'meta' in the recipe lets the meta-model predict."
        )


def _check_training(context: RunContext) -> None:
    """Run the base as its training will: it may then put out something else, or not take the last, smallest batch."""
    name, batch, classes = context.recipe.base.model, context.recipe.base.batch, len(context.data.classes)
    count = len(context.data.parts["train"].labels)
    model = base.frozen_base(context).train()
    images = context.normalise(torch.from_numpy(context.data.parts["train"].images[: min(2, batch)]))
    with _explained(f"Base {name!r} cannot be trained"):
        logits = model(images)
    if not isinstance(logits, Tensor) or logits.ndim != 2:
        raise ModelError(
            f"Base {name!r} returns {type(logits).__name__} while it is trained; it must return logits (N, {classes}) "
            "then too, so give weights for it, or a package.module:function that switches the rest off."
        )
    if count % batch == 1 and batch > 1:
        with _explained(
            f"Base {name!r} cannot be trained on one image, and {count} in batches of {batch} leave a last batch of "
            "one; change data.splits.train or base.batch"
        ):
            model(images[:1])


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """Run a model that may be anybody's, leave torch's generator as it is, and say `what` if the model fails."""
    try:
        with torch.inference_mode(), torch.random.fork_rng(devices=[]):
            yield
    except (RuntimeError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise ModelError(f"{what}: {reason}.") from error
