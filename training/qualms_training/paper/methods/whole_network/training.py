"""Training and running of whole networks: shared by the methods that train a network of their own."""

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qualms_training.files import fingerprint
from qualms_training.fitting.base_trainer import train_base
from qualms_training.fitting.loop import Hooks
from qualms_training.meta.extractor import Normalise
from qualms_training.models import count_parameters
from qualms_training.paper.inputs import ImageInputs, Images, LabelledImages
from qualms_training.paper.method import NotApplicableError
from qualms_training.recipe import BaseSection

ROWS = 512
"""images per forward pass"""


def new_network(inputs: ImageInputs) -> nn.Module:
    """An untrained network of the base's architecture; its initial weights depend only on the seed."""
    if inputs.recipe.base.weights is not None:
        raise NotApplicableError("the recipe gives the base's weights, and this method trains from scratch")
    return inputs.new_network()


def copy_of_base(inputs: ImageInputs) -> nn.Module:
    """A copy of the trained base, for further training."""
    if inputs.recipe.prediction == "meta":
        raise NotApplicableError("the base's classes are not the data's, and this method predicts with the base")
    return inputs.copy_of_base()


def example_for(inputs: ImageInputs) -> Tensor:
    """One normalised image on the CPU, (1, C, H, W)."""
    images = inputs.train.images
    example: Tensor = images.normalise.cpu()(torch.from_numpy(images.pixels[:1]))
    return example


def section_for(inputs: ImageInputs, epochs: int | None, **changes: Any) -> BaseSection:
    """The base's training settings with a method's changes; `epochs` None keeps the base's epochs."""
    given = {} if epochs is None else {"epochs": epochs}
    return inputs.recipe.base.model_copy(update={**given, **changes})


def train_network(
    inputs: ImageInputs,
    model: nn.Module,
    section: BaseSection,
    *,
    criterion: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy,
    depends_on: object = None,
    clip_norm: float | None = None,
    hooks: Hooks | None = None,
) -> int:
    """Train on the training images, resuming from a matching checkpoint; return the number of weights.

    `depends_on` lists everything else that the weights depend on: settings of the criterion, the model and the hooks.
    """
    train = inputs.train
    train_base(
        model,
        train.images.normalise,
        train.images.pixels,
        train.labels,
        section,
        seed=inputs.seed,
        checkpoint=inputs.folder / "network.checkpoint.pt",
        fingerprint=training_fingerprint(inputs, model, section, depends_on, clip_norm),
        device=inputs.device,
        hooks=hooks,
        criterion=criterion,
        clip_norm=clip_norm,
    )
    return count_parameters(model)


def training_fingerprint(inputs: ImageInputs, model: nn.Module, section: BaseSection, *depends_on: object) -> str:
    """Fingerprint of everything that the weights depend on."""
    settings = section.model_dump(exclude={"taps"})
    return fingerprint(settings, repr(model), inputs.seed, labelled_fingerprint(inputs.train), depends_on)


def labelled_fingerprint(labelled: LabelledImages) -> str:
    """Fingerprint of images, their normalisation and labels."""
    return fingerprint(images_fingerprint(labelled.images), hashlib.sha256(labelled.labels.tobytes()).hexdigest())


def images_fingerprint(images: Images) -> str:
    """Fingerprint of images and their normalisation."""
    return fingerprint(hashlib.sha256(images.pixels.tobytes()).hexdigest(), normalisation_fingerprint(images.normalise))


def normalisation_fingerprint(normalise: Normalise) -> str:
    """Fingerprint of a normalisation."""
    return fingerprint(normalise.scale.tolist(), normalise.shift.tolist())


def batches(images: Images, device: torch.device) -> Iterator[Tensor]:
    """Normalised images in batches of at most `ROWS`, (n, C, H, W) each."""
    normalise = images.normalise.to(device)
    for start in range(0, len(images.pixels), ROWS):
        yield normalise(torch.from_numpy(images.pixels[start : start + ROWS]).to(device))


@torch.inference_mode()
def outputs(model: nn.Module, images: Images, device: torch.device) -> Tensor:
    """Outputs of a network in evaluation mode, (N, K), on the CPU."""
    model.to(device).eval()
    return torch.cat([model(batch).cpu() for batch in batches(images, device)])
