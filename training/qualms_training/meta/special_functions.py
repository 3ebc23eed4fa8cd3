"""Digamma and log-gamma from elementary operations that ONNX has, accurate over the whole range of α.

Both are evaluated at x + 1. The recurrences ψ(x) = ψ(x + 1) − 1/x and log Γ(x) = log Γ(x + 1) − log x shift the argument
up by SHIFT, where two terms of the asymptotic series are enough. The terms of the recurrences are summed along one
extra axis, so the shift is one vectorised node and not a loop; a long shift is cheaper than another term of the series,
because every node of a graph costs more time than the arithmetic inside it. Evaluation at x + 1 avoids the pole at zero
for tiny x; the caller adds the contribution of the pole. All tensors must be float64 (see qualms_training.meta.dirichlet).
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

# At x + 1 + SHIFT ≥ 25 the first omitted term of either series is below 1e-10.
SHIFT = 24
_COEFFICIENTS = 1 / 12, 1 / 120, 1 / 360, 0.5 * math.log(2.0 * math.pi) - 0.5
"""of both asymptotic series, and the constant of Stirling's"""


class GammaTerms(NamedTuple):
    """The functions of one tensor x that the Dirichlet formulas use."""

    digamma1: Tensor
    """ψ(x + 1)"""
    log_gamma1: Tensor
    """log Γ(x + 1)"""


def gamma_terms(x: Tensor) -> GammaTerms:
    """ψ(x + 1) and log Γ(x + 1), with the shape of x, for float64 x in (0, 1e12)."""
    steps = torch.arange(1, SHIFT + 1, dtype=torch.float64, device=x.device)
    # Tensors, because the ONNX exporter rounds Python numbers to float32.
    first, second, third, constant = (torch.tensor(value, dtype=x.dtype, device=x.device) for value in _COEFFICIENTS)
    shifted = x.unsqueeze(-1) + steps
    # One logarithm of the product instead of 24: 24 factors up to 1e12 stay below 1e300.
    log_product = shifted.prod(dim=-1).log()
    y = x + (SHIFT + 1)
    inverse = y.reciprocal()
    square = inverse * inverse
    log_y = y.log()
    digamma = log_y - inverse * (0.5 + inverse * (first - square * second))
    # (y − 1/2)(log y − 1) is (y − 1/2) log y − y + 1/2.
    stirling = (y - 0.5) * (log_y - 1.0) + inverse * (first - square * third)
    return GammaTerms(digamma - shifted.reciprocal().sum(dim=-1), stirling - (log_product - constant))


def digamma(x: Tensor) -> Tensor:
    """ψ(x) for float64 x > 0."""
    return gamma_terms(x).digamma1 - x.reciprocal()


def log_gamma(x: Tensor) -> Tensor:
    """log Γ(x) for float64 x > 0."""
    return gamma_terms(x).log_gamma1 - x.log()
