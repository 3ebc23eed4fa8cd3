"""Before all stages: refuse what cannot work while nothing has been trained and nothing written."""

import torch

from service.bundle.decision import rank
from training.context import RunContext
from training.data import load
from training.errors import ModelError
from training.models import freeze
from training.stages import base, fit
from training.stages.features import extractor


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


def _check_base(context: RunContext) -> None:
    """Run the base once: it must take the recipe's images and, if it is to predict, know as many classes as the data."""
    name, classes = context.recipe.base.model, len(context.data.classes)
    images = torch.from_numpy(context.data.parts["train"].images[:2])
    try:
        with torch.inference_mode():
            logits, _ = extractor(context)(images)
    except (RuntimeError, TypeError, ValueError) as error:  # from inside a model that may be anybody's
        shape = " × ".join(str(size) for size in images.shape[1:])
        reason = " ".join(str(error).split()).rstrip(".")
        raise ModelError(f"Base {name!r} cannot be run on images of {shape}: {reason}.") from error
    if context.recipe.prediction == "base" and logits.shape[1] != classes:
        raise ModelError(
            f"Base {name!r} gives {logits.shape[1]} logits, and the data have {classes} classes; "
            "prediction = 'meta' in the recipe lets the meta-model predict."
        )
