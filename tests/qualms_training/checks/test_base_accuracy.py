"""Near-chance bases and wrong class orders are recognised, good ones are not, with few and with many classes."""

import numpy as np
import pytest
from numpy.typing import NDArray

from qualms_training.checks.base_accuracy import check_accuracy, measure_accuracy
from qualms_training.errors import ModelError


def sample(
    classes: int, n: int, accuracy: float, seed: int = 0
) -> tuple[NDArray[np.int64], NDArray[np.int64], list[str]]:
    """Predictions, labels and class names; wrong predictions are drawn from all classes."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(classes, size=n)
    guesses = rng.integers(classes, size=n)
    return np.where(rng.random(n) < accuracy, labels, guesses), labels, [f"c{index}" for index in range(classes)]


@pytest.mark.parametrize(
    ("classes", "n", "accuracy"), [(2, 256, 0.7), (10, 256, 0.4), (1000, 64, 0.3), (1000, 32, 0.5)]
)
def test_a_base_with_better_than_chance_accuracy_passes(classes: int, n: int, accuracy: float) -> None:
    check_accuracy(measure_accuracy(*sample(classes, n, accuracy)))


@pytest.mark.parametrize(("classes", "n"), [(2, 256), (10, 256), (1000, 64), (1000, 32)])
def test_a_base_that_guesses_is_refused(classes: int, n: int) -> None:
    with pytest.raises(ModelError, match=r"not better than chance .*--classes FILE.*--allow-chance"):
        check_accuracy(measure_accuracy(*sample(classes, n, 0.0)))


def test_a_base_that_always_predicts_the_most_frequent_class_is_refused() -> None:
    labels = np.array([0] * 90 + [1] * 10)
    with pytest.raises(
        ModelError, match=r"not better than chance .* 100 % of the predictions are a: are these weights trained\?"
    ):
        check_accuracy(measure_accuracy(np.zeros(100, dtype=np.int64), labels, ["a", "b"]))


def test_a_good_base_on_unbalanced_classes_passes() -> None:
    labels = np.array([0] * 230 + [1] * 26)
    predictions = labels.copy()
    predictions[::40] = 0
    check_accuracy(measure_accuracy(predictions, labels, ["a", "b"]))


def test_a_reversed_class_order_is_refused_with_the_confused_pairs() -> None:
    predictions, labels, names = sample(10, 256, 0.95)
    with pytest.raises(ModelError, match=r"Most confused: c\d as c\d \(\d+ of \d+\); .*order of the classes"):
        check_accuracy(measure_accuracy(9 - predictions, labels, names))


def test_two_pairs_of_exchanged_classes_are_refused_although_accuracy_is_far_above_chance() -> None:
    predictions, labels, names = sample(10, 256, 0.95)
    exchanged = np.array([1, 0, 3, 2, *range(4, 10)])
    with pytest.raises(ModelError, match=r"would be \d\d\.\d % with another order of the classes"):
        check_accuracy(measure_accuracy(exchanged[predictions], labels, names))


def test_a_weak_base_does_not_look_reordered() -> None:
    for seed in range(20):
        measured = measure_accuracy(*sample(10, 256, 0.3, seed))
        assert not measured.is_reordered
