"""A made-up base: four clusters of features that it has trained on, and strangers away from all of them."""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from qualms_training.data.noise import apply_noise
from qualms_training.data.synthetic import draw_shapes
from qualms_training.fitting.feature_cache import Features
from qualms_training.models import build
from qualms_training.models.torchvision_compat import import_torchvision
from qualms_training.paper.material import Frozen, Head, Known, Labelled, Pictures, Shown, View
from qualms_training.paper.protocol import Protocol, Role, normaliser
from qualms_training.recipe import Recipe

CLASSES, WIDTH = 4, 12
Alter = Callable[[Mapping[str, Any]], Recipe]
Draw = Callable[..., Known]
Freeze = Callable[..., Frozen]
Picture = Callable[..., Pictures]


@pytest.fixture(scope="session")
def oracle() -> ModuleType:
    """The detectors of pytorch-ood, which imports torchvision as if every installation had its operators."""
    import_torchvision()
    import pytorch_ood.detector

    module: ModuleType = pytorch_ood.detector
    return module


@pytest.fixture(scope="session")
def head() -> Head:
    rng = np.random.default_rng(1)
    return Head(rng.normal(size=(CLASSES, WIDTH)), rng.normal(size=CLASSES))


@pytest.fixture(scope="session")
def draw(head: Head) -> Draw:
    """Images by number, seed and distance from the training data; their labels are the base's opinion but for some."""

    def make(n: int, seed: int, shift: float = 0.0, wrong: float = 0.1) -> Known:
        rng = np.random.default_rng(seed)
        centres = 2 * np.random.default_rng(0).normal(size=(CLASSES, WIDTH))
        centres -= centres.mean(axis=0)
        which = rng.integers(CLASSES, size=n)
        points = centres[which] + rng.normal(size=(n, WIDTH)) + shift
        feature = points.astype(np.float32)
        logits = (feature @ head.weight.T + head.bias).astype(np.float32)
        labels = np.where(rng.random(n) < wrong, rng.integers(CLASSES, size=n), logits.argmax(axis=1))
        taps: list[NDArray[Any]] = [feature[:, :8] * 3, np.tanh(feature[:, 4:])]
        return Known(View(Features(taps, logits, Path("nowhere")), feature), labels.astype(np.int64))

    return make


@pytest.fixture
def freeze(draw: Draw, head: Head, tiny: Alter, tmp_path: Path) -> Freeze:
    """What a post-hoc method learns from, with some values of the tiny recipe changed."""

    def make(n: int = 400, seed: int = 0, **changes: Any) -> Frozen:
        recipe = tiny({"meta.epochs": 2, **{key.replace("__", "."): value for key, value in changes.items()}})
        noisy = [draw(150, seed=20 + kind, shift=2.0 + kind).view for kind in range(2)]
        return Frozen(
            train=draw(n, seed=10),
            validation=draw(150, seed=11),
            fit=draw(150, seed=12),
            noisy=noisy,
            fit_noise=lambda: {"near": draw(150, seed=30, shift=1.0).view, "far": draw(150, seed=31, shift=4.0).view},
            head=head,
            classes=CLASSES,
            recipe=recipe,
            seed=seed,
            folder=tmp_path,
            device=torch.device("cpu"),
        )

    return make


@pytest.fixture
def picture(tiny: Alter, tmp_path: Path) -> Picture:
    """What a method on images learns from: shapes, with some values of the tiny recipe changed."""

    def make(n: int = 600, seed: int = 0, protocol: Protocol = Protocol.fair, **changes: Any) -> Pictures:
        recipe = tiny({key.replace("__", "."): value for key, value in changes.items()})
        known, noise = (normaliser(protocol, role, recipe.input) for role in (Role.known, Role.noise))
        train, validation = draw_shapes(n, seed=1), draw_shapes(200, seed=2)
        images = np.asarray(train.images)

        def outliers() -> list[Shown]:
            return [Shown(apply_noise(images, ["permutation"], np.random.default_rng([seed, 0])), noise)]

        def new_network(seed: int = seed) -> torch.nn.Module:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                return build(recipe.base.model, 4, 3, 16, 16)

        return Pictures(
            train=Labelled(Shown(images, known), train.labels),
            validation=Labelled(Shown(np.asarray(validation.images), known), validation.labels),
            outliers=outliers,
            new_network=new_network,
            copy_of_base=lambda: new_network(seed + 1),
            recipe=recipe,
            seed=seed,
            folder=tmp_path / "network",
            device=torch.device("cpu"),
        )

    return make
