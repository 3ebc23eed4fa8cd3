"""One form for every data set, so that whatever its source it takes the same path to the model."""

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
"""Called with how many more images are done."""

_CHUNK = 256  # images between two calls of `progress`


@dataclass(frozen=True, eq=False)
class ImageSet:
    """Labelled images: pixels in memory, or the paths of files that are read when they are needed.

    `images` is uint8 of shape (N, H, W) or (N, H, W, C), or N paths; `labels` is int64 of shape (N,), each an
    index into `classes`.
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
                "accepted is one label an image."
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
        """How messages name the set."""
        return f"Data set {self.name!r} (split {self.split!r})"

    def subset(self, indices: Indices) -> "ImageSet":
        """Pick images by index, in the order given."""
        chosen = np.asarray(indices, dtype=np.int64)
        images = tuple(self.images[i] for i in chosen) if isinstance(self.images, tuple) else self.images[chosen]
        return ImageSet(self.name, self.split, images, self.labels[chosen], self.classes)

    def conformed(
        self, spec: InputSpec, indices: Indices | None = None, progress: Progress | None = None
    ) -> NDArray[np.uint8]:
        """Every image (or those at `indices`, in that order) as the model takes it, (N, H, W, C)."""
        chosen = np.arange(len(self)) if indices is None else np.asarray(indices, dtype=np.int64)
        result = np.empty((len(chosen), *spec.shape), np.uint8)
        for start in range(0, len(chosen), _CHUNK):
            part = chosen[start : start + _CHUNK]
            result[start : start + len(part)] = self._read(part, spec)
            if progress is not None:
                progress(len(part))
        return result

    def digest(self) -> str:
        """SHA-256 of pixels (or file contents), labels and classes: the identity that caches are keyed by."""
        total = hashlib.sha256()
        if isinstance(self.images, tuple):
            for path in self.images:
                total.update(hashlib.sha256(_read_file(path)).digest())
        else:
            total.update(repr(self.images.shape).encode())
            total.update(np.ascontiguousarray(self.images).data)
        total.update(np.ascontiguousarray(self.labels, dtype="<i8").data)
        total.update(repr(self.classes).encode())
        return total.hexdigest()

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
