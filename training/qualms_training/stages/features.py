"""Stage 2: the frozen base runs once over all images that the meta-model and the OOD scores are fitted to."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from qualms_training.data.lazy_images import Pixels
from qualms_training.data.noise import apply_noise
from qualms_training.fitting.feature_cache import Features, cached_features
from qualms_training.fitting.ray_features import RayBatches
from qualms_training.meta.extractor import Extractor, build_reduce
from qualms_training.meta.taps.tapped import Tapped, choose_taps
from qualms_training.stages import base
from qualms_training.stages.context import RunContext


def run(context: RunContext) -> None:
    """Fill the cache and display its size."""
    sets = [*(features(context, split) for split in ("train", "validation", "fit")), *noisy_features(context)]
    size = sum(cached.bytes for cached in sets)
    names = extractor(context).tapped.names
    context.display.note(f"  {len(names)} taps ({', '.join(names)}): {size / 1e6:,.0f} MB cached")


def extractor(context: RunContext) -> Extractor:
    """The frozen part of the graph: normalisation, base, taps and their reduction."""

    def make() -> Extractor:
        model, taps = base.frozen_base(context), context.recipe.base.taps
        names = choose_taps(model.cpu(), example(context)) if taps == "auto" else taps
        return Extractor(context.normalise, Tapped(model, names), build_reduce(context.recipe.meta)).eval()

    return context.get_or_make("extractor", make)


def example(context: RunContext) -> Tensor:
    """Two normalised training images (2, C, H, W), to determine shapes."""
    with torch.no_grad():
        images: Tensor = context.normalise.cpu()(torch.from_numpy(context.data.parts["train"].images[:2]))
    return images


def features(context: RunContext, split: str) -> Features:
    """Features of a split."""
    return _cached(context, split, lambda: context.data.parts[split].images)


def noisy_features(context: RunContext) -> list[Features]:
    """Features of noisy copies of the validation images; none if the stop task does not need them."""
    meta = context.recipe.meta
    if meta.stop_task != "ood":
        return []
    images = context.data.parts["validation"].images

    def noisy(chain: list[str], draw: int) -> Features:
        rng = np.random.default_rng([context.seed, draw])
        return _cached(context, f"{'+'.join(chain)}, draw {draw + 1}", lambda: apply_noise(images, chain, rng))

    return [noisy(chain, draw) for chain in meta.stop_noise for draw in range(meta.noise_draws)]


def _cached(context: RunContext, title: str, images: Callable[[], Pixels]) -> Features:
    """The features of a set of images, resolved once per run because hashing the pixels takes time."""

    def make() -> Features:
        pixels = images()
        with context.display.bar(f"features of {title}", len(pixels)) as advance:
            return cached_features(
                extractor(context),
                pixels,
                context.cache / "features",
                context.device,
                progress=advance,
                before_filling=lambda: context.check_may_run("features"),
                run=None if context.cluster is None else RayBatches(context.cluster),
            )

    return context.get_or_make(f"features of {title}", make)
