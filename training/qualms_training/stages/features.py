"""Stage 2: the frozen base runs once over all that the meta-model and the doubter are made from."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qualms_training.data.noise import NOISES, apply_noise
from qualms_training.fitting.feature_cache import Extractor, Features, cached_features, is_cached
from qualms_training.meta.meta_model import Reduce
from qualms_training.meta.taps import Tapped, choose_taps
from qualms_training.stages import base
from qualms_training.stages.context import RunContext


def run(context: RunContext) -> None:
    """Fill the cache and say how large it is."""
    sets = [features(context, "train"), features(context, "validation"), *noisy_features(context)]
    if context.recipe.fuses:
        sets += [features(context, "fit"), *noisy_fit_features(context).values()]
    size = sum(found.bytes for found in sets)
    names = extractor(context).tapped.names
    context.display.note(f"  {len(names)} taps ({', '.join(names)}): {size / 1e6:,.0f} MB cached")


def extractor(context: RunContext) -> Extractor:
    """The frozen part of the graph: normalisation, base, taps and their reduction."""

    def make() -> Extractor:
        meta, model = context.recipe.meta, base.frozen_base(context)
        reduce = Reduce("flatten") if meta.form == "published" else Reduce("pool", meta.grid, meta.statistics)
        named = context.recipe.base.taps
        names = choose_taps(model.cpu(), example(context)) if named == "auto" else named
        return Extractor(context.normalise, Tapped(model, names), reduce).eval()

    return context.once("extractor", make)


def example(context: RunContext) -> Tensor:
    """Two normalised images (2, C, H, W), to find shapes with."""
    with torch.no_grad():
        images: Tensor = context.normalise.cpu()(torch.from_numpy(context.data.parts["train"].images[:2]))
    return images


def features(context: RunContext, split: str) -> Features:
    """Features of a split."""
    return _cached(context, split, context.data.parts[split].images)


def noisy_features(context: RunContext) -> list[Features]:
    """Features of noisy copies of the validation images, where stopping needs them."""
    meta = context.recipe.meta
    if meta.stop_task != "ood":
        return []
    images = context.data.parts["validation"].images
    return [
        _cached(context, "+".join(kinds), apply_noise(images, kinds, np.random.default_rng([context.seed, draw])))
        for kinds in meta.stop_noise
        for draw in range(meta.noise_draws)
    ]


def noisy_fit_features(context: RunContext) -> dict[str, Features]:
    """Features of the fit images under every kind of noise, which doubts are weighed by."""
    images = context.data.parts["fit"].images
    return {
        kind: _cached(context, f"{kind}, fit", apply_noise(images, [kind], np.random.default_rng([context.seed, at])))
        for at, kind in enumerate(NOISES)
    }


def _cached(context: RunContext, title: str, images: NDArray[np.uint8]) -> Features:
    """Features of any images, of which the bar says `title`."""
    root = context.cache / "features"
    if not is_cached(extractor(context), images, root, context.device):
        context.must_make("features")
    with context.display.bar(f"features of {title}", len(images)) as advance:
        return cached_features(extractor(context), images, root, context.device, progress=advance)
