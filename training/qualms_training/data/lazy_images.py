"""Images that are decoded when they are used, on all cores: for sets that are too large for memory.

A `LazyImages` is indexed like an array of pixels. Each read also starts to decode the images that follow it, so that decoding
overlaps with the network that runs on the images before.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from threading import Lock
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from qualms.machine.cpu import available_cores

LAZY_BYTES = 256 * 2**20
"""pixels of files that would take more than this are decoded when they are used"""
_AHEAD_BYTES = 64 * 2**20
"""largest size of the images that are decoded ahead of their use"""

_ITERATED = 32
"""images decoded together where they are read one after the other"""

Read: TypeAlias = Callable[[int], NDArray[np.uint8]]
_T = TypeVar("_T")


class LazyImages:
    """N images of one shape, uint8 (N, H, W, C), each decoded when it is read; several threads may read."""

    dtype = np.dtype(np.uint8)
    ndim = 4

    def __init__(
        self,
        read: Read,
        indices: NDArray[np.int64],
        shape: tuple[int, int, int],
        digest: Callable[[], str],
        progress: Callable[[int], None] | None = None,
    ) -> None:
        """`read` decodes the image with an index of `indices` to `shape`, in any thread and with the same result each time.

        `digest` identifies what `read` returns for all indices, without reading images. `progress` is called with the number of
        images that are read for the first time.
        """
        self._read, self._indices, self._digest, self._progress = read, indices, digest, progress
        self.shape = (len(indices), *shape)
        self._lock = Lock()
        self._ahead = dict[int, Future[NDArray[np.uint8]]]()
        self._seen = np.zeros(len(indices), bool)

    def __getstate__(self) -> dict[str, Any]:
        """The fields that another process needs: without decoded images and the report of progress."""
        own = {"_lock", "_ahead", "_seen", "_progress"}
        return {name: value for name, value in self.__dict__.items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock, self._ahead, self._progress = Lock(), {}, None
        self._seen = np.zeros(len(self._indices), bool)

    def __len__(self) -> int:
        return len(self._indices)

    @property
    def nbytes(self) -> int:
        """Bytes that all images would take in memory."""
        return int(np.prod(self.shape, dtype=np.int64))

    def __getitem__(self, key: int | np.integer[Any] | slice | NDArray[Any] | list[int]) -> NDArray[np.uint8]:
        """One image (H, W, C), or those of a slice or of an array of positions, (n, H, W, C)."""
        positions = np.arange(len(self))[key]
        if isinstance(positions, np.integer):
            return self.one(int(positions))
        result = np.empty((len(positions), *self.shape[1:]), np.uint8)
        # Without a bound on the images under way, decoded ones would be held twice.
        step = max(1, _AHEAD_BYTES // max(1, result[:1].nbytes))
        for start in range(0, len(positions), step):
            part = positions[start : start + step].tolist()
            futures = self._start(part, ahead=isinstance(key, slice) and start + step >= len(positions), step=step)
            for row, future in enumerate(futures, start):
                result[row] = future.result()
        self._report(positions)
        return result

    def __iter__(self) -> Iterator[NDArray[np.uint8]]:
        """Each image (H, W, C)."""
        for start in range(0, len(self), _ITERATED):
            yield from self[start : start + _ITERATED]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        """All images in memory."""
        return np.asarray(self[:], dtype)

    def one(self, position: int) -> NDArray[np.uint8]:
        """One image (H, W, C), decoded in the calling thread, which may be one of the pool."""
        return self._read(int(self._indices[position]))

    def take(self, positions: slice | NDArray[np.int64]) -> "LazyImages":
        """Some of the images, still to be decoded."""
        indices = self._indices[positions]

        def digest() -> str:
            return combined_digest("take", self.digest(), np.arange(len(self))[positions].tobytes())

        return LazyImages(self._read, indices, (self.shape[1], self.shape[2], self.shape[3]), digest)

    def digest(self) -> str:
        """SHA-256 that identifies the pixels; no image is decoded for it."""
        return self._digest()

    def _start(self, positions: list[int], *, ahead: bool, step: int) -> list[Future[NDArray[np.uint8]]]:
        """Start to decode the images at `positions` and, with `ahead`, as many of those that follow them."""
        with self._lock:
            ready, self._ahead = self._ahead, {}
            futures = [_take(ready, position) or pool().submit(self.one, position) for position in positions]
            if ahead and positions:
                last = positions[-1] + 1
                following = range(last, min(last + min(len(positions), step), len(self)))
                self._ahead = {one: _take(ready, one) or pool().submit(self.one, one) for one in following}
        for unused in ready.values():
            unused.cancel()
        return futures

    def _report(self, positions: NDArray[np.int64]) -> None:
        if self._progress is None:
            return
        with self._lock:
            fresh = int(np.count_nonzero(~self._seen[np.unique(positions)]))
            self._seen[positions] = True
        if fresh:
            self._progress(fresh)


def _take(futures: dict[int, _T], position: int) -> _T | None:
    return futures.pop(position) if position in futures else None


Pixels: TypeAlias = NDArray[np.uint8] | LazyImages
"""preprocessed images (N, H, W, C), in memory or decoded when they are used"""


def first_images(images: Pixels, count: int | None) -> Pixels:
    """The first `count` images, without decoding any; all for None."""
    return images.take(slice(count)) if isinstance(images, LazyImages) else images[:count]


@lru_cache(maxsize=1)
def pool() -> ThreadPoolExecutor:
    """The threads that decode images, one per core. Decoders release the interpreter's lock.

    A task of the pool must not wait for another one, because all threads may be waiting then.
    """
    return ThreadPoolExecutor(available_cores(), thread_name_prefix="decode")


def on_all_cores(function: Callable[[int], _T], indices: Iterable[int]) -> list[_T]:
    """`function` of each index, in their order; the first error is raised."""
    return list(pool().map(function, indices))


def combined_digest(*parts: str | bytes) -> str:
    """SHA-256 of several parts, each with its length."""
    digest = hashlib.sha256()
    for part in parts:
        content = part.encode() if isinstance(part, str) else part
        digest.update(len(content).to_bytes(8, "little"))
        digest.update(content)
    return digest.hexdigest()
