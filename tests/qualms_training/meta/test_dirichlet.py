"""The Dirichlet scores and loss against arithmetic with forty digits, in PyTorch and in the exported ONNX graph."""

from functools import lru_cache
from typing import Any

import mpmath
import numpy as np
import onnx
import pytest
import scipy.special
import scipy.stats
import torch
from numpy.typing import NDArray
from torch import Tensor

from qualms.bundle.runtime import INPUT, GraphRunner
from qualms_training.bench.score_accuracy import exact_joined_scores, exact_meta_scores, scores_model
from qualms_training.meta.dirichlet import (
    DirichletScores,
    dirichlet_scores,
    is_largest,
    joined_scores,
    kl_divergence,
    negative_elbo,
)

CLASS_COUNTS = (2, 10, 100, 1000)
LOWEST, HIGHEST = np.log(1e-6), np.log(1e6)
TOLERANCE = 1e-5
DIGITS = 40


@lru_cache(maxsize=8)
def log_alphas(classes: int) -> NDArray[np.float32]:
    """z (N, K): flat, one class far above or below the others, random, and the two extremes mixed."""
    rng = np.random.default_rng(classes)
    rows = [np.full(classes, level) for level in np.linspace(LOWEST, HIGHEST, 7)]
    rows += [np.r_[HIGHEST, np.full(classes - 1, others)] for others in (LOWEST, 0.0, 5.0)]
    rows.append(np.r_[LOWEST, np.full(classes - 1, HIGHEST)])
    rows.append(np.r_[np.full(classes - 1, LOWEST), 0.0])
    rows += [rng.uniform(LOWEST, HIGHEST, classes) for _ in range(3)]
    rows.append(rng.uniform(-0.5, 0.5, classes))
    rows += [rng.permutation(np.where(np.arange(classes) % 2, LOWEST, HIGHEST)) for _ in range(2)]
    return np.stack(rows).astype(np.float32)


@lru_cache(maxsize=8)
def exact_rows(classes: int) -> list[dict[str, Any]]:
    """The textbook formulas for every row of `log_alphas`."""
    return [exact_meta_scores(row) for row in log_alphas(classes)]


def largest_errors(actual: dict[str, NDArray[np.float32]], exact_values: list[dict[str, Any]]) -> dict[str, float]:
    """By score: the largest difference, over max(1, |exact|)."""
    errors = dict.fromkeys(exact_values[0], 0.0)
    for row, exact in enumerate(exact_values):
        for name, expected in exact.items():
            error = float(abs(mpmath.mpf(float(actual[name][row])) - expected) / max(1, abs(expected)))
            errors[name] = max(errors[name], error if np.isfinite(error) else np.inf)
    return errors


def as_arrays(values: DirichletScores) -> dict[str, NDArray[np.float32]]:
    return {name: value.numpy() for name, value in values._asdict().items()}


def uniform_prior(classes: int) -> Tensor:
    return torch.ones(classes, dtype=torch.float64)


@pytest.mark.slow
@pytest.mark.parametrize("classes", CLASS_COUNTS)
def test_every_score_agrees_with_exact_arithmetic(classes: int) -> None:
    errors = largest_errors(as_arrays(dirichlet_scores(torch.from_numpy(log_alphas(classes)))), exact_rows(classes))
    assert all(error <= TOLERANCE for error in errors.values()), errors


@pytest.mark.parametrize("classes", CLASS_COUNTS)
def test_scores_are_float32_with_one_value_per_image(classes: int) -> None:
    z = torch.from_numpy(log_alphas(classes))
    for name, value in dirichlet_scores(z)._asdict().items():
        assert value.dtype == torch.float32
        assert value.shape == (z.shape if name in ("alpha", "probabilities") else z.shape[:1])


def test_small_scores_keep_their_digits() -> None:
    """1 − max probability and mutual information are smallest where their order matters most."""
    z = torch.tensor([[12.0, -10.0], [12.0, -9.0], [12.0, 12.0]])
    actual = dirichlet_scores(z)
    rest = torch.tensor([-10.0, -9.0], dtype=torch.float64).exp()
    expected = rest / (rest + torch.tensor(12.0, dtype=torch.float64).exp())
    np.testing.assert_allclose(actual.error_probability[:2], expected, rtol=1e-6)
    flat = float(np.exp(12.0))
    np.testing.assert_allclose(actual.mutual_information[2], 0.25 / flat, rtol=1e-4)  # (K − 1) / 2α_0, K = 2


@pytest.mark.parametrize("classes", CLASS_COUNTS)
def test_mutual_information_is_never_negative(classes: int) -> None:
    rng = np.random.default_rng(1)
    wide = rng.uniform(LOWEST, HIGHEST, (200, classes))
    evident = rng.uniform(HIGHEST - 1, HIGHEST, (200, classes))
    rows = np.concatenate([wide, evident, log_alphas(classes)]).astype(np.float32)
    assert dirichlet_scores(torch.from_numpy(rows)).mutual_information.min() >= 0


@pytest.mark.parametrize("classes", CLASS_COUNTS)
def test_total_uncertainty_is_epistemic_plus_aleatoric(classes: int) -> None:
    actual = dirichlet_scores(torch.from_numpy(log_alphas(classes)))
    parts = actual.mutual_information.double() + actual.expected_entropy.double()
    np.testing.assert_allclose(parts, actual.entropy.double(), rtol=0, atol=2e-6)
    np.testing.assert_allclose(actual.probabilities.sum(dim=-1), 1, rtol=1e-5)
    np.testing.assert_allclose(
        actual.max_probability.double() + actual.error_probability.double(), 1, rtol=0, atol=1e-6
    )


def test_differential_entropy_agrees_with_scipy() -> None:
    alpha = np.random.default_rng(2).uniform(0.3, 30, (20, 5))
    actual = dirichlet_scores(torch.from_numpy(np.log(alpha))).differential_entropy
    np.testing.assert_allclose(actual, [scipy.stats.dirichlet(row).entropy() for row in alpha], rtol=1e-5)


@lru_cache(maxsize=8)
def joined_rows(classes: int) -> NDArray[np.float32]:
    """Logits and log n (N, K + 1): from certain to undecided classes, and n from 0.05 to 1e7."""
    rng = np.random.default_rng(classes)
    levels = np.log([0.05, 1.0, 100.0, 1e4, 1e7])
    logits = [
        np.zeros(classes),
        np.r_[60.0, np.zeros(classes - 1)],
        np.r_[8.0, 8.0, np.full(classes - 2, -8.0)],
        3 * rng.normal(size=classes),
        12 * rng.normal(size=classes),
    ]
    return np.array([np.r_[row, level] for row in logits for level in levels], dtype=np.float32)


def joined_inputs(classes: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """α, α_0, the meta-model's α and its sum, and the mask of the predicted class for `joined_rows`."""
    rows = torch.from_numpy(joined_rows(classes)).double()
    logits, evidence = rows[:, :-1], rows[:, -1:].exp()
    meta_alpha = logits.exp()
    meta_total = meta_alpha.sum(dim=1, keepdim=True)
    return 1 + evidence * logits.softmax(dim=1), classes + evidence, meta_alpha, meta_total, is_largest(logits)


@pytest.mark.parametrize("classes", CLASS_COUNTS)
def test_scores_of_the_joined_alpha_are_those_of_any_alpha(classes: int) -> None:
    alpha, total, meta_alpha, meta_total, is_top = joined_inputs(classes)
    joined, meta_information = joined_scores(alpha, total, meta_alpha, meta_total, is_top)
    for name, expected in dirichlet_scores(alpha.log())._asdict().items():
        actual = getattr(joined, name)
        assert actual.dtype == torch.float32
        torch.testing.assert_close(actual, expected, rtol=2e-6, atol=2e-7, msg=name)
    torch.testing.assert_close(meta_information, dirichlet_scores(meta_alpha.log()).mutual_information)


@pytest.mark.slow
@pytest.mark.parametrize("classes", CLASS_COUNTS)
def test_scores_of_the_joined_alpha_agree_with_exact_arithmetic(classes: int) -> None:
    joined, meta_information = joined_scores(*joined_inputs(classes))
    actual = {**as_arrays(joined), "meta_mutual_information": meta_information.numpy()}
    exact = [exact_joined_scores(row) for row in joined_rows(classes)]
    errors = largest_errors(actual, exact)
    assert all(error <= 1e-7 for error in errors.values()), errors
    for name in ("mutual_information", "error_probability"):  # the order of small values matters too
        np.testing.assert_allclose(actual[name], [float(row[name]) for row in exact], rtol=1e-4)


def test_the_mutual_information_of_the_joined_alpha_rises_as_the_evidence_falls() -> None:
    p = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)
    evidence = torch.logspace(5, -1, 200, dtype=torch.float64).unsqueeze(1)
    alpha = 1 + evidence * p
    joined, _ = joined_scores(alpha, 3 + evidence, alpha, 3 + evidence, is_largest(alpha))
    assert (joined.mutual_information.diff() > 0).all()
    assert (joined.precision.diff() < 0).all()


exported = lru_cache(maxsize=8)(scores_model)


@pytest.mark.slow
@pytest.mark.parametrize("classes", CLASS_COUNTS)
def test_the_exported_graph_agrees_with_exact_arithmetic(classes: int) -> None:
    session = GraphRunner(exported(classes)).session
    outputs = session.run(list(DirichletScores._fields), {INPUT: log_alphas(classes)})
    actual = dict(zip(DirichletScores._fields, outputs, strict=True))
    errors = largest_errors(actual, exact_rows(classes))
    assert all(error <= TOLERANCE for error in errors.values()), errors
    assert actual["mutual_information"].min() >= 0
    np.testing.assert_allclose(actual["alpha"], np.exp(log_alphas(classes).astype(np.float64)), rtol=1e-6)


@pytest.mark.slow
def test_the_exported_graph_has_few_nodes_and_only_standard_operators() -> None:
    model = onnx.load_from_string(exported(10))
    onnx.checker.check_model(model)
    assert {node.domain for node in model.graph.node} <= {"", "ai.onnx"}
    assert not model.functions
    assert len(model.graph.node) <= 100  # each takes one or two microseconds at batch 1


def _kl_by_mpmath(alpha: NDArray[np.float64], beta: NDArray[np.float64]) -> float:
    with mpmath.workdps(DIGITS):
        a, b = ([mpmath.mpf(float(value)) for value in values] for values in (alpha, beta))
        total = mpmath.fsum(a)
        value = mpmath.loggamma(total) - mpmath.loggamma(mpmath.fsum(b))
        for left, right in zip(a, b, strict=True):
            value += mpmath.loggamma(right) - mpmath.loggamma(left)
            value += (left - right) * (mpmath.digamma(left) - mpmath.digamma(total))
        return float(value)


@pytest.mark.parametrize("classes", [2, 10, 100])
@pytest.mark.parametrize("prior", [1.0, 0.3, 7.0])
def test_kl_divergence_agrees_with_mpmath(classes: int, prior: float) -> None:
    z = torch.from_numpy(log_alphas(classes)).double()
    beta = np.full(classes, prior)
    actual = kl_divergence(z, torch.from_numpy(beta))
    for row, value in zip(z.exp().numpy(), actual.tolist(), strict=True):
        expected = _kl_by_mpmath(row, beta)
        assert abs(value - expected) <= 1e-8 * max(1, abs(expected))


def test_kl_divergence_is_zero_at_the_prior_and_positive_elsewhere() -> None:
    prior = torch.tensor([0.5, 1.0, 40.0], dtype=torch.float64)
    at_prior = kl_divergence(prior.log().unsqueeze(0), prior)
    np.testing.assert_allclose(at_prior, 0, atol=1e-11)
    assert (kl_divergence(torch.randn(50, 3, dtype=torch.float64), prior) > 0).all()


def _reference_loss(z: Tensor, labels: Tensor, weight: float, prior: Tensor) -> Tensor:
    """The same objective with torch's distributions and digamma."""
    alpha = z.double().exp()
    chosen = torch.digamma(alpha.gather(-1, labels.unsqueeze(-1)).squeeze(-1))
    posterior = torch.distributions.Dirichlet(alpha)
    reference = torch.distributions.Dirichlet(prior.expand_as(alpha))
    return (
        weight * torch.distributions.kl_divergence(posterior, reference) - chosen + torch.digamma(alpha.sum(dim=-1))
    ).mean()


@pytest.mark.parametrize("weight", [1e-3, 0.1, 1.0])
def test_loss_and_gradient_agree_with_torch_distributions(weight: float) -> None:
    generator = torch.Generator().manual_seed(3)
    z = torch.empty(64, 10, dtype=torch.float64).uniform_(-8, 10, generator=generator)
    labels = torch.randint(0, 10, (64,), generator=generator)
    prior = torch.linspace(0.5, 2, 10, dtype=torch.float64)
    results = []
    for loss in (negative_elbo, _reference_loss):
        leaf = z.clone().requires_grad_()
        value = loss(leaf, labels, weight, prior)
        results.append((float(value.detach()), torch.autograd.grad(value, leaf)[0]))
    (ours, our_gradient), (theirs, their_gradient) = results
    assert ours == pytest.approx(theirs, rel=1e-10)
    np.testing.assert_allclose(our_gradient, their_gradient, rtol=1e-8, atol=1e-9)


def test_gradient_agrees_with_finite_differences() -> None:
    z = torch.linspace(-4, 6, 12, dtype=torch.float64).reshape(3, 4).requires_grad_()
    labels = torch.tensor([0, 3, 1])
    assert torch.autograd.gradcheck(lambda x: negative_elbo(x, labels, 0.1, uniform_prior(4)), (z,))


def test_the_loss_of_float32_inputs_is_float64_with_float32_gradients() -> None:
    z = torch.zeros(2, 3, requires_grad=True)
    value = negative_elbo(z, torch.tensor([0, 1]), 0.1, uniform_prior(3))
    (gradient,) = torch.autograd.grad(value, z)
    assert value.dtype == torch.float64
    assert gradient.dtype == torch.float32


def _descend(loss: Any, classes: int) -> NDArray[np.float64]:
    """α (K,) at the end of gradient descent on z."""
    z = torch.zeros(1, classes, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [z], max_iter=500, tolerance_grad=1e-12, tolerance_change=1e-16, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        value: Tensor = loss(z)
        value.backward()  # type: ignore[no-untyped-call]
        return value

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    return np.asarray(z.detach().exp()[0], dtype=np.float64)


@pytest.mark.parametrize("weight", [1e-3, 0.01, 0.1, 1.0])
@pytest.mark.parametrize("classes", [2, 10])
def test_overfitting_one_sample_ends_at_the_closed_form_evidence(weight: float, classes: int) -> None:
    label = classes - 1
    actual = _descend(lambda z: negative_elbo(z, torch.tensor([label]), weight, uniform_prior(classes)), classes)
    expected = np.ones(classes)
    expected[label] = 1 + 1 / weight
    np.testing.assert_allclose(actual, expected, rtol=1e-4)


@pytest.mark.parametrize("weight", [0.01, 0.5])
def test_the_optimum_for_soft_labels_and_any_prior_is_prior_plus_evidence(weight: float) -> None:
    prior = torch.tensor([0.4, 1.0, 3.0], dtype=torch.float64)
    eta = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)

    def expected_loss(z: Tensor) -> Tensor:
        parts = [eta[y] * negative_elbo(z, torch.tensor([y]), weight, prior) for y in range(3)]
        return torch.stack(parts).sum()

    optimum = (prior + eta / weight).log().unsqueeze(0).requires_grad_()
    (gradient,) = torch.autograd.grad(expected_loss(optimum), optimum)
    np.testing.assert_allclose(gradient, 0, atol=1e-11)
    nearby = (optimum.detach() + 0.01).requires_grad_()
    (slope,) = torch.autograd.grad(expected_loss(nearby), nearby)
    assert slope.abs().max() > 1e-6
    np.testing.assert_allclose(_descend(expected_loss, 3), optimum.detach().exp()[0], rtol=1e-5)
