"""Train a base classifier on images, with checkpoints that resume exactly."""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from qualms_training.data.lazy_images import Pixels
from qualms_training.fitting.loop import Hooks, Progress, Schedule, make_optimizer, run
from qualms_training.meta.extractor import Normalise
from qualms_training.recipe import BaseSection

_PAD = 4
_MAX_BATCH = 512
_BATCH_VALUES = 2**22
"""values of the images in a batch: 27 images of 224 × 224 × 3; a network's activations take 10 to 30 times as many"""


def train_base(
    model: nn.Module,
    normalise: Normalise,
    images: Pixels,
    labels: NDArray[np.int64],
    section: BaseSection,
    *,
    seed: int,
    checkpoint: Path,
    fingerprint: str,
    device: torch.device,
    hooks: Hooks | None = None,
    criterion: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy,
    clip_norm: float | None = None,
) -> Progress:
    """Train `model` in place on images (N, H, W, C) and labels (N,).

    `criterion` maps the model's outputs (N, K) and labels (N,) to the mean loss.
    """
    model.to(device)
    normalise.to(device)
    targets = torch.from_numpy(labels)
    schedule = Schedule(len(labels), section.batch, section.epochs, section.rate(len(labels)), seed, clip_norm)
    optimizer = make_optimizer(model, section)

    def loss(indices: NDArray[np.int64], generator: torch.Generator) -> Tensor:
        chosen = torch.from_numpy(indices)
        batch = torch.from_numpy(images[indices])
        if section.augment == "crop-flip":
            batch = crop_and_flip(batch, generator)
        return criterion(model(normalise(batch.to(device))), targets[chosen].to(device))

    return run(model, optimizer, loss, schedule, checkpoint, fingerprint, hooks)


def crop_and_flip(images: Tensor, generator: torch.Generator) -> Tensor:
    """Pad each image of (N, H, W, C) by 4 pixels, crop it to its size at random, and mirror half of the images."""
    n, height, width, _ = images.shape
    padded = F.pad(images, (0, 0, _PAD, _PAD, _PAD, _PAD))
    top = torch.randint(0, 2 * _PAD + 1, (n, 1), generator=generator)
    left = torch.randint(0, 2 * _PAD + 1, (n, 1), generator=generator)
    mirrored = torch.rand((n, 1), generator=generator) < 0.5
    rows = top + torch.arange(height)
    columns = left + torch.where(mirrored, torch.arange(width - 1, -1, -1), torch.arange(width))
    return padded[torch.arange(n)[:, None, None], rows[:, :, None], columns[:, None, :]]


@torch.inference_mode()
def predict_logits(model: nn.Module, normalise: Normalise, images: Pixels, device: torch.device) -> NDArray[np.float32]:
    """Logits (N, K) of images (N, H, W, C), `inference_batch` at a time."""
    model.to(device).eval()
    normalise.to(device)
    size = inference_batch(images.shape)
    parts = [
        model(normalise(torch.from_numpy(images[start : start + size]).to(device))).float().cpu()
        for start in range(0, len(images), size)
    ]
    return torch.cat(parts).numpy()


def inference_batch(shape: tuple[int, ...]) -> int:
    """Number of images (N, H, W, C) in a batch, so that the memory of a batch does not grow with the images' size."""
    return max(1, min(_MAX_BATCH, _BATCH_VALUES // max(1, math.prod(shape[1:]))))
