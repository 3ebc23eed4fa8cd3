"""Speed-up by the feature cache: meta-training on cached features against running the base in every epoch."""

import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from rich.table import Table
from torch import Tensor

from qualms_training.bench.random_networks import CLASSES, random_images, random_parts
from qualms_training.console import Display
from qualms_training.fitting.feature_cache import cached_features
from qualms_training.fitting.loop import Hooks, Schedule, make_optimizer, run
from qualms_training.meta.dirichlet import negative_elbo
from qualms_training.models import count_parameters
from qualms_training.recipe import load_recipe

Batch = Callable[[NDArray[np.int64]], list[Tensor]]


def bench_fit(recipe_name: str, images: int, epochs: int, display: Display | None = None) -> float:
    """Print both times, their ratio, the cache's size and the peak memory; return the ratio, filling included."""
    display = display or Display()
    recipe, device = load_recipe(recipe_name), torch.device("cpu")
    section = recipe.meta.model_copy(update={"epochs": epochs})
    pixels = random_images(recipe, images)
    labels = torch.from_numpy(np.random.default_rng(1).integers(0, CLASSES, images))
    prior = torch.ones(CLASSES, dtype=torch.float64)
    extractor, meta = random_parts(recipe)

    def train(batch: Batch, folder: Path, title: str) -> float:
        _, model = random_parts(recipe)

        def loss(indices: NDArray[np.int64], _: torch.Generator) -> Tensor:
            weight = section.kl_weight_for(CLASSES)
            return negative_elbo(model(batch(indices)), labels[torch.from_numpy(indices)], weight, prior)

        schedule = Schedule(images, section.batch, epochs, section.rate(images), 0, section.clip_norm)
        start = time.perf_counter()
        with display.training_bar(title, schedule.steps) as advance:
            run(model, make_optimizer(model, section), loss, schedule, folder / title, title, Hooks(on_step=advance))
        return time.perf_counter() - start

    @torch.no_grad()
    def through_base(indices: NDArray[np.int64]) -> list[Tensor]:
        taps: list[Tensor] = extractor(torch.from_numpy(pixels[indices]))[1]
        return taps

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        start = time.perf_counter()
        with display.bar("filling the cache", images) as advance:
            features = cached_features(extractor, pixels, folder / "cache", device, progress=advance)
        filling = time.perf_counter() - start
        cached = train(lambda indices: features.batch(indices, device), folder, "cached")
        uncached = train(through_base, folder, "base every epoch")
        size = features.bytes

    table = Table(title=f"{recipe.name}: {images:,} images, {epochs} epochs", title_justify="left", show_header=False)
    table.add_row("meta-model", f"{count_parameters(meta):,} parameters ({recipe.meta.form})")
    table.add_row("base run in every epoch", f"{uncached:.1f} s")
    table.add_row("cache filled once", f"{filling:.1f} s")
    table.add_row("epochs on the cache", f"{cached:.1f} s")
    table.add_row("faster, filling included", f"{uncached / (filling + cached):.1f} ×")
    table.add_row("faster, epochs alone", f"{uncached / cached:.1f} ×")
    table.add_row("cache on disk", f"{size / 1e6:.1f} MB ({size / images / 1e3:.1f} kB per image)")
    table.add_row("peak memory", f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3:,.0f} MB")
    display.console.print(table)
    return uncached / (filling + cached)
