"""A recipe's networks with random weights, for benchmarks of speed."""

import numpy as np
import torch
from numpy.typing import NDArray

from qualms_training.meta.extractor import Extractor, Normalise, build_reduce
from qualms_training.meta.flag_score import FlagScore
from qualms_training.meta.graph import BundleGraph
from qualms_training.meta.joined_alpha import JoinedAlpha
from qualms_training.meta.meta_model import MetaModel, build_meta
from qualms_training.meta.taps.tapped import Tapped, choose_taps
from qualms_training.models import build, freeze
from qualms_training.recipe import Recipe

CLASSES = 10


def random_images(recipe: Recipe, count: int) -> NDArray[np.uint8]:
    """uint8 noise (count, H, W, C)."""
    return np.random.default_rng(0).integers(0, 256, (count, *recipe.input.shape), dtype=np.uint8)


def random_parts(recipe: Recipe, classes: int = CLASSES) -> tuple[Extractor, MetaModel]:
    """The untrained frozen part and meta-model of a recipe."""
    spec = recipe.input
    torch.manual_seed(0)
    base = freeze(build(recipe.base.model, classes, spec.channels, spec.height, spec.width))
    normalise = Normalise(spec.mean, spec.std)
    example = normalise(torch.from_numpy(random_images(recipe, 2)))
    taps = choose_taps(base, example) if recipe.base.taps == "auto" else recipe.base.taps
    extractor = Extractor(normalise, Tapped(base, taps), build_reduce(recipe.meta)).eval()
    widths = [(width,) for width in _widths(recipe, extractor)]
    return extractor, build_meta(recipe.meta, widths, classes, seed=0)


def random_graph(recipe: Recipe, classes: int = CLASSES) -> BundleGraph:
    """The recipe's whole graph; flag score and joined α are fitted to noise."""
    extractor, meta = random_parts(recipe, classes)
    count = recipe.data.splits.fit
    flag_score = FlagScore(_widths(recipe, extractor), classes, count, distance=recipe.uses_distance)
    joined_alpha = JoinedAlpha(classes, count)
    rng = np.random.default_rng(0)
    flag_score.fit_scores(rng.exponential(size=(count, 1 + len(flag_score.names))))
    joined_alpha.surprisal.fit(rng.exponential(size=(count, 1)))
    return BundleGraph(extractor, meta, flag_score, joined_alpha, recipe.prediction).eval()


def _widths(recipe: Recipe, extractor: Extractor) -> list[int]:
    with torch.inference_mode():
        return [tap.shape[1] for tap in extractor(torch.from_numpy(random_images(recipe, 2)))[1]]
