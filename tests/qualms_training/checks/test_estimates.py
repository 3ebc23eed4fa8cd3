"""Estimates of what a run takes."""

import itertools

import numpy as np

from qualms_training.checks.estimates import SENDING_SECONDS, seconds_to_send, workload
from qualms_training.data.dataset import ImageSet, Selection
from qualms_training.recipe import Recipe, load_recipe

LABELS = np.zeros(4, np.int64)
STORED = Selection(ImageSet("drawn", "test", np.zeros((4, 16, 16, 3), np.uint8), LABELS, ("a",)), np.arange(4))


def recipe(*encodings: str, limit: int = 50) -> Recipe:
    return load_recipe("tiny").model_copy(update={"report_encodings": list(encodings), "report_limit": limit})


def test_images_of_all_sets_are_counted_in_each_encoding() -> None:
    none, two = (workload(recipe(*encodings), 100, [30, 3]) for encodings in ((), ("png", "jpeg:75")))
    assert two.sent == 50 + 5 + 3 + 5  # test images, a tenth of the limit of each OOD set, and corrupted ones
    assert two.run - none.run == 2 * two.sent


def test_seconds_to_send_are_those_of_one_image_in_all_encodings() -> None:
    ticks = itertools.count(0, SENDING_SECONDS / 10)
    assert seconds_to_send(STORED, recipe("png", "jpeg:75"), lambda: next(ticks)) * 4 == 3 * SENDING_SECONDS / 10


def test_the_measurement_of_slow_encodings_ends_early_and_is_extrapolated() -> None:
    ticks = itertools.count(0, 2 * SENDING_SECONDS)
    assert (
        seconds_to_send(STORED, recipe("png", "jpeg:75", "webp:80"), lambda: next(ticks)) * 4 == 4 * SENDING_SECONDS * 3
    )
