"""MC Dropout: where dropout layers are inserted, that they are active in scoring, and the scores."""

import numpy as np
import pytest
import torch
from scipy.stats import entropy
from torch import nn

from qualms_training.models import build
from qualms_training.paper.method import NotApplicableError
from qualms_training.paper.methods.whole_network.mc_dropout import enable_dropout, sample_scores, with_dropout


def test_mutual_information_is_entropy_of_the_mean_minus_mean_entropy() -> None:
    p = np.random.default_rng(0).dirichlet(np.full(5, 0.3), size=(7, 40))
    predictions, total, information = sample_scores(torch.from_numpy(np.log(p)))
    expected = entropy(p.mean(axis=0), axis=1)
    np.testing.assert_allclose(total, expected, rtol=1e-10)
    np.testing.assert_allclose(information, expected - entropy(p, axis=2).mean(axis=0), rtol=1e-8)
    np.testing.assert_array_equal(predictions, p.mean(axis=0).argmax(axis=1))
    assert bool((information >= 0).all())


def test_a_probability_that_underflows_gives_finite_scores() -> None:
    logs = torch.tensor([[[0.0, -2000.0]], [[-2000.0, 0.0]]], dtype=torch.float64)
    _, total, information = sample_scores(logs)
    assert float(total) == pytest.approx(np.log(2))
    assert float(information) == pytest.approx(np.log(2))


def test_dropout_is_inserted_before_linear_layers() -> None:
    images = torch.randn(2, 3, 32, 32)
    model = with_dropout(build("lenet", 10), 0.3, images)
    dropped = [name for name, module in model.named_modules() if isinstance(module, nn.Dropout)]
    assert dropped == ["1.fc1.0", "1.fc2.0", "1.fc3.0"]
    assert all(module.p == 0.3 for module in model.modules() if isinstance(module, nn.Dropout))
    enable_dropout(model)
    assert not torch.equal(model(images), model(images))


def test_layers_before_the_dropout_are_deterministic() -> None:
    """The only linear layer of a ResNet is its last one, so the convolutions run once for all passes."""
    images, plain = torch.randn(2, 3, 32, 32), build("resnet20", 10).eval()
    model = with_dropout(plain, 0.3, images)
    deterministic, random = model
    enable_dropout(model)
    assert torch.equal(deterministic(images), deterministic(images))
    assert not torch.equal(random(deterministic(images)), random(deterministic(images)))
    torch.testing.assert_close(model.eval()(images), plain(images))


def test_existing_dropout_layers_are_used() -> None:
    model = build("wrn16-4", 10)
    names = [name for name, _ in model.named_modules()]
    assert [name for name, _ in with_dropout(model, 0.3, torch.randn(1, 3, 32, 32))[1].named_modules()] == names
    enable_dropout(model)
    for module in model.modules():
        assert module.training == isinstance(module, nn.Dropout)  # batch normalisation stays in evaluation mode


def test_a_network_without_dropout_and_linear_layers_is_not_applicable() -> None:
    with pytest.raises(NotApplicableError, match="neither dropout nor a linear layer"):
        with_dropout(nn.Sequential(nn.Conv2d(3, 4, 1), nn.Flatten()), 0.5, torch.randn(1, 3, 4, 4))
