"""Scores of Dir(α), KL divergence and the training objective.

Training and the exported graph use the same implementation. It computes in float64, because float32 loses all digits of
the mutual information when α_0 is large; the scores are returned as float32. α is always given as z = log α: the
meta-model predicts z, and with it the entropy needs no log(0).
"""

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
    z = log_alpha.double()
    classes = z.shape[-1]
    alpha = z.exp()
    total = alpha.sum(dim=-1, keepdim=True)
    log_total = total.log()
    p = alpha / total

    # One evaluation of the gamma functions for α and α_0 together halves the number of graph nodes.
    terms = gamma_terms(torch.cat([alpha, total], dim=-1))
    psi, psi_total = terms.digamma1[:, :-1], terms.digamma1[:, -1:]
    log_gamma1, log_gamma1_total = terms.log_gamma1[:, :-1], terms.log_gamma1[:, -1:]

    entropy = (p * (log_total - z)).sum(dim=-1)
    expected_entropy = (p * (psi_total - psi)).sum(dim=-1)
    # log B(α) + (α_0 − K) ψ(α_0) − Σ (α_k − 1) ψ(α_k), with ψ(x) = ψ(x + 1) − 1/x and log Γ(x) = log Γ(x + 1) − log x
    per_class = log_gamma1 - z - (alpha - 1.0) * psi - (-z).exp()
    whole = log_total - log_gamma1_total + (total - classes) * psi_total + classes / total + (classes - 1.0)
    differential = per_class.sum(dim=-1) + whole.squeeze(-1)

    top = alpha.argmax(dim=-1, keepdim=True)
    others = torch.where(torch.arange(classes, device=z.device) == top, 0.0, alpha).sum(dim=-1)
    flat_total = total.squeeze(-1)
    return DirichletScores(
        alpha=alpha.float(),
        probabilities=p.float(),
        entropy=entropy.float(),
        max_probability=p.amax(dim=-1).float(),
        mutual_information=(entropy - expected_entropy).float(),
        differential_entropy=differential.float(),
        precision=flat_total.float(),
        log_precision=log_total.squeeze(-1).float(),
        expected_entropy=expected_entropy.float(),
        error_probability=(others / flat_total).float(),
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
