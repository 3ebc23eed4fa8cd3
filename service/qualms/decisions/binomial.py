"""Exact binomial tails and their inverses, on which all guarantees are based; scipy is not a dependency of the service.

Probability masses are computed from Stirling's remainder and the deviance (Loader 2000) instead of differences of large
log-gammas, which is accurate to twelve digits for a million trials. A tail is the mass at its end times the sum of the
ratios of successive masses, summed towards decreasing masses.
"""

import math

import numpy as np

_HALF_LOG_TAU = 0.5 * math.log(2 * math.pi)
_SERIES_FROM = 16
"""From this value on, four terms of Stirling's series have an error of 1e-14; below it, lgamma is as accurate."""


def binomial_cdf(k: int, n: int, p: float) -> float:
    """P(X ≤ k) for X ~ Bin(n, p), accurate to about twelve digits even if it is tiny."""
    if n < 0 or not 0.0 <= p <= 1.0:
        raise ValueError(f"binomial_cdf takes n ≥ 0 and 0 ≤ p ≤ 1, not n = {n} and p = {p}.")
    if k < 0:
        return 0.0
    if k >= n or p == 0.0:
        return 1.0
    if p == 1.0:
        return 0.0
    q = 1.0 - p
    if k < (n + 1) * p:
        return _lower_tail(k, n, p, q)
    return 1.0 - _lower_tail(n - k - 1, n, q, p)


def upper_bound(errors: int, n: int, confidence: float = 0.95) -> float:
    """Clopper–Pearson upper confidence bound of the error rate, given `errors` in `n` trials."""
    if not 0 <= errors <= n:
        raise ValueError(f"upper_bound takes 0 ≤ errors ≤ n, not errors = {errors} and n = {n}.")
    if errors == n:
        return 1.0
    return beta_upper_quantile(errors + 1, n, 1.0 - confidence)


def beta_upper_quantile(k: int, n: int, tail: float) -> float:
    """The q with P(Beta(k, n + 1 − k) > q) = tail, computed by bisection of P(Bin(n, q) ≤ k − 1) = tail.

    The result is the upper end of the last interval, so rounding only makes the bound larger.
    """
    if not 1 <= k <= n or not 0.0 < tail < 1.0:
        raise ValueError(
            f"beta_upper_quantile takes 1 ≤ k ≤ n and 0 < tail < 1, not k = {k}, n = {n} and tail = {tail}."
        )
    low, high = 0.0, 1.0
    while low < (middle := 0.5 * (low + high)) < high:
        if binomial_cdf(k - 1, n, middle) > tail:
            low = middle
        else:
            high = middle
    return high


def _lower_tail(k: int, n: int, p: float, q: float) -> float:
    """P(X ≤ k) for k at or below the mode; q = 1 − p is a parameter because 1 − (1 − p) would round a small p.

    The log mass is concave with curvature at least 4/n, so √(20n) steps below k it is smaller by 40.
    """
    steps = min(k, math.isqrt(20 * n) + 1)
    j = np.arange(k, k - steps, -1, dtype=np.float64)
    ratios = (j * q) / ((n + 1 - j) * p)
    relative = 1.0 + float(np.cumprod(ratios).sum())
    return math.exp(_log_mass(k, n, p, q) + math.log(relative))


def _log_mass(k: int, n: int, p: float, q: float) -> float:
    """Log P(X = k) for 0 < p < 1."""
    if k == 0:
        return n * _log(q, p)
    if k == n:
        return n * _log(p, q)
    return (
        _stirling_remainder(n)
        - _stirling_remainder(k)
        - _stirling_remainder(n - k)
        - _deviance(k, n * p)
        - _deviance(n - k, n * q)
        + 0.5 * math.log(n / k / (n - k))
        - _HALF_LOG_TAU
    )


def _log(p: float, complement: float) -> float:
    """Log p, computed from the smaller and thus more precise one of p and 1 − p."""
    return math.log(p) if p <= complement else math.log1p(-complement)


def _stirling_remainder(x: int) -> float:
    """Log x! minus Stirling's formula, for x ≥ 1."""
    if x < _SERIES_FROM:
        return math.lgamma(x + 1) - (x + 0.5) * math.log(x) + x - _HALF_LOG_TAU
    y = 1.0 / (x * x)
    return (1 / 12 - y * (1 / 360 - y * (1 / 1260 - y / 1680))) / x


def _deviance(x: int, mean: float) -> float:
    """x·log(x/mean) + mean − x, by a series if x is close to the mean and the terms would cancel."""
    difference, total = x - mean, x + mean
    if abs(difference) >= 0.1 * total:
        return x * math.log(x / mean) - difference
    v = difference / total
    return difference * v + 2 * x * v * sum(v ** (2 * i) / (2 * i + 1) for i in range(1, 10))
