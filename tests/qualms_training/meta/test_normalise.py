"""Normalisation is the textbook's, channel by channel, whatever the layout in memory."""

import numpy as np
import pytest
import torch

from qualms_training.meta.normalise import Normalise

MEAN, STD = [0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616]


def test_it_is_pixels_over_255_less_the_mean_over_the_deviation() -> None:
    images = np.random.default_rng(0).integers(0, 256, (3, 5, 7, 3), dtype=np.uint8)
    found = Normalise(MEAN, STD)(torch.from_numpy(images))
    want = ((images / 255 - MEAN) / STD).transpose(0, 3, 1, 2)
    assert found.shape == (3, 3, 5, 7)
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("pixel", "value"), [(0, -1.0), (255, 1.0)])
def test_the_ends_of_the_range_are_exact(pixel: int, value: float) -> None:
    images = torch.full((1, 2, 2, 1), pixel, dtype=torch.uint8)
    np.testing.assert_allclose(Normalise([0.5], [0.5])(images), value, rtol=1e-6)


def test_its_numbers_are_no_weights_to_train() -> None:
    module = Normalise(MEAN, STD)
    assert not list(module.parameters())
    assert set(module.state_dict()) == {"scale", "shift"}
