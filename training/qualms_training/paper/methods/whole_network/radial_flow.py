"""Radial normalising flows (Rezende & Mohamed, "Variational Inference with Normalizing Flows", ICML 2015)."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class RadialFlows(nn.Module):
    """A density for each of K classes: a chain of radial flows from the data to a standard normal distribution.

    A flow maps z to z + β (z − c) / (a + r), where r is the distance of z from its centre c. It is invertible for
    a > 0 and β > −a; the parameters are transformed so that both hold.
    """

    def __init__(self, classes: int, dimensions: int, length: int) -> None:
        super().__init__()
        spread = 1 / math.sqrt(dimensions)
        self.centre = nn.Parameter(torch.empty(length, classes, dimensions).uniform_(-spread, spread))
        self.raw_a = nn.Parameter(torch.empty(length, classes).uniform_(-spread, spread))
        self.raw_beta = nn.Parameter(torch.empty(length, classes).uniform_(-spread, spread))

    def forward(self, z: Tensor) -> Tensor:
        """Log density of z (N, D) under every class, (N, K)."""
        moved, log_determinant = self.move(z)
        normal = -0.5 * (moved.square().sum(dim=-1) + z.shape[-1] * math.log(2 * math.pi))
        return normal + log_determinant

    def move(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """z (N, D) mapped by the chain of each class, (N, K, D), and the log |determinant of its Jacobian|, (N, K)."""
        dimensions, classes = z.shape[-1], self.centre.shape[1]
        moved = z.unsqueeze(1).expand(-1, classes, -1)
        total = z.new_zeros(len(z), classes)
        for centre, raw_a, raw_beta in zip(self.centre, self.raw_a, self.raw_beta, strict=True):
            a = F.softplus(raw_a)
            beta = F.softplus(raw_beta) - a
            away = moved - centre
            h = 1 / (a + torch.linalg.vector_norm(away, dim=-1))
            # The map scales D − 1 directions across the ray by 1 + βh, and the direction along it by 1 + βh + βh′r = 1 + βah².
            total = total + (dimensions - 1) * torch.log1p(beta * h) + torch.log1p(beta * a * h.square())
            moved = moved + (beta * h).unsqueeze(-1) * away
        return moved, total
