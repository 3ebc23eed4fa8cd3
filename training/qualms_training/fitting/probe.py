"""What a network says about a few images, kept beside what was made with it.

Weights alone do not tell one network from another: the code around them may be edited and leave them as they are.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qualms.files import atomic_path

IMAGES = 4
"""shown to a network; the first ones of the data at hand"""
_TOLERANCE = 1e-2  # of the largest value: more than devices and half precision differ by

Outputs = Sequence[NDArray[Any]]


def agree(found: Outputs, kept: Outputs) -> bool:
    """Whether two networks say the same, up to rounding."""
    return len(found) == len(kept) and all(_close(ours, theirs) for ours, theirs in zip(found, kept, strict=True))


def save(path: Path, outputs: Outputs) -> None:
    """Keep what a network says."""
    with atomic_path(path) as temporary, temporary.open("wb") as file:
        np.savez(file, *outputs)


def agrees_with_kept(path: Path, found: Outputs) -> bool:
    """Whether a network says what `path` holds; where nothing was kept, it is taken on trust."""
    if not path.exists():
        return True
    with np.load(path, allow_pickle=False) as kept:
        return agree(found, list(kept.values()))


def _close(ours: NDArray[Any], theirs: NDArray[Any]) -> bool:
    if ours.shape != theirs.shape:
        return False
    kept = theirs.astype(np.float64)
    return bool(np.abs(ours - kept).max() <= _TOLERANCE * np.abs(kept).max())
