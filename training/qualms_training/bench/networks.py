"""A recipe's networks with random weights: what benchmarks of speed need, without any training."""

import numpy as np
import torch
from numpy.typing import NDArray

from qualms_training.fitting.feature_cache import Extractor
from qualms_training.meta.meta_model import MetaModel, PooledMeta, PublishedMeta, Reduce
from qualms_training.meta.normalise import Normalise
from qualms_training.meta.ood_scores import OodScores
from qualms_training.meta.taps import Tapped, choose_taps
from qualms_training.models import build, freeze
from qualms_training.recipe import Recipe

CLASSES = 10


def random_images(recipe: Recipe, count: int) -> NDArray[np.uint8]:
    """uint8 noise (count, H, W, C)."""
    return np.random.default_rng(0).integers(0, 256, (count, *recipe.input.shape), dtype=np.uint8)


def random_parts(recipe: Recipe) -> tuple[Extractor, MetaModel]:
    """The frozen part and the meta-model of a recipe, untrained."""
    spec, section = recipe.input, recipe.meta
    torch.manual_seed(0)
    base = freeze(build(recipe.base.model, CLASSES, spec.channels, spec.height, spec.width))
    normalise = Normalise(spec.mean, spec.std)
    example = normalise(torch.from_numpy(random_images(recipe, 2)))
    taps = choose_taps(base, example) if recipe.base.taps == "auto" else recipe.base.taps
    reduce = Reduce("flatten") if section.form == "published" else Reduce("pool", section.grid, section.statistics)
    extractor = Extractor(normalise, Tapped(base, taps), reduce).eval()
    with torch.inference_mode():
        widths = [(tap.shape[1],) for tap in extractor(torch.from_numpy(random_images(recipe, 2)))[1]]
    if section.form == "published":
        return extractor, PublishedMeta(widths, CLASSES, section.branches)
    return extractor, PooledMeta(widths, CLASSES, section.hidden)


def random_doubter(recipe: Recipe, extractor: Extractor) -> OodScores | None:
    """The recipe's doubter, fitted to nothing, or None if it has none."""
    if not recipe.fuses:
        return None
    with torch.inference_mode():
        widths = [tap.shape[1] for tap in extractor(torch.from_numpy(random_images(recipe, 2)))[1]]
    return OodScores(widths, CLASSES, recipe.data.splits.fit).eval()
