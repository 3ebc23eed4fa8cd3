"""Dropout stands where it is said to, stays on in scoring, and its mutual information is the direct one."""

import numpy as np
import pytest
import torch
from scipy.stats import entropy
from torch import nn

from qualms_training.models import build
from qualms_training.paper.method import NotApplicableError
from qualms_training.paper.methods.whole_network.mc_dropout import _drop_at_test, sampled, with_dropout


def test_mutual_information_is_entropy_of_the_mean_less_mean_entropy() -> None:
    p = np.random.default_rng(0).dirichlet(np.full(5, 0.3), size=(7, 40))
    predictions, total, information = sampled(torch.from_numpy(np.log(p)))
    expected = entropy(p.mean(axis=0), axis=1)
    np.testing.assert_allclose(total, expected, rtol=1e-10)
    np.testing.assert_allclose(information, expected - entropy(p, axis=2).mean(axis=0), rtol=1e-8)
    np.testing.assert_array_equal(predictions, p.mean(axis=0).argmax(axis=1))
    assert bool((information >= 0).all())


def test_a_probability_that_underflows_does_no_harm() -> None:
    logs = torch.tensor([[[0.0, -2000.0]], [[-2000.0, 0.0]]], dtype=torch.float64)
    _, total, information = sampled(logs)
    assert float(total) == pytest.approx(np.log(2))
    assert float(information) == pytest.approx(np.log(2))


def test_dropout_is_put_in_front_of_linear_layers() -> None:
    images = torch.randn(2, 3, 32, 32)
    model = with_dropout(build("lenet", 10), 0.3, images)
    dropped = [name for name, module in model.named_modules() if isinstance(module, nn.Dropout)]
    assert dropped == ["1.fc1.0", "1.fc2.0", "1.fc3.0"]
    assert all(module.p == 0.3 for module in model.modules() if isinstance(module, nn.Dropout))
    _drop_at_test(model)
    assert not torch.equal(model(images), model(images))


def test_what_drops_nothing_is_a_part_of_its_own() -> None:
    """A ResNet's only linear layer is its last, so that its convolutions are run once for all passes."""
    images, plain = torch.randn(2, 3, 32, 32), build("resnet20", 10).eval()
    model = with_dropout(plain, 0.3, images)
    certain, drawn = model
    _drop_at_test(model)
    assert torch.equal(certain(images), certain(images))
    assert not torch.equal(drawn(certain(images)), drawn(certain(images)))
    torch.testing.assert_close(model.eval()(images), plain(images))


def test_a_networks_own_dropout_is_used() -> None:
    model = build("wrn16-4", 10)
    names = [name for name, _ in model.named_modules()]
    assert [name for name, _ in with_dropout(model, 0.3, torch.randn(1, 3, 32, 32))[1].named_modules()] == names
    _drop_at_test(model)
    for module in model.modules():
        assert module.training == isinstance(module, nn.Dropout)  # batch normalisation stays as it was learned


def test_a_network_without_either_is_refused() -> None:
    with pytest.raises(NotApplicableError, match="neither dropout nor a linear layer"):
        with_dropout(nn.Sequential(nn.Conv2d(3, 4, 1), nn.Flatten()), 0.5, torch.randn(1, 3, 4, 4))
