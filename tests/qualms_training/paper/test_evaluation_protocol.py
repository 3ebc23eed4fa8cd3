"""The protocols differ in the normalisation of OOD images and noise only."""

import numpy as np
import pytest
import torch

from qualms_training.paper.evaluation_protocol import Protocol, Role, normaliser
from qualms_training.recipe import load_recipe

INPUT = load_recipe("cifar10-resnet20").input
PIXELS = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (2, 4, 4, 3), dtype=np.uint8))


def normalised(protocol: Protocol, role: Role) -> torch.Tensor:
    """The network input, with channels last, (N, H, W, C)."""
    values: torch.Tensor = normaliser(protocol, role, INPUT)(PIXELS)
    return values.permute(0, 2, 3, 1)


@pytest.mark.parametrize("role", Role)
def test_fair_normalises_every_role_with_the_recipes_values(role: Role) -> None:
    expected = (PIXELS / 255 - torch.tensor(INPUT.mean)) / torch.tensor(INPUT.std)
    torch.testing.assert_close(normalised(Protocol.fair, role), expected, atol=1e-5, rtol=1e-5)


def test_as_published_normalises_by_role() -> None:
    torch.testing.assert_close(
        normalised(Protocol.as_published, Role.in_distribution), normalised(Protocol.fair, Role.in_distribution)
    )
    torch.testing.assert_close(normalised(Protocol.as_published, Role.ood), PIXELS / 127.5 - 1, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(normalised(Protocol.as_published, Role.noise), PIXELS / 255, atol=1e-5, rtol=1e-5)
