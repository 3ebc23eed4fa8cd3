"""Both protocols take the same pixels; they differ in the normalisation, and only off the in-distribution data."""

import numpy as np
import pytest
import torch

from qualms_training.paper.protocol import Protocol, Role, normaliser
from qualms_training.recipe import load_recipe

INPUT = load_recipe("cifar10-resnet20").input
PIXELS = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (2, 4, 4, 3), dtype=np.uint8))


def seen(protocol: Protocol, role: Role) -> torch.Tensor:
    """What a network gets, (N, H, W, C) again."""
    values: torch.Tensor = normaliser(protocol, role, INPUT)(PIXELS)
    return values.permute(0, 2, 3, 1)


@pytest.mark.parametrize("role", Role)
def test_fair_shows_everything_as_the_recipe_says(role: Role) -> None:
    expected = (PIXELS / 255 - torch.tensor(INPUT.mean)) / torch.tensor(INPUT.std)
    torch.testing.assert_close(seen(Protocol.fair, role), expected, atol=1e-5, rtol=1e-5)


def test_as_published_normalises_by_the_role() -> None:
    torch.testing.assert_close(seen(Protocol.as_published, Role.known), seen(Protocol.fair, Role.known))
    torch.testing.assert_close(seen(Protocol.as_published, Role.stranger), PIXELS / 127.5 - 1, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(seen(Protocol.as_published, Role.noise), PIXELS / 255, atol=1e-5, rtol=1e-5)
