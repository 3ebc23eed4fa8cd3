"""Labelled images, in memory or as files, and their preprocessing to a model's input."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from qualms.errors import ImageError
from qualms.images.input_spec import InputSpec
from qualms.images.preprocess import preprocess, preprocess_batch
from qualms_training.errors import DataError

Indices: TypeAlias = NDArray[np.int64] | Sequence[int]
Progress: TypeAlias = Callable[[int], None]
"""Called with the number of images just finished."""

_CHUNK = 256  # images between two calls of `progress`


@dataclass(frozen=True, eq=False)
class ImageSet:
    """Labelled images: pixels in memory, or paths of files that are read when needed.

    `images` is uint8 of shape (N, H, W) or (N, H, W, C), or N paths; `labels` is int64 of shape (N,) with indices
    into `classes`.
    """

    name: str
    split: str
    images: NDArray[np.uint8] | tuple[Path, ...]
    labels: NDArray[np.int64]
    classes: tuple[str, ...]

    def __post_init__(self) -> None:
        if not len(self.images):
            raise DataError(f"{self.title} has 0 images; at least 1 is needed.")
        if self.labels.shape != (len(self.images),):
            raise DataError(
                f"{self.title} has {len(self.images)} images but labels of shape {self.labels.shape}; "
                "accepted is one label per image."
            )
        low, high = int(self.labels.min()), int(self.labels.max())
        if low < 0 or high >= len(self.classes):
            raise DataError(
                f"{self.title} has labels from {low} to {high}; "
                f"with {len(self.classes)} classes, 0 to {len(self.classes) - 1} are accepted."
            )

    def __len__(self) -> int:
        return len(self.images)

    @property
    def title(self) -> str:
        """The data set's name in messages."""
        return f"Data set {self.name!r} (split {self.split!r})"

    def conformed(
        self, spec: InputSpec, indices: Indices | None = None, progress: Progress | None = None
    ) -> NDArray[np.uint8]:
        """All images (or those at `indices`, in that order) preprocessed to the model's input, (N, H, W, C)."""
        chosen = np.arange(len(self)) if indices is None else np.asarray(indices, dtype=np.int64)
        result = np.empty((len(chosen), *spec.shape), np.uint8)
        for start in range(0, len(chosen), _CHUNK):
            part = chosen[start : start + _CHUNK]
            result[start : start + len(part)] = self._read(part, spec)
            if progress is not None:
                progress(len(part))
        return result

    def digest(self) -> str:
        """SHA-256 of pixels (or file contents), labels and classes."""
        digest = hashlib.sha256()
        if isinstance(self.images, tuple):
            for path in self.images:
                digest.update(hashlib.sha256(_read_file(path)).digest())
        else:
            digest.update(repr(self.images.shape).encode())
            digest.update(np.ascontiguousarray(self.images).data)
        digest.update(np.ascontiguousarray(self.labels, dtype="<i8").data)
        digest.update(repr(self.classes).encode())
        return digest.hexdigest()

    def _read(self, indices: NDArray[np.int64], spec: InputSpec) -> NDArray[np.uint8]:
        if isinstance(self.images, tuple):
            return np.stack([_preprocess_file(self.images[i], spec) for i in indices])
        return preprocess_batch(self.images[indices], spec)


def _preprocess_file(path: Path, spec: InputSpec) -> NDArray[np.uint8]:
    try:
        return preprocess(_read_file(path), spec)
    except ImageError as error:
        raise DataError(f"File {path} is not usable: {error}") from error


def _read_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"File {path} cannot be read: {error.strerror or error}.") from error
