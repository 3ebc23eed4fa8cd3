"""Training of a small network on frozen features: shared by the meta-model, its ablations and new last layers."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from qualms_training.files import fingerprint
from qualms_training.fitting.feature_cache import Features
from qualms_training.fitting.meta_trainer import Objective, StoppingData, head_outputs, train_meta
from qualms_training.meta.meta_model import PooledMeta, build_meta
from qualms_training.models import count_parameters
from qualms_training.paper.inputs import BaseOutputs, PostHocInputs
from qualms_training.paper.method import NoiseChains
from qualms_training.paper.methods.score_functions import softmax_scores
from qualms_training.recipe import MetaSection


@dataclass(frozen=True)
class FeatureHead:
    """A network on a part of the base's outputs."""

    model: nn.Module
    select: Callable[[BaseOutputs], Features]
    """the features that the network takes: `tap_features` or `penultimate_feature`"""

    def __call__(self, base_outputs: BaseOutputs) -> Tensor:
        """Outputs of the network, (N, K)."""
        return head_outputs(self.model, self.select(base_outputs), next(self.model.parameters()).device)


def meta_head(inputs: PostHocInputs, section: MetaSection) -> FeatureHead:
    """An untrained meta-model on the recipe's taps."""
    widths = [(tap.shape[1],) for tap in inputs.train.outputs.features.taps]
    return FeatureHead(build_meta(section, widths, inputs.classes, inputs.seed), tap_features)


def linear_head(inputs: PostHocInputs, *following: nn.Module) -> FeatureHead:
    """An untrained linear layer on the penultimate feature, and the modules that follow it."""
    layer = seeded_linear(inputs.head.weight.shape[1], inputs.classes, inputs.seed)
    return FeatureHead(FirstOnly(layer, *following), penultimate_feature)


def tap_features(base_outputs: BaseOutputs) -> Features:
    """The recipe's taps."""
    return base_outputs.features


def penultimate_feature(base_outputs: BaseOutputs) -> Features:
    """Only the penultimate feature."""
    features = base_outputs.features
    return Features([base_outputs.cached_penultimate], features.logits, features.folder)


class FirstOnly(nn.Module):
    """Modules applied one after the other to the first feature of a list."""

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__()
        self.whole = nn.Sequential(*modules)

    def forward(self, features: list[Tensor]) -> Tensor:
        """A list with one feature (N, D) to (N, K)."""
        result: Tensor = self.whole(features[0])
        return result


def seeded_linear(width: int, classes: int, seed: int) -> nn.Linear:
    """A linear layer whose initial weights depend only on the seed."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return nn.Linear(width, classes)


def train_head(
    inputs: PostHocInputs,
    head: FeatureHead,
    section: MetaSection,
    objective: Objective | None = None,
    chosen: NDArray[np.int64] | None = None,
    *,
    stop: bool = True,
) -> int:
    """Train a head and return its number of parameters.

    `chosen` limits the training images to these indices. Early stopping follows the section unless `stop` is false.
    """
    train, labels = inputs.train.outputs, inputs.train.labels
    if chosen is not None:
        train, labels = train.subset(chosen), labels[chosen]
    features = head.select(train)
    if isinstance(head.model, PooledMeta):
        head.model.fit_scales([torch.from_numpy(np.array(tap)) for tap in features.taps])
    noisy = [head.select(copies) for copies in inputs.noisy_validation] if stop and stopping_noise(section) else []
    validation = inputs.validation
    made_from = [str(used.folder) for used in (features, *noisy)]
    train_meta(
        head.model,
        features,
        labels,
        StoppingData(head.select(validation.outputs), validation.labels, noisy) if stop else None,
        section,
        seed=inputs.seed,
        checkpoint=inputs.folder / "head.checkpoint.pt",
        fingerprint=fingerprint(section.model_dump(), inputs.seed, repr(head.model), made_from, len(labels)),
        device=inputs.device,
        objective=objective,
    )
    return count_parameters(head.model)


def stopping_noise(section: MetaSection) -> NoiseChains:
    """The noisy copies used for early stopping; none if errors are used instead."""
    return section.stop_noise if section.stop_task == "ood" else []


def cross_entropy() -> Objective:
    """Cross-entropy as the loss, and the entropy of the softmax for early stopping."""
    return Objective(F.cross_entropy, lambda logits: softmax_scores(logits.double().numpy())["entropy"])
