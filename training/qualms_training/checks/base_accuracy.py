"""Whether a frozen base recognises the data's classes: a wrong class order or normalisation shows as accuracy near chance."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from scipy.stats import binom

from qualms_training.errors import ModelError

SIGNIFICANCE = 0.001
"""probability of stopping a base that is better than chance is not bounded by it, but one that guesses passes this rarely"""
IMAGES_PER_CLASS = 10
"""images per class from which on a better order of the classes can be distinguished from chance"""
DOMINANT = 0.9
"""share of predictions of one class from which on the weights are doubted"""
GAIN = 0.1
"""gain in accuracy by another order of the classes from which on the given order counts as wrong"""
PAIRS = 5


@dataclass(frozen=True)
class BaseAccuracy:
    """Accuracy of the base on a sample of held-out images."""

    n: int
    correct: int
    chance: float
    """accuracy expected if predictions had nothing to do with labels, with the same shares of classes"""
    reordered: float | None
    """accuracy if the classes had the order that fits best, on images that did not choose it; None with too few images"""
    commonest: tuple[str, float]
    """the class that is predicted most often, and its share of the predictions"""
    confused: tuple[tuple[str, str, int, int], ...]
    """true class, predicted class, images confused so, images of the true class: the most frequent pairs"""

    @property
    def accuracy(self) -> float:
        """Share of correct predictions."""
        return self.correct / self.n

    @property
    def is_chance(self) -> bool:
        """Whether guessing would often be as good."""
        return bool(binom.sf(self.correct - 1, self.n, self.chance) > SIGNIFICANCE)

    @property
    def is_reordered(self) -> bool:
        """Whether another order of the classes fits much better."""
        return self.reordered is not None and self.reordered - self.accuracy > GAIN


def measure_accuracy(predictions: NDArray[np.int64], labels: NDArray[np.int64], classes: Sequence[str]) -> BaseAccuracy:
    """Compare predictions (N,) with labels (N,), both indices into `classes`."""
    n, k = len(labels), len(classes)
    shares = [np.bincount(values, minlength=k) / n for values in (predictions, labels)]
    wrong = Counter(
        (int(true), int(predicted)) for true, predicted in zip(labels, predictions, strict=True) if true != predicted
    )
    of_class = np.bincount(labels, minlength=k)
    commonest = int(shares[0].argmax())
    return BaseAccuracy(
        n=n,
        correct=int((predictions == labels).sum()),
        chance=float((shares[0] * shares[1]).sum()),
        reordered=_reordered_accuracy(predictions, labels, k) if n >= IMAGES_PER_CLASS * k else None,
        commonest=(classes[commonest], float(shares[0][commonest])),
        confused=tuple(
            (classes[true], classes[predicted], count, int(of_class[true]))
            for (true, predicted), count in wrong.most_common(PAIRS)
        ),
    )


def check_accuracy(measured: BaseAccuracy) -> None:
    """ModelError if the base is near chance, or would be much better with another order of the classes."""
    order = "(--classes FILE, or data.classes in a recipe, gives that of the logits)"
    if measured.is_reordered:
        assert measured.reordered is not None
        problem = f"and would be {100 * measured.reordered:.1f} % with another order of the classes"
        question = f"The order of the classes is wrong {order}."
    elif measured.is_chance:
        problem = f"which is not better than chance ({100 * measured.chance:.1f} % for guesses as frequent as these)"
        normalisation = "(--mean and --std, or input.mean and input.std)"
        question = f"Is the order of the classes wrong {order}, or the normalisation {normalisation}?"
    else:
        return
    name, share = measured.commonest
    untrained = (
        f"{100 * share:.0f} % of the predictions are {name}: are these weights trained? " if share > DOMINANT else ""
    )
    pairs = "; ".join(f"{true} as {predicted} ({count} of {of})" for true, predicted, count, of in measured.confused)
    raise ModelError(
        f"The base's accuracy on {measured.n:,} held-out images is {100 * measured.accuracy:.1f} %, {problem}. Most confused: "
        f"{pairs or 'none'}. {untrained}{question} --allow-chance goes on all the same."
    )


def _reordered_accuracy(predictions: NDArray[np.int64], labels: NDArray[np.int64], classes: int) -> float:
    """Accuracy after the best one-to-one renaming of predictions; each half of the images tests the other half's renaming."""
    halves = (np.arange(len(labels)) % 2 == 0, np.arange(len(labels)) % 2 == 1)
    correct = 0
    for half, other in (halves, halves[::-1]):
        counts = np.zeros((classes, classes), dtype=np.int64)
        np.add.at(counts, (predictions[half], labels[half]), 1)
        _, names = linear_sum_assignment(counts, maximize=True)
        correct += int((names[predictions[other]] == labels[other]).sum())
    return correct / len(labels)
