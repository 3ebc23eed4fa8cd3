"""Digamma and log-gamma from plain arithmetic, because ONNX has neither.

Both are evaluated at x + 1: the argument is shifted up by SHIFT with the recurrences ψ(x) = ψ(x + 1) − 1/x and
log Γ(x) = log Γ(x + 1) − log x, whose terms are summed along one extra axis, so that the shift costs one
vectorised node and not a loop; then three terms of the asymptotic series are enough. Working at x + 1 keeps
tiny x away from the pole at zero; what the pole contributes is simple and is added by the caller.
Everything must be float64: see qualms_training.meta.dirichlet.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

# At x + 1 + SHIFT ≥ 17 the first omitted term of either series is below 2e-12.
SHIFT = 16
_HALF_LOG_TWO_PI = 0.5 * math.log(2.0 * math.pi)


class GammaTerms(NamedTuple):
    """What the Dirichlet formulas need of one tensor x."""

    digamma1: Tensor
    """ψ(x + 1)"""
    log_gamma1: Tensor
    """log Γ(x + 1)"""


def gamma_terms(x: Tensor) -> GammaTerms:
    """ψ(x + 1) and log Γ(x + 1) for float64 x > 0, of x's shape."""
    steps = torch.arange(1, SHIFT + 1, dtype=torch.float64, device=x.device)
    ladder = x.unsqueeze(-1) + steps
    # The product of sixteen factors up to 1e9 stays below 1e150: one logarithm instead of sixteen.
    log_product = ladder.prod(dim=-1).log()
    y = x + (SHIFT + 1)
    inverse = y.reciprocal()
    square = inverse * inverse
    log_y = y.log()
    digamma = log_y - inverse * (0.5 + inverse * (1 / 12 - square * (1 / 120 - square / 252)))
    stirling = (y - 0.5) * log_y - y + _HALF_LOG_TWO_PI + inverse * (1 / 12 - square * (1 / 360 - square / 1260))
    return GammaTerms(digamma - ladder.reciprocal().sum(dim=-1), stirling - log_product)


def digamma(x: Tensor) -> Tensor:
    """ψ(x) for float64 x > 0."""
    return gamma_terms(x).digamma1 - x.reciprocal()


def log_gamma(x: Tensor) -> Tensor:
    """log Γ(x) for float64 x > 0."""
    return gamma_terms(x).log_gamma1 - x.log()
