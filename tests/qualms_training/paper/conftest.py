"""Inputs of methods from a synthetic base: four clusters of features as training data, and OOD data outside of them."""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from qualms_training.data.noise import apply_noise
from qualms_training.data.sources.synthetic import draw_shapes
from qualms_training.fitting.feature_cache import Features
from qualms_training.models import build
from qualms_training.models.libraries.torchvision_compat import import_torchvision
from qualms_training.paper.evaluation_protocol import Protocol, Role, normaliser
from qualms_training.paper.inputs import (
    BaseOutputs,
    Head,
    ImageInputs,
    Images,
    LabelledImages,
    LabelledOutputs,
    PostHocInputs,
)
from qualms_training.recipe import Recipe

CLASSES, WIDTH = 4, 12
Alter = Callable[[Mapping[str, Any]], Recipe]
DrawOutputs = Callable[..., LabelledOutputs]
MakePostHocInputs = Callable[..., PostHocInputs]
MakeImageInputs = Callable[..., ImageInputs]


@pytest.fixture(scope="session")
def oracle() -> ModuleType:
    """The detectors of pytorch-ood, which needs torchvision's operators to be importable."""
    import_torchvision()
    import pytorch_ood.detector

    module: ModuleType = pytorch_ood.detector
    return module


@pytest.fixture(scope="session")
def head() -> Head:
    rng = np.random.default_rng(1)
    return Head(rng.normal(size=(CLASSES, WIDTH)), rng.normal(size=CLASSES))


@pytest.fixture(scope="session")
def draw_outputs(head: Head) -> DrawOutputs:
    """Base outputs of n images, `shift` away from the training data; the share `wrong` of labels is random."""

    def make(n: int, seed: int, shift: float = 0.0, wrong: float = 0.1) -> LabelledOutputs:
        rng = np.random.default_rng(seed)
        centres = 2 * np.random.default_rng(0).normal(size=(CLASSES, WIDTH))
        centres -= centres.mean(axis=0)
        cluster = rng.integers(CLASSES, size=n)
        points = centres[cluster] + rng.normal(size=(n, WIDTH)) + shift
        feature = points.astype(np.float32)
        logits = (feature @ head.weight.T + head.bias).astype(np.float32)
        labels = np.where(rng.random(n) < wrong, rng.integers(CLASSES, size=n), logits.argmax(axis=1))
        taps: list[NDArray[Any]] = [feature[:, :8] * 3, np.tanh(feature[:, 4:])]
        return LabelledOutputs(BaseOutputs(Features(taps, logits, Path("nowhere")), feature), labels.astype(np.int64))

    return make


@pytest.fixture
def make_post_hoc_inputs(draw_outputs: DrawOutputs, head: Head, tiny: Alter, tmp_path: Path) -> MakePostHocInputs:
    """Inputs of a post-hoc method; keyword arguments change values of the tiny recipe."""

    def make(n: int = 400, seed: int = 0, **changes: Any) -> PostHocInputs:
        recipe = tiny({"meta.epochs": 2, **{key.replace("__", "."): value for key, value in changes.items()}})
        noisy = [draw_outputs(150, seed=20 + kind, shift=2.0 + kind).outputs for kind in range(2)]
        return PostHocInputs(
            train=draw_outputs(n, seed=10),
            validation=draw_outputs(150, seed=11),
            fit=draw_outputs(150, seed=12),
            noisy_validation=noisy,
            noisy_fit=lambda: {
                "near": draw_outputs(150, seed=30, shift=1.0).outputs,
                "far": draw_outputs(150, seed=31, shift=4.0).outputs,
            },
            head=head,
            classes=CLASSES,
            recipe=recipe,
            seed=seed,
            folder=tmp_path,
            device=torch.device("cpu"),
        )

    return make


@pytest.fixture
def make_image_inputs(tiny: Alter, tmp_path: Path) -> MakeImageInputs:
    """Inputs of a method on images: shapes; keyword arguments change values of the tiny recipe."""

    def make(n: int = 600, seed: int = 0, protocol: Protocol = Protocol.fair, **changes: Any) -> ImageInputs:
        recipe = tiny({key.replace("__", "."): value for key, value in changes.items()})
        normalise = normaliser(protocol, Role.in_distribution, recipe.input)
        normalise_noise = normaliser(protocol, Role.noise, recipe.input)
        train, validation = draw_shapes(n, seed=1), draw_shapes(200, seed=2)
        pixels = np.asarray(train.images)

        def outliers() -> list[Images]:
            return [Images(apply_noise(pixels, ["permutation"], np.random.default_rng([seed, 0])), normalise_noise)]

        def new_network(seed: int = seed) -> torch.nn.Module:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                return build(recipe.base.model, 4, 3, 16, 16)

        return ImageInputs(
            train=LabelledImages(Images(pixels, normalise), train.labels),
            validation=LabelledImages(Images(np.asarray(validation.images), normalise), validation.labels),
            outliers=outliers,
            new_network=new_network,
            copy_of_base=lambda: new_network(seed + 1),
            recipe=recipe,
            seed=seed,
            folder=tmp_path / "network",
            device=torch.device("cpu"),
        )

    return make
