"""Train the Dirichlet meta-model on cached features and stop where its uncertainty is best on validation data."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn

from service.bundle.scores import SCORES, doubt
from training.dirichlet import negative_elbo, scores
from training.errors import DataError
from training.features import Features
from training.loop import Hooks, Progress, Schedule, run
from training.optimizers import make_optimizer
from training.recipe import MetaSection


@dataclass(frozen=True)
class StoppingData:
    """What an epoch is judged on: validation images, their labels, and noisy copies of them."""

    features: Features
    labels: NDArray[np.int64]
    noisy: list[Features]


def train_meta(
    model: nn.Module,
    features: Features,
    labels: NDArray[np.int64],
    stopping: StoppingData,
    section: MetaSection,
    *,
    seed: int,
    checkpoint: Path,
    fingerprint: str,
    device: torch.device,
    hooks: Hooks | None = None,
) -> Progress:
    """Train `model` in place and leave the weights of the best epoch in it."""
    hooks = hooks or Hooks()
    model.to(device)
    targets = torch.from_numpy(labels).to(device)
    prior = torch.full((stopping.features.logits.shape[1],), section.prior, dtype=torch.float64, device=device)
    rate = section.rate(len(labels))
    schedule = Schedule(len(labels), section.batch, section.epochs, rate, seed, section.clip_norm)

    def loss(indices: NDArray[np.int64], _: torch.Generator) -> Tensor:
        log_alpha = model(features.batch(indices, device))
        return negative_elbo(log_alpha, targets[torch.from_numpy(indices)], section.kl_weight, prior)

    select = _selector(stopping, section, device)
    chosen = Hooks(select=select, on_step=hooks.on_step, on_epoch=hooks.on_epoch)
    return run(model, make_optimizer(model, section), loss, schedule, checkpoint, fingerprint, chosen)


@torch.inference_mode()
def meta_score(model: nn.Module, features: Features, score: str, device: torch.device) -> NDArray[np.float64]:
    """Doubt (N,) by one score: larger is more doubtful, whatever the score's own direction."""
    parts = []
    for start in range(0, len(features.logits), 4096):
        indices = np.arange(start, min(start + 4096, len(features.logits)))
        parts.append(getattr(scores(model(features.batch(indices, device))), score).cpu().numpy())
    return doubt(np.concatenate(parts), SCORES[score].direction)


def _selector(stopping: StoppingData, section: MetaSection, device: torch.device) -> Callable[[nn.Module], float]:
    """AUROC of the stopping score for the recipe's task."""
    wrong = stopping.features.logits.argmax(axis=1) != stopping.labels
    if section.stop_task == "misclassification" and not 0 < wrong.sum() < len(wrong):
        raise DataError(
            f"The base makes {int(wrong.sum())} errors on {len(wrong)} validation images, "
            "so stopping by misclassification has nothing to tell apart; enlarge the split or stop by ood."
        )

    def by_noise(model: nn.Module) -> float:
        clean = meta_score(model, stopping.features, section.stop_score, device)
        values = []
        for noisy in stopping.noisy:
            doubts = np.concatenate([clean, meta_score(model, noisy, section.stop_score, device)])
            values.append(roc_auc_score(np.arange(len(doubts)) >= len(clean), doubts))
        return float(np.mean(values))

    def by_errors(model: nn.Module) -> float:
        return float(roc_auc_score(wrong, meta_score(model, stopping.features, section.stop_score, device)))

    return by_noise if section.stop_task == "ood" else by_errors
