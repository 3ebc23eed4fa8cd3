"""Estimates of what a run takes: time from measured seconds per image, disk from the widths of the features, memory so far."""

import resource
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from qualms.decisions.flag import rank
from qualms.errors import OperatingPointError
from qualms.images.encodings import all_settings, parse_encodings
from qualms_training.data.dataset import Selection
from qualms_training.errors import QualmsError
from qualms_training.meta.extractor import Extractor
from qualms_training.recipe import Recipe

TARGETS = (0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.05, 0.1)
BYTES_PER_VALUE = 2
"""of cached features, which are stored in half precision"""
BATCH = 8
"""images in a pass of the measurement"""
SENDING_SECONDS = 5.0
"""time for the measurement of encodings, which takes longer for large images"""
SPARE_DISK = 1.2
"""the graph, the bundle and temporary files need some space beside the features"""


@dataclass(frozen=True)
class Workload:
    """Numbers of images that a run puts through PyTorch and through ONNX Runtime, and that it sends in each encoding."""

    extracted: int
    run: int
    sent: int


def workload(recipe: Recipe, test_images: int, ood_images: Sequence[int]) -> Workload:
    """The images of all stages: train, validation with its noisy copies and fit; then fit, calibration, test and OOD images.

    ood_images: the number in each OOD set.
    """
    splits, meta, calibration = recipe.data.splits, recipe.meta, recipe.calibration
    noisy = len(meta.stop_noise) * meta.noise_draws if meta.stop_task == "ood" else 0
    settings = len(all_settings(parse_encodings(calibration.as_sent))) if calibration.form != "mixture" else 1
    sets = [*ood_images, *([min(test_images, recipe.data.limit)] if recipe.data.corrupted else [])]
    sent = min(test_images, recipe.report_limit) + sum(min(one, max(1, recipe.report_limit // 10)) for one in sets)
    return Workload(
        extracted=splits.train + splits.validation * (1 + noisy) + splits.fit,
        run=splits.fit
        + splits.calibration * max(1, settings)
        + test_images
        + sum(sets)
        + sent * len(recipe.report_encodings),
        sent=sent,
    )


def seconds_to_send(images: Selection, recipe: Recipe, clock: Callable[[], float]) -> float:
    """Seconds to send one of some stored images in all encodings of the report, measured for SENDING_SECONDS or a little more."""
    start, measured = clock(), 0
    for text in recipe.report_encodings:
        images.received(recipe.input.spec, parse_encodings([text]), seed=0)
        measured += 1
        if clock() - start > SENDING_SECONDS:
            break
    return (clock() - start) / len(images) * len(recipe.report_encodings) / max(1, measured)


def seconds_per_image(
    extractor: Extractor, images: NDArray[np.uint8], clock: Callable[[], float]
) -> tuple[float, NDArray[np.float32]]:
    """Seconds that PyTorch takes for one of `images` (N, H, W, C), and their logits (N, K)."""
    start = clock()
    with torch.inference_mode():
        logits = [
            extractor(torch.from_numpy(np.asarray(images[index : index + BATCH])))[0].float().numpy()
            for index in range(0, len(images), BATCH)
        ]
    return (clock() - start) / len(images), np.concatenate(logits)


def smallest_target(images: int, guarantee: str) -> float | None:
    """The smallest of TARGETS that so many calibration images support; None if they support none."""
    for target in TARGETS:
        try:
            rank(images, target, guarantee)  # type: ignore[arg-type]  # a Guarantee of the recipe
        except OperatingPointError:
            continue
        return target
    return None


def check_disk(folder: Path, needed: int) -> None:
    """QualmsError if the disk of `folder`, which need not exist yet, has less than `needed` bytes free."""
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise QualmsError(
            f"The features and the bundle need about {needed / 1e9:.1f} GB in {folder}, and its disk has {free / 1e9:.1f} GB "
            "free; name another folder with --cache or --out."
        )


def feature_bytes(widths: list[int], logits: int, work: Workload) -> int:
    """Bytes of the cached features of taps of these widths and of the logits, and some more."""
    return int(SPARE_DISK * work.extracted * (BYTES_PER_VALUE * sum(widths) + 4 * logits))


def peak_memory() -> int:
    """The largest memory that this process has taken so far, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
