"""Outputs of a network for a few images, saved beside the files that were made with it.

Weights alone do not identify a network, because its code can change while the weights stay the same.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from qualms.files import atomic_path
from qualms_training.data.lazy_images import Pixels
from qualms_training.meta.extractor import Extractor

IMAGES = 4
"""number of images in a probe: the first ones of the data"""
_TOLERANCE = 1e-2  # relative to the largest value: above the differences between devices and those of half precision

Outputs = Sequence[NDArray[Any]]


@torch.inference_mode()
def outputs(extractor: Extractor, images: Pixels, device: torch.device) -> list[NDArray[np.float32]]:
    """Logits and reduced taps of the first of `images` (N, H, W, C)."""
    logits, taps = extractor.to(device).eval()(torch.from_numpy(images[:IMAGES]).to(device))
    return [values.float().cpu().numpy() for values in (logits, *taps)]


def agree(current: Outputs, saved: Outputs) -> bool:
    """Whether two networks have the same outputs, up to rounding."""
    return len(current) == len(saved) and all(_close(left, right) for left, right in zip(current, saved, strict=True))


def save(path: Path, outputs: Outputs) -> None:
    """Write the outputs of a network to `path`."""
    with atomic_path(path) as temporary, temporary.open("wb") as file:
        np.savez(file, *outputs)


def agrees_with_saved(path: Path, current: Outputs) -> bool:
    """Whether the outputs agree with those saved at `path`; True if there is no such file."""
    if not path.exists():
        return True
    with np.load(path, allow_pickle=False) as saved:
        return agree(current, list(saved.values()))


def _close(current: NDArray[Any], saved: NDArray[Any]) -> bool:
    if current.shape != saved.shape:
        return False
    reference = saved.astype(np.float64)
    return bool(np.abs(current - reference).max() <= _TOLERANCE * np.abs(reference).max())
