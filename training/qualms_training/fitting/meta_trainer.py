"""Train the Dirichlet meta-model on cached features and stop where its uncertainty is best on validation data."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn

from qualms.bundle.scores import SCORES, as_uncertainty
from qualms_training.errors import DataError
from qualms_training.fitting.feature_cache import Features
from qualms_training.fitting.loop import Hooks, Progress, Schedule, run
from qualms_training.fitting.optimizers import make_optimizer
from qualms_training.meta.dirichlet import negative_elbo, scores
from qualms_training.recipe import MetaSection

ROWS = 4096  # of features that a head is shown at once
Doubt = Callable[[Tensor], NDArray[np.float64]]
"""outputs of a head (N, K) to doubts (N,): larger is more doubtful"""


@dataclass(frozen=True)
class StoppingData:
    """What an epoch is judged on: validation images, their labels, and noisy copies of them."""

    features: Features
    labels: NDArray[np.int64]
    noisy: list[Features]


@dataclass(frozen=True)
class Objective:
    """What a head on frozen features is trained for, and by which of its doubts it is stopped."""

    loss: Callable[[Tensor, Tensor], Tensor]
    """outputs (N, K) and labels (N,) to the mean loss"""
    doubt: Doubt


def dirichlet_objective(section: MetaSection) -> Objective:
    """The paper's: the ELBO of Dir(α), stopped by the recipe's score."""

    def loss(log_alpha: Tensor, labels: Tensor) -> Tensor:
        prior = torch.full(log_alpha.shape[1:], section.prior, dtype=torch.float64, device=log_alpha.device)
        return negative_elbo(log_alpha, labels, section.kl_weight, prior)

    return Objective(loss, _dirichlet_doubt(section.stop_score))


def train_meta(
    model: nn.Module,
    features: Features,
    labels: NDArray[np.int64],
    stopping: StoppingData | None,
    section: MetaSection,
    *,
    seed: int,
    checkpoint: Path,
    fingerprint: str,
    device: torch.device,
    hooks: Hooks | None = None,
    objective: Objective | None = None,
) -> Progress:
    """Train `model` in place and leave the weights of the best epoch in it; by default for the paper's objective.

    Without `stopping`, the last epoch is taken for the best.
    """
    hooks = hooks or Hooks()
    objective = objective or dirichlet_objective(section)
    model.to(device)
    targets = torch.from_numpy(labels).to(device)
    rate = section.rate(len(labels))
    schedule = Schedule(len(labels), section.batch, section.epochs, rate, seed, section.clip_norm)

    def loss(indices: NDArray[np.int64], _: torch.Generator) -> Tensor:
        return objective.loss(model(features.batch(indices, device)), targets[torch.from_numpy(indices)])

    select = None if stopping is None else _selector(stopping, section, objective.doubt, device)
    chosen = Hooks(select=select, on_step=hooks.on_step, on_epoch=hooks.on_epoch)
    return run(model, make_optimizer(model, section), loss, schedule, checkpoint, fingerprint, chosen)


@torch.inference_mode()
def outputs(model: nn.Module, features: Features, device: torch.device) -> Tensor:
    """What a head says about features, (N, K), on the CPU."""
    parts = []
    for start in range(0, len(features.logits), ROWS):
        indices = np.arange(start, min(start + ROWS, len(features.logits)))
        parts.append(model(features.batch(indices, device)).cpu())
    return torch.cat(parts)


def meta_score(model: nn.Module, features: Features, score: str, device: torch.device) -> NDArray[np.float64]:
    """Doubt (N,) by one score: larger is more doubtful, whatever the score's own direction."""
    return _dirichlet_doubt(score)(outputs(model, features, device))


def _dirichlet_doubt(score: str) -> Doubt:
    direction = SCORES[score].direction
    return lambda log_alpha: as_uncertainty(getattr(scores(log_alpha), score).numpy(), direction)


def _selector(
    stopping: StoppingData, section: MetaSection, doubts: Doubt, device: torch.device
) -> Callable[[nn.Module], float]:
    """AUROC of the stopping doubts for the recipe's task."""
    wrong = stopping.features.logits.argmax(axis=1) != stopping.labels
    if section.stop_task == "misclassification" and not 0 < wrong.sum() < len(wrong):
        raise DataError(
            f"The base makes {int(wrong.sum())} errors on {len(wrong)} validation images, "
            "so stopping by misclassification has nothing to tell apart; enlarge the split or stop by ood."
        )

    def by_noise(model: nn.Module) -> float:
        clean = doubts(outputs(model, stopping.features, device))
        values = []
        for noisy in stopping.noisy:
            both = np.concatenate([clean, doubts(outputs(model, noisy, device))])
            values.append(roc_auc_score(np.arange(len(both)) >= len(clean), both))
        return float(np.mean(values))

    def by_errors(model: nn.Module) -> float:
        return float(roc_auc_score(wrong, doubts(outputs(model, stopping.features, device))))

    return by_noise if section.stop_task == "ood" else by_errors
