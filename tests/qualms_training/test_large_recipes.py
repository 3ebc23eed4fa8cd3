"""The recipes that want a GPU: a few steps of base and meta-model on a handful of images, with every width as published."""

from pathlib import Path

import numpy as np
import pytest
import torch

from qualms_training.bench.networks import random_images
from qualms_training.fitting.base_trainer import train_base
from qualms_training.fitting.feature_cache import Extractor, cached_features
from qualms_training.fitting.loop import Hooks
from qualms_training.fitting.meta_trainer import StoppingData, outputs, train_meta
from qualms_training.meta.meta_model import PooledMeta, Reduce, build_meta
from qualms_training.meta.normalise import Normalise
from qualms_training.meta.taps import Tapped
from qualms_training.models import build, freeze
from qualms_training.recipe import Optimisation, load_recipe

STEPS = 2
IMAGES = 8
CPU = torch.device("cpu")


def shortened(section: Optimisation) -> Optimisation:
    return section.model_copy(update={"epochs": 1, "batch": IMAGES // STEPS})


@pytest.mark.parametrize("name", ["cifar10-vgg16", "cifar10-vgg16-pooled", "cifar100-wrn"])
def test_a_recipe_for_a_gpu_takes_its_first_steps(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "qualms_training.fitting.loop.save_torch", lambda *_: None
    )  # gigabytes that nobody would resume from
    recipe = load_recipe(name)
    classes = 100 if recipe.data.id == "cifar100" else 10
    images, labels = random_images(recipe, IMAGES), np.arange(IMAGES, dtype=np.int64) % classes
    spec, normalise = recipe.input, Normalise(recipe.input.mean, recipe.input.std)
    torch.manual_seed(0)
    base = build(recipe.base.model, classes, spec.channels, spec.height, spec.width)
    losses: list[float] = []
    hooks = Hooks(on_step=lambda _, loss: losses.append(loss))
    train_base(
        base, normalise, images, labels, shortened(recipe.base),  # type: ignore[arg-type]
        seed=0, checkpoint=tmp_path / "base.pt", fingerprint="base", device=CPU, hooks=hooks,
    )  # fmt: skip
    meta = recipe.meta
    reduce = Reduce("flatten") if meta.form == "published" else Reduce("pool", meta.grid, meta.statistics)
    assert recipe.base.taps != "auto"
    extractor = Extractor(normalise, Tapped(freeze(base), recipe.base.taps), reduce).eval()
    known = cached_features(extractor, images, tmp_path / "features", CPU)
    model = build_meta(meta, [(tap.shape[1],) for tap in known.taps], classes, seed=0)
    if isinstance(model, PooledMeta):
        model.fit_scales([torch.from_numpy(np.array(tap)) for tap in known.taps])
    train_meta(
        model, known, labels, StoppingData(known, labels, [known]), shortened(meta),  # type: ignore[arg-type]
        seed=0, checkpoint=tmp_path / "meta.pt", fingerprint="meta", device=CPU, hooks=hooks,
    )  # fmt: skip
    assert len(losses) == 2 * STEPS
    assert np.isfinite(losses).all()
    assert outputs(model, known, CPU).shape == (IMAGES, classes)
