"""Whole networks: what the methods that train one of their own have in common."""

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qualms_training.files import fingerprint
from qualms_training.fitting.base_trainer import train_base
from qualms_training.fitting.loop import Hooks
from qualms_training.meta.normalise import Normalise
from qualms_training.paper.material import Labelled, Pictures, Shown
from qualms_training.paper.method import NotApplicableError
from qualms_training.recipe import BaseSection
from qualms_training.reporting.provenance import parameters

ROWS = 512  # images that a network is shown at once


def new_network(pictures: Pictures) -> nn.Module:
    """The base's architecture, untrained; its first weights depend on the seed alone."""
    if pictures.recipe.base.weights is not None:
        raise NotApplicableError("the recipe gives the base's weights, and this method trains from scratch")
    return pictures.new_network()


def copy_of_base(pictures: Pictures) -> nn.Module:
    """The base as it was trained, to be trained further."""
    if pictures.recipe.prediction == "meta":
        raise NotApplicableError("the base's classes are not the data's, and this method predicts by the base")
    return pictures.copy_of_base()


def example_for(pictures: Pictures) -> Tensor:
    """One image as a network on the CPU sees it, (1, C, H, W)."""
    shown = pictures.train.shown
    example: Tensor = shown.normalise.cpu()(torch.from_numpy(shown.images[:1]))
    return example


def section_for(pictures: Pictures, epochs: int | None, **changes: Any) -> BaseSection:
    """How the base is trained, but for what a method has its own word on; None keeps the base's epochs."""
    given = {} if epochs is None else {"epochs": epochs}
    return pictures.recipe.base.model_copy(update={**given, **changes})


def train_network(
    pictures: Pictures,
    model: nn.Module,
    section: BaseSection,
    *,
    criterion: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy,
    decided_by: object = None,
    clip_norm: float | None = None,
    hooks: Hooks | None = None,
) -> int:
    """Train on the training images, from the checkpoint if it is of the same training; the number of weights.

    `decided_by` is whatever else decides the weights: settings of the criterion, of the model, of the hooks.
    """
    train = pictures.train
    train_base(
        model,
        train.shown.normalise,
        train.shown.images,
        train.labels,
        section,
        seed=pictures.seed,
        checkpoint=pictures.folder / "network.checkpoint.pt",
        fingerprint=training_mark(pictures, model, section, decided_by, clip_norm),
        device=pictures.device,
        hooks=hooks,
        criterion=criterion,
        clip_norm=clip_norm,
    )
    return parameters(model)


def training_mark(pictures: Pictures, model: nn.Module, section: BaseSection, *decided_by: object) -> str:
    """Fingerprint of all that decides the weights."""
    settings = section.model_dump(exclude={"taps"})
    return fingerprint(settings, repr(model), pictures.seed, data_mark(pictures.train), decided_by)


def data_mark(labelled: Labelled) -> str:
    """Fingerprint of images, labels and how they are shown."""
    return fingerprint(images_mark(labelled.shown), hashlib.sha256(labelled.labels.tobytes()).hexdigest())


def images_mark(shown: Shown) -> str:
    """Fingerprint of images and how they are shown."""
    return fingerprint(hashlib.sha256(shown.images.tobytes()).hexdigest(), scale_mark(shown.normalise))


def scale_mark(normalise: Normalise) -> str:
    """Fingerprint of a normalisation."""
    return fingerprint(normalise.scale.tolist(), normalise.shift.tolist())


def batches(shown: Shown, device: torch.device) -> Iterator[Tensor]:
    """Images as a network sees them, (n, C, H, W) each."""
    normalise = shown.normalise.to(device)
    for start in range(0, len(shown.images), ROWS):
        yield normalise(torch.from_numpy(shown.images[start : start + ROWS]).to(device))


@torch.inference_mode()
def outputs(model: nn.Module, shown: Shown, device: torch.device) -> Tensor:
    """What a network says about images, (N, K), in evaluation mode, on the CPU."""
    model.to(device).eval()
    return torch.cat([model(batch).cpu() for batch in batches(shown, device)])
