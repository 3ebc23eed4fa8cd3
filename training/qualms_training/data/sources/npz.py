"""Data sets as files NAME-SPLIT.npz with the arrays `images`, `labels` and `classes`, read without pickle."""

import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qualms.files import atomic_path
from qualms_training.data.dataset import ImageSet
from qualms_training.errors import DataError

DOWNLOADABLE = {
    "mnist": "MNIST",
    "fashion_mnist": "FashionMNIST",
    "kmnist": "KMNIST",
    "omniglot": "Omniglot",
    "cifar10": "CIFAR10",
    "cifar100": "CIFAR100",
    "svhn": "SVHN",
}
"""data sets that `qualms data` can download, each with the name of its torchvision class"""
_KEYS = ("images", "labels", "classes")


def file_name(name: str, split: str) -> str:
    """The name of the file of one split."""
    return f"{name}-{split}.npz"


def read_npz(folder: Path, name: str, split: str) -> ImageSet:
    """Read one split of a data set from a data folder."""
    path = folder / file_name(name, split)
    if not path.is_file():
        raise DataError(_not_found(folder, name, split))
    arrays = _read_arrays(path)
    _check_types(path, arrays)
    classes = tuple(str(label) for label in arrays["classes"])
    try:
        return ImageSet(name, split, arrays["images"], arrays["labels"].astype(np.int64), classes)
    except DataError as error:
        raise DataError(f"File {path} is malformed: {error}") from error


def write_npz(folder: Path, images: ImageSet) -> Path:
    """Write a data set that is in memory, atomically."""
    path = folder / file_name(images.name, images.split)
    with atomic_path(path) as temporary, temporary.open("wb") as file:
        np.savez(file, images=np.asarray(images.images), labels=images.labels, classes=np.array(images.classes))
    return path


def _read_arrays(path: Path) -> dict[str, NDArray[Any]]:
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            missing = [key for key in _KEYS if key not in archive]
            if missing:
                raise DataError(
                    f"File {path} is malformed: it has no {' and no '.join(missing)}; needed are {', '.join(_KEYS)}."
                )
            return {key: archive[key] for key in _KEYS}
    except (OSError, ValueError, EOFError, TypeError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"File {path} is malformed: it is not an npz file of plain arrays ({error}).") from error


def _check_types(path: Path, arrays: dict[str, NDArray[Any]]) -> None:
    images, labels, classes = (arrays[key] for key in _KEYS)
    valid_shape = images.ndim == 3 or (images.ndim == 4 and images.shape[-1] in (1, 3, 4))
    checks = {
        "images": (
            images.dtype == np.uint8 and valid_shape,
            "uint8 of shape (N, H, W) or (N, H, W, C) with C = 1, 3 or 4",
        ),
        "labels": (labels.dtype.kind in "iu" and labels.ndim == 1, "integers of shape (N,)"),
        "classes": (classes.dtype.kind == "U" and classes.ndim == 1, "strings of shape (K,)"),
    }
    for key, (valid, accepted) in checks.items():
        if not valid:
            array = arrays[key]
            raise DataError(
                f"File {path} is malformed: {key} is {array.dtype} of shape {array.shape}; accepted is {accepted}."
            )


def _not_found(folder: Path, name: str, split: str) -> str:
    if not folder.is_dir():
        reason = f"there is no folder {folder}"
    else:
        present = sorted(path.stem for path in folder.glob("*-*.npz"))
        reason = f"{folder} has no {file_name(name, split)} but holds {', '.join(present) or 'no data sets'}"
    download = f"get it with `qualms data {name} --out DIR`, or " if name in DOWNLOADABLE else ""
    return (
        f"Data set {name!r} (split {split!r}) was not found: {reason}; "
        f"{download}name another folder with --data or QUALMS_DATA."
    )
