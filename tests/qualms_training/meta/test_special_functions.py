"""Digamma, log-gamma and their gradients agree with mpmath and scipy over the whole range."""

import mpmath
import numpy as np
import pytest
import scipy.special
import torch

from qualms_training.meta.special_functions import digamma, gamma_terms, log_gamma

# From the smallest α to the sum of a thousand largest ones.
POINTS = torch.from_numpy(np.unique(np.r_[np.geomspace(1e-6, 1e9, 121), 0.5, 1.0, 2.0, 17.0]))


@pytest.mark.parametrize(("ours", "exact"), [(digamma, mpmath.digamma), (log_gamma, mpmath.loggamma)])
def test_agrees_with_mpmath_to_ten_digits(ours: object, exact: object) -> None:
    assert callable(ours)
    assert callable(exact)
    actual = ours(POINTS)
    with mpmath.workdps(40):
        for x, value in zip(POINTS.tolist(), actual.tolist(), strict=True):
            expected = exact(mpmath.mpf(x))
            assert abs(value - expected) <= 1e-10 * max(1, abs(expected)), x


def test_gamma_terms_are_exact_near_the_pole() -> None:
    x = torch.tensor([1e-300, 1e-12, 1e-6], dtype=torch.float64)
    terms = gamma_terms(x)
    np.testing.assert_allclose(terms.digamma1, scipy.special.digamma(x.numpy() + 1), rtol=0, atol=1e-10)
    np.testing.assert_allclose(terms.log_gamma1, scipy.special.gammaln(x.numpy() + 1), rtol=0, atol=1e-10)


def test_gradients_agree_with_scipy() -> None:
    x = POINTS.clone().requires_grad_()
    (of_log_gamma,) = torch.autograd.grad(log_gamma(x).sum(), x)
    (of_digamma,) = torch.autograd.grad(digamma(x).sum(), x)
    np.testing.assert_allclose(of_log_gamma, scipy.special.digamma(POINTS.numpy()), rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(of_digamma, scipy.special.polygamma(1, POINTS.numpy()), rtol=1e-9)


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (2, 0)])
def test_results_have_the_shape_and_type_of_the_argument(shape: tuple[int, ...]) -> None:
    terms = gamma_terms(torch.ones(shape, dtype=torch.float64))
    for term in terms:
        assert term.shape == shape
        assert term.dtype == torch.float64
