"""Scores of Dir(α), KL divergence and the training objective.

Training and the exported graph use the same implementation. It computes in float64, because float32 loses all digits of
the mutual information when α_0 is large; the scores are returned as float32. The meta-model's α is given as z = log α,
which it predicts.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from qualms_training.meta.special_functions import digamma, gamma_terms, log_gamma


class DirichletScores(NamedTuple):
    """Scores of Dir(α); the fields are outputs of the graph, with the same names and in the same order."""

    probabilities: Tensor
    """(N, K), α / α_0"""
    alpha: Tensor
    """(N, K)"""
    entropy: Tensor
    """(N,), total: entropy of the expected categorical distribution"""
    max_probability: Tensor
    """(N,), total"""
    mutual_information: Tensor
    """(N,), epistemic: entropy − expected entropy"""
    differential_entropy: Tensor
    """(N,), epistemic; not monotone in the evidence where α is below 1"""
    precision: Tensor
    """(N,), epistemic: α_0"""
    log_precision: Tensor
    """(N,), epistemic: log α_0"""
    expected_entropy: Tensor
    """(N,), aleatoric"""
    error_probability: Tensor
    """(N,), total: 1 − max probability, computed without cancellation"""


def dirichlet_scores(log_alpha: Tensor) -> DirichletScores:
    """All scores of Dir(exp(log_alpha)), log_alpha (N, K), as float32."""
    alpha = log_alpha.double().exp()
    total = alpha.sum(dim=-1, keepdim=True)
    values = _evidence_scores(torch.cat([alpha, total], dim=-1))
    return _scores(alpha, total, is_largest(alpha), [value.float() for value in values])


def joined_scores(
    alpha: Tensor, total: Tensor, meta_alpha: Tensor, meta_total: Tensor, is_top: Tensor
) -> tuple[DirichletScores, Tensor]:
    """All scores of Dir(alpha) and the mutual information of Dir(meta_alpha), as float32.

    alpha and meta_alpha (N, K) and their sums `total` and `meta_total` (N, 1) are float64; is_top (N, K) is true for the
    largest α of each row. Both distributions go through the same nodes, and all values are converted together: at batch 1,
    a node takes more time than its arithmetic.
    """
    both = torch.cat([alpha, total, meta_alpha, meta_total], dim=-1)
    values = torch.cat(_evidence_scores(torch.unflatten(both, -1, (2, alpha.shape[-1] + 1))), dim=-1).float()
    own = [values[:, 2 * index] for index in range(values.shape[1] // 2)]
    return _scores(alpha, total, is_top, own), values[:, 2 * _INFORMATION + 1]


def is_largest(values: Tensor) -> Tensor:
    """(N, K) to a mask (N, K) that is true at the first largest value of each row."""
    return torch.arange(values.shape[-1], device=values.device) == values.argmax(dim=-1, keepdim=True)


_INFORMATION = 1
"""position of the mutual information among the results of `_evidence_scores`"""


def _evidence_scores(x: Tensor) -> tuple[Tensor, ...]:
    """Entropy, mutual information, expected and differential entropy, log α_0 and α_0, of x = (α, α_0) (…, K + 1)."""
    classes = x.shape[-1] - 1
    signs = torch.tensor([-1.0] * classes + [1.0], dtype=torch.float64, device=x.device)
    centres = torch.tensor([1.0] * classes + [float(classes)], dtype=torch.float64, device=x.device)
    terms, log_x = gamma_terms(x), x.log()
    # With these weights, Σ over x is f(α_0) − Σ p f(α).
    weights = x / x[..., -1:] * signs
    entropy = (weights * log_x).sum(dim=-1)
    information = (weights * (log_x - terms.digamma1)).sum(dim=-1)
    # log B(α) + (α_0 − K) ψ(α_0) − Σ (α_k − 1) ψ(α_k), with ψ(x) = ψ(x + 1) − 1/x and log Γ(x) = log Γ(x + 1) − log x:
    # the same expression for every α, with 1, and for α_0, with K and the opposite sign.
    each = terms.log_gamma1 - log_x - (x - centres) * (terms.digamma1 - x.reciprocal())
    return entropy, information, entropy - information, each @ -signs, log_x[..., -1], x[..., -1]


def _scores(alpha: Tensor, total: Tensor, is_top: Tensor, values: Sequence[Tensor]) -> DirichletScores:
    """The scores from α (N, K), α_0 (N, 1) and the results of `_evidence_scores` as float32."""
    entropy, information, expected_entropy, differential, log_total, flat_total = values
    p = alpha / total
    return DirichletScores(
        alpha=alpha.float(),
        probabilities=p.float(),
        entropy=entropy,
        max_probability=p.amax(dim=-1).float(),
        mutual_information=information,
        differential_entropy=differential,
        precision=flat_total,
        log_precision=log_total,
        expected_entropy=expected_entropy,
        error_probability=torch.where(is_top, 0.0, p).sum(dim=-1).float(),
    )


def kl_divergence(log_alpha: Tensor, prior: Tensor) -> Tensor:
    """KL(Dir(α) ‖ Dir(β)) in float64, (N,), for log_alpha (N, K) and prior β (K,) or (N, K)."""
    alpha = log_alpha.double().exp()
    beta = prior.double()
    total = alpha.sum(dim=-1)
    log_normalisers = (
        log_gamma(total) - log_gamma(alpha).sum(dim=-1) - log_gamma(beta.sum(dim=-1)) + log_gamma(beta).sum(dim=-1)
    )
    return log_normalisers + ((alpha - beta) * (digamma(alpha) - digamma(total).unsqueeze(-1))).sum(dim=-1)


def negative_elbo(log_alpha: Tensor, labels: Tensor, weight: float, prior: Tensor) -> Tensor:
    """Mean of −[ψ(α_y) − ψ(α_0) − λ KL(Dir(α) ‖ Dir(β))]; its minimiser is α = β + η / λ.

    log_alpha (N, K), labels (N,) int64, weight λ > 0, prior β (K,).
    """
    alpha = log_alpha.double().exp()
    chosen = alpha.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    log_likelihood = digamma(chosen) - digamma(alpha.sum(dim=-1))
    return (weight * kl_divergence(log_alpha, prior) - log_likelihood).mean()
