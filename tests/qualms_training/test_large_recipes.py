"""Recipes meant for a GPU: a few training steps of base and meta-model at full width, on a few images."""

from pathlib import Path

import numpy as np
import pytest
import torch

from qualms_training.bench.random_networks import random_images
from qualms_training.fitting.base_trainer import train_base
from qualms_training.fitting.feature_cache import cached_features
from qualms_training.fitting.loop import Hooks
from qualms_training.fitting.meta_trainer import StoppingData, head_outputs, train_meta
from qualms_training.meta.extractor import Extractor, Normalise, build_reduce
from qualms_training.meta.meta_model import PooledMeta, build_meta
from qualms_training.meta.taps.tapped import Tapped
from qualms_training.models import build, freeze
from qualms_training.recipe import Optimisation, load_recipe

pytestmark = pytest.mark.slow

STEPS = 2
IMAGES = 8
CPU = torch.device("cpu")


def shortened(section: Optimisation) -> Optimisation:
    return section.model_copy(update={"epochs": 1, "batch": IMAGES // STEPS})


@pytest.mark.parametrize("name", ["cifar10-vgg16", "cifar10-vgg16-pooled", "cifar100-wrn"])
def test_base_and_meta_model_of_a_gpu_recipe_train_for_a_few_steps(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qualms_training.fitting.loop.save_torch", lambda *_: None)  # checkpoints would be gigabytes
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
    reduce = build_reduce(meta)
    assert recipe.base.taps != "auto"
    extractor = Extractor(normalise, Tapped(freeze(base), recipe.base.taps), reduce).eval()
    features = cached_features(extractor, images, tmp_path / "features", CPU)
    model = build_meta(meta, [(tap.shape[1],) for tap in features.taps], classes, seed=0)
    if isinstance(model, PooledMeta):
        model.fit_scales([torch.from_numpy(np.array(tap)) for tap in features.taps])
    train_meta(
        model, features, labels, StoppingData(features, labels, [features]), shortened(meta),  # type: ignore[arg-type]
        seed=0, checkpoint=tmp_path / "meta.pt", fingerprint="meta", device=CPU, hooks=hooks,
    )  # fmt: skip
    assert len(losses) == 2 * STEPS
    assert np.isfinite(losses).all()
    assert head_outputs(model, features, CPU).shape == (IMAGES, classes)
