"""The synthetic sets are repeatable, and hard enough that a small network makes some errors."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from qualms_training.data.dataset import ImageSet
from qualms_training.data.sources.synthetic import SETS, SIDE, draw, draw_shapes, draw_strokes, draw_textures
from qualms_training.errors import DataError


@pytest.mark.parametrize("drawer", [draw_shapes, draw_textures, draw_strokes])
def test_images_depend_on_the_seed_only(drawer: Callable[[int, int], ImageSet]) -> None:
    images = drawer(50, 7)
    assert np.asarray(images.images).shape == (50, SIDE, SIDE, 3)
    assert images.digest() == drawer(50, 7).digest() != drawer(50, 8).digest()
    assert set(images.labels.tolist()) == set(range(len(images.classes)))


@pytest.mark.slow
def test_sets_are_drawn_by_name() -> None:
    for name, splits in SETS.items():
        for split, (n, _) in splits.items():
            images = draw(name, split)
            assert (images.name, images.split, len(images)) == (name, split, n)


def test_train_and_test_share_no_image() -> None:
    seen, unseen = ({image.tobytes() for image in np.asarray(draw("shapes", split).images)} for split in SETS["shapes"])
    assert not seen & unseen


def test_the_error_for_an_unknown_split_lists_the_accepted_ones() -> None:
    with pytest.raises(DataError, match="'textures' has no split 'train'; accepted: test"):
        draw("textures", "train")


@pytest.mark.slow
def test_a_small_network_learns_the_shapes_but_makes_some_errors() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(
        *(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 4)),
    )
    images, labels = _tensors("train")
    optimiser = torch.optim.Adam(network.parameters(), 2e-3)
    for _ in range(3):
        for batch in torch.randperm(len(images)).view(-1, 64):
            optimiser.zero_grad()
            torch.autograd.backward(nn.functional.cross_entropy(network(images[batch]), labels[batch]))
            optimiser.step()
    images, labels = _tensors("test")
    with torch.inference_mode():
        accuracy = (network(images).argmax(1) == labels).double().mean().item()
    assert 0.9 < accuracy < 0.998


def _tensors(split: str) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = draw("shapes", split)
    pixels = torch.from_numpy(np.asarray(drawn.images)).permute(0, 3, 1, 2).float()
    return pixels / 255 - 0.5, torch.from_numpy(drawn.labels)
