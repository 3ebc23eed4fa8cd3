"""Inputs have the normalisation of their role, use each forward pass once, and contain no calibration or test images."""

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
from qualms_training.paper import inputs
from qualms_training.paper.evaluation_protocol import Protocol
from qualms_training.paper.inputs import ImageInputs, InputBuilder, PostHocInputs
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
    return made.with_base(freeze(base.new_base(made)))


def builder(context: RunContext, protocol: Protocol = Protocol.fair, seed: int = 0) -> InputBuilder:
    images: NDArray[np.uint8] = context.data.parts["test"].images[:30]
    return InputBuilder(context, protocol, seed, {"others": images, "corrupted": images})


def test_base_outputs_equal_a_forward_pass_of_the_base(context: RunContext) -> None:
    made = builder(context)
    train = made.post_hoc_inputs(context.folder).train.outputs
    images = torch.from_numpy(context.data.parts["train"].images)
    with torch.inference_mode():
        model = base.frozen_base(context)
        logits = model(context.normalise(images)).numpy()
    np.testing.assert_allclose(train.logits, logits, atol=1e-5)
    head = made.head
    np.testing.assert_allclose(train.penultimate @ head.weight.T + head.bias, logits, atol=1e-2)
    expected = features.features(context, "train")
    for ours, theirs in zip(train.features.taps, expected.taps, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_noisy_validation_images_use_the_recipes_noise_and_the_methods_seed(context: RunContext) -> None:
    images = context.data.parts["validation"].images
    chain = context.recipe.meta.stop_noise[0]
    for seed in (0, 3):
        expected = apply_noise(images, chain, np.random.default_rng([seed, 0]))
        (noisy,) = builder(context, seed=seed).post_hoc_inputs(context.folder).noisy_validation
        with torch.inference_mode():
            logits = base.frozen_base(context)(context.normalise(torch.from_numpy(expected))).numpy()
        np.testing.assert_allclose(noisy.logits, logits, atol=1e-5)


def test_a_forward_pass_is_cached_for_all_protocols(context: RunContext) -> None:
    first = builder(context).post_hoc_inputs(context.folder).train.outputs
    written = set((context.cache / "features").glob("*/"))
    again = builder(context, Protocol.as_published, seed=0).post_hoc_inputs(context.folder).train.outputs
    np.testing.assert_array_equal(first.logits, again.logits)
    new = set((context.cache / "features").glob("*/")) - written
    assert len(new) == 1  # the noisy copies, which that protocol normalises differently


def test_images_are_normalised_by_their_role(context: RunContext) -> None:
    fair, published = (builder(context, protocol).scored_images() for protocol in Protocol)
    scales = {name: images.normalise.scale for name, images in published.items()}
    torch.testing.assert_close(scales["test"], fair["test"].normalise.scale)
    torch.testing.assert_close(scales["others"], torch.full((3,), 1 / 127.5))
    torch.testing.assert_close(scales["corrupted"], torch.full((3,), 1 / 255))
    assert list(fair) == ["test", "others", "corrupted"]


def test_inputs_contain_no_calibration_test_or_ood_images() -> None:
    names = {field.name for kind in (PostHocInputs, ImageInputs) for field in fields(kind)}
    assert names.isdisjoint({"calibration", "test", "ood_images"})


def test_new_networks_depend_on_the_seed_and_outliers_are_noisy_training_images(
    context: RunContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inputs, "MAX_OUTLIERS", 7)
    first, second, third = (builder(context, seed=seed).image_inputs(context.folder) for seed in (0, 1, 0))
    weights = [made.new_network().state_dict()["fc.weight"] for made in (first, second, third)]
    assert not torch.equal(weights[0], weights[1])
    assert torch.equal(weights[0], weights[2])
    copied, frozen = first.copy_of_base(), base.frozen_base(context)
    assert identity(copied) == identity(frozen)
    assert all(parameter.requires_grad for parameter in copied.parameters())
    assert not any(parameter.requires_grad for parameter in frozen.parameters())
    (outliers,) = first.outliers()
    assert outliers.pixels.shape == (7, 16, 16, 3)
    np.testing.assert_array_equal(first.train.images.pixels, context.data.parts["train"].images)
