from fractions import Fraction
from math import comb

import mpmath
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from qualms.decisions.binomial import beta_upper_quantile, binomial_cdf, upper_bound


def exact_cdf(k: int, n: int, p: float) -> Fraction:
    """P(X ≤ k) in exact rational arithmetic."""
    exact = Fraction(p)
    return sum((comb(n, j) * exact**j * (1 - exact) ** (n - j) for j in range(k + 1)), start=Fraction(0))


def precise_lower_tail(k: int, n: int, p: float) -> mpmath.mpf:
    """P(X ≤ k) for k below the mean, with thirty digits."""
    with mpmath.workdps(40):
        odds = (1 - mpmath.mpf(p)) / mpmath.mpf(p)
        term = total = mpmath.binomial(n, k) * mpmath.mpf(p) ** k * (1 - mpmath.mpf(p)) ** (n - k)
        for j in range(k, 0, -1):
            term *= odds * j / (n - j + 1)
            total += term
            if term < total * mpmath.mpf("1e-30"):
                break
        return total


@given(st.integers(1, 40), st.data())
def test_the_cdf_equals_rational_arithmetic(n: int, data: st.DataObject) -> None:
    k = data.draw(st.integers(0, n))
    p = data.draw(st.sampled_from([2.0**-40, 1e-6, 0.01, 0.3, 0.5, 0.77, 0.99, 1 - 2.0**-40]))
    assert binomial_cdf(k, n, p) == pytest.approx(float(exact_cdf(k, n, p)), rel=1e-12, abs=0)


@pytest.mark.parametrize("n", [10, 17, 300, 10_000, 1_000_000])
@pytest.mark.parametrize("p", [1e-5, 0.01, 0.05, 0.5, 0.9])
@pytest.mark.parametrize("deviations", [-6, -3, -1.6, 0, 1.6, 3, 6])
def test_the_cdf_equals_scipy(n: int, p: float, deviations: float) -> None:
    k = min(n, max(0, round(n * p + deviations * (n * p * (1 - p)) ** 0.5)))
    # scipy has an error of 5e-11 at n = 1,000,000 and p = 1e-5; the tests with exact oracles are stricter.
    assert binomial_cdf(k, n, p) == pytest.approx(float(stats.binom.cdf(k, n, p)), rel=1e-10, abs=0)


@pytest.mark.parametrize(
    ("k", "n", "p"),
    [
        (1, 1_000_000, 1e-5),
        (499_000, 1_000_000, 0.5),
        (0, 1_000_000, 5e-4),
        (200, 1_000_000, 1e-3),
        (46_000, 1_000_000, 0.05),
        (495_000, 1_000_000, 0.5),
        (988_000, 1_000_000, 0.99),
        (100, 5_000, 0.1),
        (1, 500, 0.5),
    ],
)
def test_tiny_tails_are_accurate_to_twelve_digits(k: int, n: int, p: float) -> None:
    expected = precise_lower_tail(k, n, p)
    assert binomial_cdf(k, n, p) == pytest.approx(float(expected), rel=1e-12, abs=0)


def test_a_tail_below_the_float_range_is_zero() -> None:
    assert binomial_cdf(1_000, 1_000_000, 0.5) == 0.0


@pytest.mark.parametrize(
    ("k", "n", "p", "expected"),
    [
        (-1, 10, 0.3, 0.0),
        (10, 10, 0.3, 1.0),
        (11, 10, 0.3, 1.0),
        (0, 0, 0.3, 1.0),
        (0, 10, 0.0, 1.0),
        (9, 10, 1.0, 0.0),
        (10, 10, 1.0, 1.0),
        (0, 10, 5e-324, 1.0),
    ],
)
def test_edge_cases_of_the_cdf(k: int, n: int, p: float, expected: float) -> None:
    assert binomial_cdf(k, n, p) == expected


@pytest.mark.parametrize(("n", "p"), [(-1, 0.5), (10, -0.1), (10, 1.1), (10, float("nan"))])
def test_the_cdf_refuses_invalid_arguments(n: int, p: float) -> None:
    with pytest.raises(ValueError, match="n ≥ 0 and 0 ≤ p ≤ 1"):
        binomial_cdf(0, n, p)


@pytest.mark.parametrize(("errors", "n"), [(0, 1), (0, 59), (0, 299), (3, 10), (9, 10), (12, 4_000), (700, 100_000)])
@pytest.mark.parametrize("confidence", [0.9, 0.95, 0.999])
def test_the_upper_bound_equals_scipys_clopper_pearson_bound(errors: int, n: int, confidence: float) -> None:
    interval = stats.binomtest(errors, n, alternative="less").proportion_ci(confidence)
    assert upper_bound(errors, n, confidence) == pytest.approx(float(interval.high), rel=1e-10)


def test_rounding_never_makes_the_upper_bound_too_small() -> None:
    for errors, n in [(0, 100), (7, 333), (41, 2_000)]:
        assert binomial_cdf(errors, n, upper_bound(errors, n)) <= 1 - 0.95


@pytest.mark.parametrize("n", [0, 1, 50])
def test_the_upper_bound_is_one_if_all_trials_are_errors(n: int) -> None:
    assert upper_bound(n, n) == 1.0


@pytest.mark.parametrize(("errors", "n"), [(-1, 5), (6, 5)])
def test_the_upper_bound_refuses_invalid_counts(errors: int, n: int) -> None:
    with pytest.raises(ValueError, match="0 ≤ errors ≤ n"):
        upper_bound(errors, n)


@pytest.mark.parametrize(("k", "n"), [(1, 1), (1, 299), (84, 2_000), (100, 2_000), (2_000, 2_000)])
@pytest.mark.parametrize("tail", [0.001, 0.05, 0.5])
def test_the_beta_quantile_equals_scipy(k: int, n: int, tail: float) -> None:
    expected = float(stats.beta.isf(tail, k, n + 1 - k))
    assert beta_upper_quantile(k, n, tail) == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize(("k", "n", "tail"), [(0, 5, 0.1), (6, 5, 0.1), (1, 5, 0.0), (1, 5, 1.0)])
def test_the_beta_quantile_refuses_invalid_arguments(k: int, n: int, tail: float) -> None:
    with pytest.raises(ValueError, match="1 ≤ k ≤ n and 0 < tail < 1"):
        beta_upper_quantile(k, n, tail)
