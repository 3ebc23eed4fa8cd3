"""PostNet: the flows are densities, their determinants agree with autograd, and the loss is the paper's."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import digamma
from scipy.stats import dirichlet, norm
from torch import Tensor

from qualms_training.meta.special_functions import SHIFT
from qualms_training.paper.inputs import ImageInputs, LabelledImages
from qualms_training.paper.methods.whole_network.postnet import MAX_LOG_ALPHA, PostNet
from qualms_training.paper.methods.whole_network.radial_flow import RadialFlows
from qualms_training.paper.methods.whole_network.training import outputs

MakeImageInputs = Callable[..., ImageInputs]


def flows(dimensions: int, length: int = 6, classes: int = 3) -> RadialFlows:
    """Flows with parameters far from their initial values, so that they both stretch and compress."""
    made = RadialFlows(classes, dimensions, length).double()
    generator = torch.Generator().manual_seed(0)
    for parameter in made.parameters():
        parameter.data = 1.5 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return made


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("dimensions", [1, 2])
def test_densities_integrate_to_one(dimensions: int) -> None:
    points = {1: 40_001, 2: 1201}[dimensions]
    line = torch.linspace(-30, 30, points, dtype=torch.float64)
    grid = torch.cartesian_prod(*[line] * dimensions).reshape(-1, dimensions)
    mass = flows(dimensions)(grid).exp().sum(dim=0) * (60 / (points - 1)) ** dimensions
    np.testing.assert_allclose(mass, 1, atol=2e-3)


def test_without_flows_the_density_is_standard_normal() -> None:
    z = torch.randn(5, 3, dtype=torch.float64)
    expected = torch.from_numpy(norm.logpdf(z.numpy()).sum(axis=1))
    torch.testing.assert_close(RadialFlows(2, 3, 0).double()(z), expected[:, None].expand(5, 2))


@pytest.mark.parametrize("dimensions", [1, 2, 6])
def test_log_determinants_agree_with_autograd(dimensions: int) -> None:
    made = flows(dimensions)
    for z in 2 * torch.randn(4, dimensions, dtype=torch.float64, generator=torch.Generator().manual_seed(1)):

        def moved(point: Tensor) -> Tensor:
            return made.move(point[None])[0][0]

        jacobians: Any = torch.autograd.functional.jacobian(moved, z)  # type: ignore[no-untyped-call]
        expected = torch.linalg.slogdet(jacobians)
        assert (expected.sign > 0).all()
        torch.testing.assert_close(made.move(z[None])[1][0], expected.logabsdet)


def test_flows_of_different_classes_are_independent() -> None:
    made = flows(2)
    z = torch.randn(4, 2, dtype=torch.float64)
    before = made(z)
    made.centre.data[:, 1] += 1
    after = made(z)
    assert torch.equal(before[:, [0, 2]], after[:, [0, 2]])
    assert not torch.equal(before[:, 1], after[:, 1])


def test_loss_is_expected_cross_entropy_minus_weighted_entropy() -> None:
    evidence = np.random.default_rng(0).uniform(0.01, 50, size=(6, 4))
    labels, weight = np.array([0, 1, 2, 3, 0, 1]), 0.02
    alpha = 1 + evidence
    cross_entropy = digamma(alpha.sum(axis=1)) - digamma(alpha[np.arange(6), labels])
    entropy = np.array([dirichlet.entropy(row) for row in alpha])
    loss = PostNet(entropy_weight=weight).loss(torch.from_numpy(np.log(evidence)), torch.from_numpy(labels))
    constant = weight * np.log(6)  # log Γ(4)
    assert float(loss) == pytest.approx(np.mean(cross_entropy - weight * entropy) - constant, rel=1e-9)


@pytest.mark.parametrize("level", [-1e4, -800.0, 200.0, 1e4])
def test_loss_and_gradient_are_finite_for_extreme_evidence(level: float) -> None:
    log_evidence = torch.full((2, 10), level, dtype=torch.float64, requires_grad=True)
    value = PostNet().loss(log_evidence, torch.tensor([0, 1]))
    value.backward()  # type: ignore[no-untyped-call]
    assert log_evidence.grad is not None
    assert torch.isfinite(value)
    assert torch.isfinite(log_evidence.grad).all()
    assert np.isfinite(np.exp(SHIFT * (MAX_LOG_ALPHA + np.log(100))))  # the largest product in digamma, of 100 classes


def test_evidence_is_counts_times_densities_in_float64(make_image_inputs: MakeImageInputs) -> None:
    inputs, method = make_image_inputs(n=129), PostNet(epochs=1)  # the last batch, of one image, is omitted
    weights = method.fit(inputs)
    assert weights == 1392 + (256 * 6 + 6) + 2 * 6 + 6 * 4 * (6 + 2)
    model: Any = method.model
    np.testing.assert_allclose(model.log_counts.exp(), np.bincount(inputs.train.labels[:-1], minlength=4))
    x = inputs.train.images.normalise(torch.from_numpy(inputs.train.images.pixels))
    with torch.inference_mode():
        latent = model.encoder(x)
        expected = model.log_counts + model.densities(latent.double())
    assert latent.shape == (129, 6)
    assert {tensor.dtype for tensor in model.densities.parameters()} == {expected.dtype} == {torch.float64}
    evidence = outputs(method.model, inputs.train.images, inputs.device)
    torch.testing.assert_close(evidence, expected)
    alpha = 1 + evidence.exp()
    verdict = method.score(inputs.train.images)
    np.testing.assert_array_equal(
        np.argsort(verdict.scores["precision"]), np.argsort(-evidence.exp().sum(dim=1).numpy())
    )
    np.testing.assert_allclose(verdict.scores["max_probability"], 1 - alpha.amax(dim=1) / alpha.sum(dim=1), atol=1e-9)


def test_precision_score_still_orders_images_where_alpha_rounds_to_one(
    make_image_inputs: MakeImageInputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs, method = make_image_inputs(n=64), PostNet(epochs=1)
    method.fit(inputs)
    far = torch.tensor([[-100.0, -90.0], [-200.0, -300.0]], dtype=torch.float64)
    monkeypatch.setattr("qualms_training.paper.methods.whole_network.postnet.outputs", lambda *_: far)
    verdict = method.score(inputs.train.images)
    assert verdict.scores["precision"][0] < verdict.scores["precision"][1]


def test_training_ends_when_patience_is_exhausted(make_image_inputs: MakeImageInputs) -> None:
    inputs = make_image_inputs(n=64)
    wrong = (inputs.validation.labels + 1) % 4  # so that training increases the validation loss
    inputs = replace(inputs, validation=LabelledImages(inputs.validation.images, wrong))
    PostNet(epochs=40, lr=1e-2, patience=2).fit(inputs)
    state = torch.load(inputs.folder / "network.checkpoint.pt", weights_only=True)
    progress = state["progress"]
    assert len(progress["history"]) == progress["best_epoch"] + 2 < 40
