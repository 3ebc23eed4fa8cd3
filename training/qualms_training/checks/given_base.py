"""Check a base with given weights on a few images: accuracy, export, and what the run will take."""

import time

import numpy as np
import torch
from numpy.typing import NDArray
from rich.markup import escape

from qualms.machine.memory import available_memory
from qualms_training.checks.base_accuracy import check_accuracy, measure_accuracy
from qualms_training.checks.estimates import (
    check_disk,
    feature_bytes,
    peak_memory,
    seconds_per_image,
    seconds_to_send,
    smallest_target,
    workload,
)
from qualms_training.checks.trial_export import TrialExport, try_export
from qualms_training.console import duration
from qualms_training.data import load_ood
from qualms_training.errors import ModelError
from qualms_training.stages import fit
from qualms_training.stages.context import RunContext
from qualms_training.stages.features import extractor

EXPORT_IMAGES = 4
TIMED_IMAGES = 8
SENT_IMAGES = 8
"""stored test images that are sent in each encoding, to measure the time"""
MIN_IMAGES, MAX_IMAGES = 64, 256
"""held-out images on which accuracy is measured"""
SPARE_MEMORY = 1.2
"""later stages need a little more memory than the checks"""
SECONDS = 10.0
"""time for them, beyond the smallest number"""


def check_given_base(context: RunContext) -> None:
    """Raise a QualmsError if the base is near chance, cannot be exported, or its features do not fit on the disk."""
    images, labels = _sample(context, TIMED_IMAGES)
    frozen = extractor(context)
    with torch.inference_mode():
        frozen(torch.from_numpy(images[:1]))  # the first run allocates memory
    seconds, _ = seconds_per_image(frozen, images, time.perf_counter)
    if context.recipe.prediction == "base":
        images, labels = _sample(context, int(np.clip(SECONDS / seconds, MIN_IMAGES, MAX_IMAGES)))
        seconds, logits = seconds_per_image(frozen, images, time.perf_counter)
        measured = measure_accuracy(logits.argmax(axis=1), labels, context.data.classes)
        if not context.allow_chance:
            check_logits(logits)
        context.display.note(f"  accuracy of the base on {measured.n} held-out images: {100 * measured.accuracy:.1f} %")
        if not context.allow_chance:
            check_accuracy(measured)
    with context.display.status("exporting a trial graph"):
        trial = try_export(
            frozen,
            fit.new_meta(context),
            images[:EXPORT_IMAGES],
            classes=len(context.data.classes),
            prediction=context.recipe.prediction,
            distance=context.recipe.uses_distance,
        )
    context.display.note(
        f"  trial export: {trial.bytes / 1e6:.1f} MB, probabilities within {trial.difference:.0e} of PyTorch's"
    )
    _note_calibration(context)
    _note_estimates(context, seconds, trial)


def check_logits(logits: NDArray[np.float32]) -> None:
    """ModelError if all logits (N, K) are between 0 and 1, which those of a trained network are not."""
    if logits.min() >= 0 and logits.max() <= 1:
        raise ModelError(
            f"All outputs of the base for {len(logits)} images are between 0 and 1, as those of a sigmoid, whose softmax is not "
            "the probability of a class: let it return the logits. --allow-chance goes on all the same."
        )


def _sample(context: RunContext, count: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Images and labels that are spread evenly over the held-out fit split."""
    part = context.data.parts["fit"]
    rows = np.unique(np.linspace(0, len(part.labels) - 1, min(count, len(part.labels))).astype(np.int64))
    return np.asarray(part.images[rows]), part.labels[rows]


def _note_calibration(context: RunContext) -> None:
    count, operating = context.recipe.data.splits.calibration, context.recipe.operating
    target = smallest_target(count, operating.guarantee)
    supported = "no listed rate" if target is None else f"false-alarm rates down to {100 * target:g} %"
    sources = {
        "all": "assumed: the base has seen the training images and none of these (--weights-saw, base.weights_saw)",
        "train-split": "the base has seen the train split and none of these",
        "other-data": "stated: the base has seen none of these data; if it has, the guarantees do not hold",
    }
    saw = context.recipe.base.weights_saw
    assert saw is not None  # a base with given weights
    context.display.note(f"  calibration: {count:,} images support {supported} ({operating.guarantee}); {sources[saw]}")


def _note_estimates(context: RunContext, seconds: float, trial: TrialExport) -> None:
    sets, test = (load_ood(name, context.data_dir) for name in context.recipe.data.ood), context.data.parts["test"]
    work = workload(context.recipe, len(test.labels), [min(len(one), context.recipe.data.limit) for one in sets])
    sending = work.sent * seconds_to_send(test.stored.first(SENT_IMAGES), context.recipe, time.perf_counter)
    logits, taps = extractor(context)(torch.from_numpy(np.asarray(context.data.parts["fit"].images[:1])))
    disk = feature_bytes([tap.shape[1] for tap in taps], logits.shape[1], work) + 4 * trial.bytes
    check_disk(context.cache, disk)
    needed, available = SPARE_MEMORY * peak_memory(), available_memory()
    context.display.note(
        f"  estimate: {duration(work.extracted * seconds)} for features of {work.extracted:,} images, "
        f"{duration(work.run * trial.seconds)} for {work.run:,} images in ONNX Runtime, {duration(sending)} to send "
        f"{work.sent:,} of them in each of {len(context.recipe.report_encodings)} encodings, {disk / 1e6:,.0f} MB of disk in "
        f"{escape(str(context.cache))}, {needed / 1e9:.1f} of {available / 1e9:.1f} GB of memory"
    )
    if needed > available:
        context.display.note("  [yellow]That memory may not suffice: the process may be ended by the system.[/yellow]")
