"""Disjoint random splits from one seed: images that calibrate thresholds are not used for anything else."""

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qualms_training.errors import DataError

SPLITS = ("train", "validation", "fit", "calibration")
"""used to train base and meta-model; to stop training; for the distribution of scores, the temperature of α and candidate trust
thresholds; for thresholds and p-values"""


def make_splits(n: int, sizes: Mapping[str, int], seed: int) -> dict[str, NDArray[np.int64]]:
    """Divide 0 … n − 1 into disjoint random splits, each a sorted array of exactly the requested size.

    The order of `sizes` does not matter.
    """
    for name, size in sizes.items():
        if name not in SPLITS:
            raise DataError(f"Split {name!r} is not known; accepted are {', '.join(SPLITS)}.")
        if size < 1:
            raise DataError(f"Split {name!r} would have {size} of {n} images; at least 1 is needed.")
    if sum(sizes.values()) > n:
        needed = sum(sizes.values())
        raise DataError(
            f"The splits {', '.join(sizes)} need {needed:,} images in total (data.splits), but there are {n:,}; `qualms init` "
            "writes sizes that fit."
        )
    order = np.random.Generator(np.random.PCG64(seed)).permutation(n)
    splits, start = {}, 0
    for name in SPLITS:
        if name in sizes:
            splits[name] = np.sort(order[start : start + sizes[name]]).astype(np.int64)
            start += sizes[name]
    return splits


def splits_record(splits: Mapping[str, NDArray[np.int64]], n: int, seed: int) -> dict[str, Any]:
    """The splits' entry in the provenance: sizes and seed to repeat them, and a digest to detect a change."""
    digest = hashlib.sha256()
    for name in sorted(splits):
        digest.update(f"{name}:{len(splits[name])};".encode())
        digest.update(np.ascontiguousarray(splits[name], dtype="<i8").data)
    return {
        "n": n,
        "seed": seed,
        "sizes": {name: len(indices) for name, indices in splits.items()},
        "sha256": digest.hexdigest(),
    }
