"""PostNet's flows are densities, their determinants are autograd's, and its loss is the one of the paper."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import digamma
from scipy.stats import dirichlet, norm
from torch import Tensor

from qualms_training.paper.material import Labelled, Pictures
from qualms_training.paper.methods.whole_network.networks import outputs
from qualms_training.paper.methods.whole_network.postnet import HIGHEST, PostNet
from qualms_training.paper.methods.whole_network.radial_flow import RadialFlows

Picture = Callable[..., Pictures]


def flows(dimensions: int, length: int = 6, classes: int = 3) -> RadialFlows:
    """With parameters far from their first values, so that the flows both stretch and squeeze."""
    made = RadialFlows(classes, dimensions, length).double()
    generator = torch.Generator().manual_seed(0)
    for parameter in made.parameters():
        parameter.data = 1.5 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return made


@torch.no_grad()
@pytest.mark.parametrize("dimensions", [1, 2])
def test_densities_integrate_to_one(dimensions: int) -> None:
    points = {1: 40_001, 2: 1201}[dimensions]
    line = torch.linspace(-30, 30, points, dtype=torch.float64)
    grid = torch.cartesian_prod(*[line] * dimensions).reshape(-1, dimensions)
    mass = flows(dimensions)(grid).exp().sum(dim=0) * (60 / (points - 1)) ** dimensions
    np.testing.assert_allclose(mass, 1, atol=2e-3)


def test_without_flows_it_is_a_standard_normal() -> None:
    z = torch.randn(5, 3, dtype=torch.float64)
    expected = torch.from_numpy(norm.logpdf(z.numpy()).sum(axis=1))
    torch.testing.assert_close(RadialFlows(2, 3, 0).double()(z), expected[:, None].expand(5, 2))


@pytest.mark.parametrize("dimensions", [1, 2, 6])
def test_log_determinants_are_autograds(dimensions: int) -> None:
    made = flows(dimensions)
    for z in 2 * torch.randn(4, dimensions, dtype=torch.float64, generator=torch.Generator().manual_seed(1)):

        def moved(point: Tensor) -> Tensor:
            return made.move(point[None])[0][0]

        jacobians: Any = torch.autograd.functional.jacobian(moved, z)  # type: ignore[no-untyped-call]
        expected = torch.linalg.slogdet(jacobians)
        assert (expected.sign > 0).all()
        torch.testing.assert_close(made.move(z[None])[1][0], expected.logabsdet)


def test_flows_of_classes_do_not_mix() -> None:
    made = flows(2)
    z = torch.randn(4, 2, dtype=torch.float64)
    before = made(z)
    made.centre.data[:, 1] += 1
    after = made(z)
    assert torch.equal(before[:, [0, 2]], after[:, [0, 2]])
    assert not torch.equal(before[:, 1], after[:, 1])


def test_the_loss_is_expected_cross_entropy_less_weighted_entropy() -> None:
    evidence = np.random.default_rng(0).uniform(0.01, 50, size=(6, 4))
    labels, weight = np.array([0, 1, 2, 3, 0, 1]), 0.02
    alpha = 1 + evidence
    cross_entropy = digamma(alpha.sum(axis=1)) - digamma(alpha[np.arange(6), labels])
    entropy = np.array([dirichlet.entropy(row) for row in alpha])
    found = PostNet(entropy_weight=weight).loss(torch.from_numpy(np.log(evidence)), torch.from_numpy(labels))
    constant = weight * np.log(6)  # log Γ(4)
    assert float(found) == pytest.approx(np.mean(cross_entropy - weight * entropy) - constant, rel=1e-9)


@pytest.mark.parametrize("level", [-1e4, -800.0, 200.0, 1e4])
def test_no_evidence_breaks_the_loss(level: float) -> None:
    log_evidence = torch.full((2, 10), level, dtype=torch.float64, requires_grad=True)
    value = PostNet().loss(log_evidence, torch.tensor([0, 1]))
    value.backward()  # type: ignore[no-untyped-call]
    assert log_evidence.grad is not None
    assert torch.isfinite(value)
    assert torch.isfinite(log_evidence.grad).all()
    assert np.exp(16 * HIGHEST) < np.inf  # what digamma multiplies


def test_evidence_is_counts_times_densities_in_float64(picture: Picture) -> None:
    pictures, method = picture(n=129), PostNet(epochs=1)  # a last batch of one is left out
    weights = method.fit(pictures)
    assert weights == 1392 + (256 * 6 + 6) + 2 * 6 + 6 * 4 * (6 + 2)
    model: Any = method.model
    np.testing.assert_allclose(model.log_counts.exp(), np.bincount(pictures.train.labels[:-1], minlength=4))
    x = pictures.train.shown.normalise(torch.from_numpy(pictures.train.shown.images))
    with torch.inference_mode():
        latent = model.encoder(x)
        expected = model.log_counts + model.densities(latent.double())
    assert latent.shape == (129, 6)
    assert {tensor.dtype for tensor in model.densities.parameters()} == {expected.dtype} == {torch.float64}
    evidence = outputs(method.model, pictures.train.shown, pictures.device)
    torch.testing.assert_close(evidence, expected)
    alpha = 1 + evidence.exp()
    found = method.score(pictures.train.shown)
    np.testing.assert_array_equal(np.argsort(found.scores["precision"]), np.argsort(-evidence.exp().sum(dim=1).numpy()))
    np.testing.assert_allclose(found.scores["max_probability"], 1 - alpha.amax(dim=1) / alpha.sum(dim=1), atol=1e-9)


def test_doubt_goes_on_growing_where_alpha_rounds_to_one(picture: Picture, monkeypatch: pytest.MonkeyPatch) -> None:
    pictures, method = picture(n=64), PostNet(epochs=1)
    method.fit(pictures)
    far = torch.tensor([[-100.0, -90.0], [-200.0, -300.0]], dtype=torch.float64)
    monkeypatch.setattr("qualms_training.paper.methods.whole_network.postnet.outputs", lambda *_: far)
    found = method.score(pictures.train.shown)
    assert found.scores["precision"][0] < found.scores["precision"][1]


def test_training_ends_where_patience_does(picture: Picture) -> None:
    pictures = picture(n=64)
    wrong = (pictures.validation.labels + 1) % 4  # so that learning makes the validation loss worse
    pictures = replace(pictures, validation=Labelled(pictures.validation.shown, wrong))
    PostNet(epochs=40, lr=1e-2, patience=2).fit(pictures)
    state = torch.load(pictures.folder / "network.checkpoint.pt", weights_only=True)
    progress = state["progress"]
    assert len(progress["history"]) == progress["best_epoch"] + 2 < 40
