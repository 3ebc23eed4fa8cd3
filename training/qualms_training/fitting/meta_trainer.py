"""Train the Dirichlet meta-model on cached features, and select the epoch with the best uncertainty on validation data."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn

from qualms.bundle.scores import SCORES, as_uncertainty
from qualms_training.errors import DataError
from qualms_training.fitting.feature_cache import Features
from qualms_training.fitting.loop import Hooks, Progress, Schedule, make_optimizer, run
from qualms_training.meta.dirichlet import dirichlet_scores, negative_elbo
from qualms_training.recipe import MetaSection

ROWS = 4096
"""rows of features per forward pass of a head"""
Uncertainty = Callable[[Tensor], NDArray[np.float64]]
"""outputs of a head (N, K) to uncertainties (N,), larger for more uncertain images"""


@dataclass(frozen=True)
class StoppingData:
    """Validation images, their labels and noisy copies of them, on which each epoch is evaluated."""

    features: Features
    labels: NDArray[np.int64]
    noisy: list[Features]


@dataclass(frozen=True)
class Objective:
    """The loss of a head on frozen features, and the uncertainty by which its best epoch is selected."""

    loss: Callable[[Tensor, Tensor], Tensor]
    """outputs (N, K) and labels (N,) to the mean loss"""
    uncertainty: Uncertainty


def dirichlet_objective(section: MetaSection) -> Objective:
    """The paper's objective: the ELBO of Dir(α), with the recipe's stop score."""

    def loss(log_alpha: Tensor, labels: Tensor) -> Tensor:
        prior = torch.full(log_alpha.shape[1:], section.prior, dtype=torch.float64, device=log_alpha.device)
        return negative_elbo(log_alpha, labels, section.kl_weight_for(log_alpha.shape[1]), prior)

    def uncertainty(log_alpha: Tensor) -> NDArray[np.float64]:
        values = getattr(dirichlet_scores(log_alpha), section.stop_score).numpy()
        return as_uncertainty(values, SCORES[section.stop_score].direction)

    return Objective(loss, uncertainty)


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
    """Train `model` in place, by default with the paper's objective; it ends with the weights of the best epoch.

    Without `stopping`, it ends with those of the last epoch.
    """
    objective = objective or dirichlet_objective(section)
    model.to(device)
    targets = torch.from_numpy(labels).to(device)
    rate = section.rate(len(labels))
    schedule = Schedule(len(labels), section.batch, section.epochs, rate, seed, section.clip_norm)

    def loss(indices: NDArray[np.int64], _: torch.Generator) -> Tensor:
        return objective.loss(model(features.batch(indices, device)), targets[torch.from_numpy(indices)])

    select = None if stopping is None else _selector(stopping, section, objective.uncertainty, device)
    hooks = replace(hooks or Hooks(), select=select)
    return run(model, make_optimizer(model, section), loss, schedule, checkpoint, fingerprint, hooks)


@torch.inference_mode()
def head_outputs(model: nn.Module, features: Features, device: torch.device) -> Tensor:
    """The outputs of a head for all features, (N, K), on the CPU."""
    parts = []
    for start in range(0, len(features.logits), ROWS):
        indices = np.arange(start, min(start + ROWS, len(features.logits)))
        parts.append(model(features.batch(indices, device)).cpu())
    return torch.cat(parts)


def _selector(
    stopping: StoppingData, section: MetaSection, uncertainty: Uncertainty, device: torch.device
) -> Callable[[nn.Module], float]:
    """A function of the model: the AUROC of its uncertainty for the recipe's stop task."""
    wrong = stopping.features.logits.argmax(axis=1) != stopping.labels
    if section.stop_task == "misclassification" and not 0 < wrong.sum() < len(wrong):
        raise DataError(
            f"The base makes {int(wrong.sum())} errors on {len(wrong)} validation images, "
            "so stop_task = 'misclassification' is not possible; enlarge the split or use stop_task = 'ood'."
        )

    def by_noise(model: nn.Module) -> float:
        clean = uncertainty(head_outputs(model, stopping.features, device))
        values = []
        for noisy in stopping.noisy:
            both = np.concatenate([clean, uncertainty(head_outputs(model, noisy, device))])
            values.append(roc_auc_score(np.arange(len(both)) >= len(clean), both))
        return float(np.mean(values))

    def by_errors(model: nn.Module) -> float:
        return float(roc_auc_score(wrong, uncertainty(head_outputs(model, stopping.features, device))))

    return by_noise if section.stop_task == "ood" else by_errors
