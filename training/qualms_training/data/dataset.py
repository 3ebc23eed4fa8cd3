"""Images with and without labels, in memory or as files, and their preprocessing to a model's input."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeAlias, overload

import numpy as np
from numpy.typing import NDArray

from qualms.errors import ImageError
from qualms.images.encodings import Encoding
from qualms.images.fingerprints import fingerprints
from qualms.images.input_spec import InputSpec
from qualms.images.observed import ObservedEncoding, observe
from qualms.images.pillow_decoder import decode
from qualms.images.preprocess import from_array, preprocess, preprocess_batch
from qualms_training.data.lazy_images import LAZY_BYTES, LazyImages, Pixels, combined_digest, on_all_cores
from qualms_training.errors import DataError

Indices: TypeAlias = NDArray[np.int64] | Sequence[int]
Progress: TypeAlias = Callable[[int], None]
"""Called with the number of images just finished."""

_CHUNK = 256  # images between two calls of `progress`
_PART = 32  # images of an array that one thread preprocesses


class ImageSource(Protocol):
    """Images that are made when they are read, such as those of a torch Dataset."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> NDArray[np.uint8]:
        """Image `index`, (H, W) or (H, W, C)."""


@dataclass(frozen=True, eq=False)
class Received:
    """Images as the service receives them."""

    images: Pixels
    """(N, H, W, C)"""
    observed: Sequence[ObservedEncoding]
    """(N,) their encodings"""


@dataclass(frozen=True, eq=False)
class Images:
    """Images without labels: pixels in memory, paths of files that are read when needed, or any other source.

    `images` is uint8 of shape (N, H, W) or (N, H, W, C), N paths, or a source of N arrays.
    """

    name: str
    split: str
    images: NDArray[np.uint8] | tuple[Path, ...] | ImageSource
    _known_digest: list[str] = field(init=False, repr=False, default_factory=list)
    """of the pixels or file contents when they were last read for a digest"""
    _known_fingerprints: list[NDArray[np.uint64]] = field(init=False, repr=False, default_factory=list)
    """of each image, when they were last read for a digest"""

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

    def pixels(self, spec: InputSpec, indices: Indices | None = None, progress: Progress | None = None) -> Pixels:
        """As `conformed`, but decoded when they are used if they are not in memory yet and would take more than LAZY_BYTES."""
        chosen = self._chosen(indices)
        if not self.is_lazy(spec, len(chosen)):
            return self.conformed(spec, chosen, progress)

        def read(index: int) -> NDArray[np.uint8]:
            return _preprocess(self._sent(index), spec, self.images[index])

        def digest() -> str:
            return combined_digest("conformed", self.pixel_digest(), chosen.tobytes(), spec.model_dump_json())

        return LazyImages(read, chosen, spec.shape, digest)

    def is_lazy(self, spec: InputSpec, count: int) -> bool:
        """Whether `count` of the images are decoded only when they are used."""
        return not isinstance(self.images, np.ndarray) and count * int(np.prod(spec.shape)) > LAZY_BYTES

    def received(
        self,
        spec: InputSpec,
        encodings: Sequence[Encoding],
        seed: int,
        indices: Indices | None = None,
        progress: Progress | None = None,
    ) -> Received:
        """The images as they arrive at the service, each in one of `encodings` drawn with `seed`, or as stored without any.

        The encoding of an image depends only on the seed and its index, not on the other images. If all images would take more
        than LAZY_BYTES, each is encoded and decoded when it is read.
        """
        chosen = self._chosen(indices)

        def receive(index: int) -> tuple[NDArray[np.uint8], ObservedEncoding]:
            image, sent = self.images[index], self._sent(index)
            if encodings:
                sent = _encode(sent, encodings, np.random.default_rng((seed, index)), image)
            return _preprocess(sent, spec, image), observe(sent, spec)

        if len(chosen) * int(np.prod(spec.shape)) > LAZY_BYTES:

            def digest() -> str:
                texts = repr([encoding.text for encoding in encodings])
                parts = (self.pixel_digest(), chosen.tobytes(), spec.model_dump_json(), texts, str(seed))
                return combined_digest("received", *parts)

            observed = _ObservedLater(receive, chosen)
            return Received(LazyImages(observed.read, chosen, spec.shape, digest, progress), observed)
        result, encodings_seen = np.empty((len(chosen), *spec.shape), np.uint8), list[ObservedEncoding]()
        for start in range(0, len(chosen), _CHUNK):
            for pixels, seen in on_all_cores(receive, chosen[start : start + _CHUNK].tolist()):
                result[len(encodings_seen)] = pixels
                encodings_seen.append(seen)
            if progress is not None:
                progress(len(encodings_seen) - start)
        return Received(result, encodings_seen)

    def observed(self, spec: InputSpec, indices: Indices | None = None) -> list[ObservedEncoding]:
        """(N,) encodings of the images as stored."""
        return on_all_cores(lambda index: observe(self._sent(index), spec), self._chosen(indices).tolist())

    def digest(self) -> str:
        """SHA-256 of pixels or file contents."""
        return self._pixel_digest().hexdigest()

    def pixel_digest(self) -> str:
        """SHA-256 of pixels or file contents, whether or not the images have labels; files are read at most once for it."""
        return self._known_digest[0] if self._known_digest else self._pixel_digest().hexdigest()

    def stored_fingerprints(self) -> NDArray[np.uint64]:
        """(N,) the first 64 bits of the SHA-256 of each image's pixels or file; files are read at most once for them."""
        if isinstance(self.images, np.ndarray):
            return fingerprints(self.images)
        if not self._known_fingerprints:
            self._pixel_digest()
        return self._known_fingerprints[0]

    def _pixel_digest(self) -> "hashlib._Hash":
        digest = hashlib.sha256()
        if isinstance(self.images, np.ndarray):
            digest.update(repr(self.images.shape).encode())
            digest.update(np.ascontiguousarray(self.images).data)
        else:
            of_one = self._file_digest if isinstance(self.images, tuple) else self._source_digest
            digests = on_all_cores(of_one, range(len(self)))
            for one in digests:
                digest.update(one)
            self._known_fingerprints[:] = [np.frombuffer(b"".join(one[:8] for one in digests), "<u8").astype(np.uint64)]
        self._known_digest[:] = [digest.hexdigest()]
        return digest

    def _file_digest(self, index: int) -> bytes:
        content = self._sent(index)
        assert isinstance(content, bytes)  # the images are files
        return hashlib.sha256(content).digest()

    def _source_digest(self, index: int) -> bytes:
        image = self._sent(index)
        assert not isinstance(image, bytes)  # a source has arrays
        return hashlib.sha256(repr(image.shape).encode() + np.ascontiguousarray(image).tobytes()).digest()

    def _chosen(self, indices: Indices | None) -> NDArray[np.int64]:
        return np.arange(len(self)) if indices is None else np.asarray(indices, dtype=np.int64)

    def _sent(self, index: int) -> bytes | NDArray[np.uint8]:
        """The contents of a file, or pixels (H, W) or (H, W, C)."""
        image = self.images[index]
        return _read_file(image) if isinstance(image, Path) else image

    def _read(self, indices: NDArray[np.int64], spec: InputSpec) -> NDArray[np.uint8]:
        if isinstance(self.images, np.ndarray):
            images = self.images[indices]
            starts = range(0, len(images), _PART)
            return np.concatenate(
                on_all_cores(lambda start: preprocess_batch(images[start : start + _PART], spec), starts)
            )
        return np.stack(
            on_all_cores(lambda index: _preprocess(self._sent(index), spec, self.images[index]), indices.tolist())
        )


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

    def pixels(self, spec: InputSpec, progress: Progress | None = None) -> Pixels:
        """As `Images.pixels`."""
        return self.source.pixels(spec, self.indices, progress)

    def observed(self, spec: InputSpec) -> list[ObservedEncoding]:
        """As `Images.observed`."""
        return self.source.observed(spec, self.indices)

    def received(
        self, spec: InputSpec, encodings: Sequence[Encoding], seed: int, progress: Progress | None = None
    ) -> Received:
        """As `Images.received`."""
        return self.source.received(spec, encodings, seed, self.indices, progress)


class _ObservedLater(Sequence[ObservedEncoding]):
    """Encodings of N images, known for those that were read; the others are read when their encoding is needed."""

    def __init__(
        self, receive: Callable[[int], tuple[NDArray[np.uint8], ObservedEncoding]], indices: NDArray[np.int64]
    ) -> None:
        self._receive, self._indices = receive, indices
        self._known = dict[int, ObservedEncoding]()

    def __len__(self) -> int:
        return len(self._indices)

    @overload
    def __getitem__(self, position: int) -> ObservedEncoding: ...
    @overload
    def __getitem__(self, position: slice) -> list[ObservedEncoding]: ...
    def __getitem__(self, position: int | slice) -> ObservedEncoding | list[ObservedEncoding]:
        if isinstance(position, slice):
            return [self[one] for one in range(len(self))[position]]
        index = int(self._indices[position])
        if index not in self._known:
            self.read(index)
        return self._known[index]

    def read(self, index: int) -> NDArray[np.uint8]:
        """The image with an index, (H, W, C)."""
        pixels, self._known[index] = self._receive(index)
        return pixels


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
