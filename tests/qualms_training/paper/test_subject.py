"""A subject shows each set once, under its role's normalisation, and gives methods nothing that they may not see."""

from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from qualms_training.console import Display
from qualms_training.data.noise import apply_noise
from qualms_training.data.prepare import prepare
from qualms_training.models import freeze, identity
from qualms_training.paper import subject as module
from qualms_training.paper.material import Frozen, Pictures
from qualms_training.paper.protocol import Protocol
from qualms_training.paper.subject import Subject
from qualms_training.recipe import Recipe
from qualms_training.stages import base, features
from qualms_training.stages.context import RunContext

Alter = Callable[[Mapping[str, Any]], Recipe]
SIZES = {"train": 60, "validation": 20, "fit": 20, "calibration": 100}


@pytest.fixture
def context(tiny: Alter, tmp_path: Path, display: Display) -> RunContext:
    """A small run with an untrained base."""
    recipe = tiny({"data.splits": SIZES})
    made = RunContext(recipe, 0, tmp_path / "run", tmp_path / "cache", None, torch.device("cpu"), display)
    made.data = prepare(recipe, 0, None, display)
    return made.around(freeze(base.new_base(made)))


def make(context: RunContext, protocol: Protocol = Protocol.fair, seed: int = 0) -> Subject:
    images: NDArray[np.uint8] = context.data.parts["test"].images[:30]
    return Subject(context, protocol, seed, {"others": images, "corrupted": images})


def test_the_view_is_the_base_run_on_the_images(context: RunContext) -> None:
    subject = make(context)
    known = subject.frozen(context.folder).train
    images = torch.from_numpy(context.data.parts["train"].images)
    with torch.inference_mode():
        model = base.frozen_base(context)
        logits = model(context.normalise(images)).numpy()
    np.testing.assert_allclose(known.view.logits, logits, atol=1e-5)
    head = subject.head
    np.testing.assert_allclose(known.view.penultimate @ head.weight.T + head.bias, logits, atol=1e-2)
    same = features.features(context, "train")
    for ours, theirs in zip(known.view.features.taps, same.taps, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_noise_is_the_recipes_with_the_methods_seed(context: RunContext) -> None:
    images = context.data.parts["validation"].images
    kinds = context.recipe.meta.stop_noise[0]
    for seed in (0, 3):
        subject = make(context, seed=seed)
        expected = apply_noise(images, kinds, np.random.default_rng([seed, 0]))
        (found,) = subject.frozen(context.folder).noisy
        with torch.inference_mode():
            logits = base.frozen_base(context)(context.normalise(torch.from_numpy(expected))).numpy()
        np.testing.assert_allclose(found.logits, logits, atol=1e-5)


def test_a_pass_is_computed_once_whoever_asks(context: RunContext, monkeypatch: pytest.MonkeyPatch) -> None:
    first = make(context).frozen(context.folder).train.view
    written = sorted((context.cache / "features").iterdir())
    again = make(context, Protocol.as_published, seed=0).frozen(context.folder).train.view
    np.testing.assert_array_equal(first.logits, again.logits)
    new = sorted(set((context.cache / "features").iterdir()) - set(written))
    assert len(new) == 1  # the noisy copies, which that protocol shows otherwise


def test_roles_decide_what_a_protocol_shows(context: RunContext) -> None:
    fair, published = (make(context, protocol).shown() for protocol in Protocol)
    scales = {name: shown.normalise.scale for name, shown in published.items()}
    torch.testing.assert_close(scales["test"], fair["test"].normalise.scale)
    torch.testing.assert_close(scales["others"], torch.full((3,), 1 / 127.5))
    torch.testing.assert_close(scales["corrupted"], torch.full((3,), 1 / 255))
    assert list(fair) == ["test", "others", "corrupted"]


def test_no_method_is_given_calibration_or_test_images() -> None:
    names = {field.name for kind in (Frozen, Pictures) for field in fields(kind)}
    assert names.isdisjoint({"calibration", "test", "strangers"})


def test_whole_networks_start_from_weights_of_their_seed_and_see_noise_of_training_images(
    context: RunContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "OUTLIERS", 7)
    first, second, third = (make(context, seed=seed).pictures(context.folder) for seed in (0, 1, 0))
    weights = [made.new_network().state_dict()["fc.weight"] for made in (first, second, third)]
    assert not torch.equal(weights[0], weights[1])
    assert torch.equal(weights[0], weights[2])
    copied, frozen = first.copy_of_base(), base.frozen_base(context)
    assert identity(copied) == identity(frozen)
    assert all(parameter.requires_grad for parameter in copied.parameters())
    assert not any(parameter.requires_grad for parameter in frozen.parameters())
    (outliers,) = first.outliers()
    assert outliers.images.shape == (7, 16, 16, 3)
    np.testing.assert_array_equal(first.train.shown.images, context.data.parts["train"].images)
