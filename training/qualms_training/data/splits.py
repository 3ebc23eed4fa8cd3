"""Disjoint splits from one seed, so that what calibrates a threshold was never seen by what it judges."""

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qualms_training.errors import DataError

SPLITS = ("train", "validation", "fit", "calibration")
"""Base and meta-model | early stopping | how scores are combined | thresholds and p-values."""


def make_splits(n: int, sizes: Mapping[str, int] | Mapping[str, float], seed: int) -> dict[str, NDArray[np.int64]]:
    """Divide 0 … n − 1 into disjoint random splits, each a sorted array of exactly the size asked for.

    `sizes` are either counts (int) or fractions of n (float); their order does not matter.
    """
    counts = _counts(n, sizes)
    order = np.random.Generator(np.random.PCG64(seed)).permutation(n)
    splits, start = {}, 0
    for name, count in counts.items():
        splits[name] = np.sort(order[start : start + count]).astype(np.int64)
        start += count
    return splits


def splits_record(splits: Mapping[str, NDArray[np.int64]], n: int, seed: int) -> dict[str, Any]:
    """What provenance keeps of a division: enough to repeat it and to notice that it changed."""
    total = hashlib.sha256()
    for name in sorted(splits):
        total.update(f"{name}:{len(splits[name])};".encode())
        total.update(np.ascontiguousarray(splits[name], dtype="<i8").data)
    return {
        "n": n,
        "seed": seed,
        "sizes": {name: len(indices) for name, indices in splits.items()},
        "sha256": total.hexdigest(),
    }


def _counts(n: int, sizes: Mapping[str, int] | Mapping[str, float]) -> dict[str, int]:
    """Counts in the order of SPLITS, from counts or from fractions."""
    for name in sizes:
        if name not in SPLITS:
            raise DataError(f"Split {name!r} is not known; accepted are {', '.join(SPLITS)}.")
    wanted = {name: sizes[name] for name in SPLITS if name in sizes}
    kinds = {type(size) for size in wanted.values()}
    if kinds == {float}:
        counts = _from_fractions(n, wanted)
    elif kinds == {int}:
        counts = {name: int(size) for name, size in wanted.items()}
    else:
        raise DataError(f"Split sizes are {dict(sizes)}; accepted are counts only, or fractions only.")
    for name, count in counts.items():
        if count < 1:
            raise DataError(f"Split {name!r} would have {count} of {n} images; at least 1 is needed.")
    if sum(counts.values()) > n:
        raise DataError(f"The splits ask for {sum(counts.values())} images in all, but there are {n}.")
    return counts


def _from_fractions(n: int, fractions: Mapping[str, float]) -> dict[str, int]:
    """Round the running total, not each part, so that fractions that sum to 1 use every image."""
    edges = [0, *(round(float(edge) * n) for edge in np.cumsum(list(fractions.values())))]
    return {name: edges[i + 1] - edges[i] for i, name in enumerate(fractions)}
