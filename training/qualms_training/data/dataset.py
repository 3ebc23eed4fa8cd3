"""Images with and without labels, in memory or as files, and their preprocessing to a model's input."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from qualms.errors import ImageError
from qualms.images.encodings import Encoding
from qualms.images.input_spec import InputSpec
from qualms.images.observed import ObservedEncoding, observe
from qualms.images.pillow_decoder import decode
from qualms.images.preprocess import from_array, preprocess, preprocess_batch
from qualms_training.errors import DataError

Indices: TypeAlias = NDArray[np.int64] | Sequence[int]
Progress: TypeAlias = Callable[[int], None]
"""Called with the number of images just finished."""

_CHUNK = 256  # images between two calls of `progress`


class Received(NamedTuple):
    """Images as the service receives them."""

    images: NDArray[np.uint8]
    """(N, H, W, C)"""
    observed: list[ObservedEncoding]
    """(N,) their encodings"""


@dataclass(frozen=True, eq=False)
class Images:
    """Images without labels: pixels in memory, or paths of files that are read when needed.

    `images` is uint8 of shape (N, H, W) or (N, H, W, C), or N paths.
    """

    name: str
    split: str
    images: NDArray[np.uint8] | tuple[Path, ...]

    def __post_init__(self) -> None:
        if not len(self.images):
            raise DataError(f"{self.title} has 0 images; at least 1 is needed.")

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
        chosen = self._chosen(indices)
        result = np.empty((len(chosen), *spec.shape), np.uint8)
        for start in range(0, len(chosen), _CHUNK):
            part = chosen[start : start + _CHUNK]
            result[start : start + len(part)] = self._read(part, spec)
            if progress is not None:
                progress(len(part))
        return result

    def received(
        self,
        spec: InputSpec,
        encodings: Sequence[Encoding],
        seed: int,
        indices: Indices | None = None,
        progress: Progress | None = None,
    ) -> Received:
        """The images as they arrive at the service, each in one of `encodings` drawn with `seed`, or as stored without any.

        The encoding of an image depends only on the seed and its index, not on the other images.
        """
        chosen = self._chosen(indices)
        result, observed = np.empty((len(chosen), *spec.shape), np.uint8), list[ObservedEncoding]()
        for row, index in enumerate(chosen.tolist()):
            image = self.images[index]
            sent = _read_file(image) if isinstance(image, Path) else image
            if encodings:
                sent = _encode(sent, encodings, np.random.default_rng((seed, index)), image)
            observed.append(observe(sent, spec))
            result[row] = _preprocess(sent, spec, image)
            if progress is not None:
                progress(1)
        return Received(result, observed)

    def observed(self, spec: InputSpec, indices: Indices | None = None) -> list[ObservedEncoding]:
        """(N,) encodings of the images as stored."""
        images = (self.images[index] for index in self._chosen(indices).tolist())
        return [observe(_read_file(one) if isinstance(one, Path) else one, spec) for one in images]

    def digest(self) -> str:
        """SHA-256 of pixels or file contents."""
        return self._pixel_digest().hexdigest()

    def _pixel_digest(self) -> "hashlib._Hash":
        digest = hashlib.sha256()
        if isinstance(self.images, tuple):
            for path in self.images:
                digest.update(hashlib.sha256(_read_file(path)).digest())
        else:
            digest.update(repr(self.images.shape).encode())
            digest.update(np.ascontiguousarray(self.images).data)
        return digest

    def _chosen(self, indices: Indices | None) -> NDArray[np.int64]:
        return np.arange(len(self)) if indices is None else np.asarray(indices, dtype=np.int64)

    def _read(self, indices: NDArray[np.int64], spec: InputSpec) -> NDArray[np.uint8]:
        if isinstance(self.images, tuple):
            return np.stack([_preprocess(_read_file(self.images[i]), spec, self.images[i]) for i in indices])
        return preprocess_batch(self.images[indices], spec)


@dataclass(frozen=True, eq=False)
class ImageSet(Images):
    """Images with labels: int64 of shape (N,), indices into `classes`."""

    labels: NDArray[np.int64]
    classes: tuple[str, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
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

    def digest(self) -> str:
        """SHA-256 of pixels (or file contents), labels and classes."""
        digest = self._pixel_digest()
        digest.update(np.ascontiguousarray(self.labels, dtype="<i8").data)
        digest.update(repr(self.classes).encode())
        return digest.hexdigest()


@dataclass(frozen=True, eq=False)
class Selection:
    """Some images of a collection."""

    source: Images
    indices: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.indices)

    def first(self, count: int) -> "Selection":
        """At most `count` of the images."""
        return Selection(self.source, self.indices[:count])

    def conformed(self, spec: InputSpec, progress: Progress | None = None) -> NDArray[np.uint8]:
        """As `Images.conformed`."""
        return self.source.conformed(spec, self.indices, progress)

    def observed(self, spec: InputSpec) -> list[ObservedEncoding]:
        """As `Images.observed`."""
        return self.source.observed(spec, self.indices)

    def received(
        self, spec: InputSpec, encodings: Sequence[Encoding], seed: int, progress: Progress | None = None
    ) -> Received:
        """As `Images.received`."""
        return self.source.received(spec, encodings, seed, self.indices, progress)


def _encode(
    image: bytes | NDArray[np.uint8], encodings: Sequence[Encoding], rng: np.random.Generator, name: object
) -> bytes:
    try:
        pixels = decode(image) if isinstance(image, bytes) else from_array(image)
        return encodings[int(rng.integers(len(encodings)))].encode(pixels, rng)
    except ImageError as error:
        raise _not_usable(name, error) from error


def _preprocess(image: bytes | NDArray[np.uint8], spec: InputSpec, name: object) -> NDArray[np.uint8]:
    try:
        return preprocess(image, spec) if isinstance(image, bytes) else preprocess_batch(image[np.newaxis], spec)[0]
    except ImageError as error:
        raise _not_usable(name, error) from error


def _not_usable(name: object, error: ImageError) -> DataError:
    return DataError(f"File {name} is not usable: {error}" if isinstance(name, Path) else str(error))


def _read_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"File {path} cannot be read: {error.strerror or error}.") from error
