"""How far two computations of a graph's outputs may differ: PyTorch's and ONNX Runtime's at export, ONNX Runtime's at export and
on another machine, or with other batches and threads, at load.

All compute in float32 in another order, so their outputs differ by rounding, which deep networks amplify. A difference is
accepted if it is small in absolute terms, or relative to how much a score varies between known images. The second rule is
needed for scores like the distance, with values in the thousands and single features that decide them. It is safe: a
hundredth of a standard deviation, with the same sign on every image, would move a false-alarm rate of 1 % to 1.03 %.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

OUTPUT_TOLERANCE = 1e-3
"""relative above 1 and absolute below; far below the error of a wrong kernel"""
SPREAD_TOLERANCE = 1e-2
"""of a score, in its standard deviations over known images"""
TIE = 1e-4
"""difference of two log probabilities up to which either class may be predicted"""


def accepted_difference(name: str, expected: NDArray[Any], spread: Any) -> NDArray[Any]:
    """The accepted absolute difference of each value of an output; `spread` is the standard deviation of a score, for the two
    kinds of α that of the logarithm of α₀.
    """
    size = np.abs(expected)
    relative = SPREAD_TOLERANCE * spread * (size if name in ("alpha", "meta_alpha") else 1.0)
    accepted: NDArray[Any] = np.maximum(OUTPUT_TOLERANCE * np.maximum(1.0, size), relative)
    return accepted


def largest_difference(actual: NDArray[Any], expected: NDArray[Any], accepted: Any) -> tuple[float, float]:
    """The difference that is largest relative to the accepted one, and that one, both over max(1, |expected|).

    The difference is infinite if shapes differ or values are not finite.
    """
    if actual.shape != expected.shape or not np.isfinite(actual).all():
        return float("inf"), OUTPUT_TOLERANCE
    differences = np.abs(actual - expected)
    place = np.unravel_index(np.argmax(differences / accepted), differences.shape)
    size = max(1.0, float(np.abs(expected[place])))
    return float(differences[place]) / size, float(np.broadcast_to(accepted, differences.shape)[place]) / size


def differing_predictions(actual: NDArray[Any], expected: NDArray[Any], probabilities: NDArray[Any]) -> int:
    """The number of images whose classes differ, without those whose two classes are equally likely up to rounding.

    `probabilities` (images, classes) need not be normalised.
    """
    if actual.shape != expected.shape:
        return len(expected)
    rows = np.flatnonzero(actual != expected)
    classes = np.stack([actual[rows], expected[rows]])
    valid = ((classes >= 0) & (classes < probabilities.shape[1])).all(axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):  # they may be 0 in float32
        ours, theirs = np.log(probabilities[rows[valid], classes[:, valid].astype(int)])
    return len(rows) - int((np.abs(ours - theirs) <= TIE).sum())
