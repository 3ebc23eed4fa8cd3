"""Heads trained on frozen features: what the meta-model, its ablations and a new last layer have in common."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from qualms.bundle.scores import SCORES, as_uncertainty
from qualms_training.files import fingerprint
from qualms_training.fitting.feature_cache import Features
from qualms_training.fitting.meta_trainer import Objective, StoppingData, outputs, train_meta
from qualms_training.meta.dirichlet import scores
from qualms_training.meta.meta_model import PooledMeta
from qualms_training.paper.material import Frozen, View
from qualms_training.paper.method import Chains, Verdict
from qualms_training.paper.methods.post_hoc.probability_scores import softmax_scores
from qualms_training.recipe import MetaSection
from qualms_training.reporting.provenance import parameters

DIRICHLET = ("entropy", "mutual_information", "differential_entropy", "precision")


@dataclass(frozen=True)
class TrainedHead:
    """A network on part of a view."""

    model: nn.Module
    sees: Callable[[View], Features]

    def outputs(self, view: View) -> Tensor:
        """(N, K)"""
        return outputs(self.model, self.sees(view), next(self.model.parameters()).device)


def taps(view: View) -> Features:
    """The recipe's taps."""
    return view.features


def last(view: View) -> Features:
    """The penultimate feature alone."""
    return Features([view.last], view.features.logits, view.features.folder)


class FirstOnly(nn.Module):
    """A module on one feature as a head on a list of them."""

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__()
        self.whole = nn.Sequential(*modules)

    def forward(self, features: list[Tensor]) -> Tensor:
        """One feature (N, D) in a list to (N, K)."""
        made: Tensor = self.whole(features[0])
        return made


def seeded_linear(width: int, classes: int, seed: int) -> nn.Linear:
    """A linear layer whose first weights depend on the seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return nn.Linear(width, classes)


def train_head(
    frozen: Frozen,
    head: TrainedHead,
    section: MetaSection,
    objective: Objective | None = None,
    chosen: NDArray[np.int64] | None = None,
    *,
    stop: bool = True,
) -> int:
    """Train a head, on the training images at `chosen` if given, stopped as the section says or not; its size."""
    train, labels = frozen.train.view, frozen.train.labels
    if chosen is not None:
        train, labels = train.subset(chosen), labels[chosen]
    features = head.sees(train)
    if isinstance(head.model, PooledMeta):
        head.model.fit_scales([torch.from_numpy(np.array(tap)) for tap in features.taps])
    noisy = [head.sees(view) for view in frozen.noisy] if stop and stopping_noise(section) else []
    validation = frozen.validation
    made_from = [str(found.folder) for found in (features, *noisy)]
    train_meta(
        head.model,
        features,
        labels,
        StoppingData(head.sees(validation.view), validation.labels, noisy) if stop else None,
        section,
        seed=frozen.seed,
        checkpoint=frozen.folder / "head.checkpoint.pt",
        fingerprint=fingerprint(section.model_dump(), frozen.seed, repr(head.model), made_from, len(labels)),
        device=frozen.device,
        objective=objective,
    )
    return parameters(head.model)


def stopping_noise(section: MetaSection) -> Chains:
    """The noisy copies that a head is stopped by; none where errors stop it."""
    return section.stop_noise if section.stop_task == "ood" else []


def cross_entropy() -> Objective:
    """Cross-entropy, stopped by the entropy of the softmax."""
    return Objective(F.cross_entropy, lambda logits: softmax_scores(logits.double().numpy())["entropy"])


def dirichlet_verdict(log_alpha: Tensor) -> Verdict:
    """The class of most evidence, and the paper's five scores."""
    found = scores(log_alpha)
    doubts = {name: as_uncertainty(getattr(found, name).numpy(), SCORES[name].direction) for name in DIRICHLET}
    doubts["max_probability"] = found.error_probability.double().numpy()
    return Verdict(log_alpha.argmax(dim=1).numpy(), dict(doubts))


def softmax_verdict(logits: Tensor) -> Verdict:
    """The class of the largest logit, and the softmax's two scores."""
    return Verdict(logits.argmax(dim=1).numpy(), dict(softmax_scores(logits.double().numpy())))
