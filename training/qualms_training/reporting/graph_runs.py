"""Run the graph for an evaluation: no image twice, decoding while the graph runs, and no output kept that is not needed."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from qualms.bundle.manifest import Manifest
from qualms.bundle.runtime import Outputs
from qualms.images.encodings import Encoding
from qualms.images.fingerprints import fingerprints
from qualms.images.input_spec import InputSpec
from qualms.images.observed import ObservedEncoding
from qualms_training.data.dataset import Progress, Selection
from qualms_training.data.lazy_images import Pixels

CHUNK = 256
"""images that are decoded, and run, at a time"""
BASE_ENTROPY, BASE_MAX_PROBABILITY = "base_entropy", "base_max_probability"
"""columns of the softmax of the base, as uncertainty"""

_T = TypeVar("_T")


class Runner(Protocol):
    """A loaded graph, such as `qualms.bundle.runtime.GraphRunner`."""

    def __call__(self, images: NDArray[np.uint8], /) -> Outputs:
        """All outputs (N, …) for images (N, H, W, C)."""


class EvaluationRunner:
    """Runs a graph on all images of one evaluation.

    Outputs with one value per image are kept by the fingerprint of its pixels, about 100 bytes each: an image that was sent
    without losses, or that is in several sets, is run once.
    """

    def __init__(self, runner: Runner, manifest: Manifest, clock: Callable[[], float] = time.perf_counter) -> None:
        self._runner, self._manifest, self._clock = runner, manifest, clock
        self._rows = dict[int, int]()
        self._columns = dict[str, list[NDArray[Any]]]()
        self.images = 0
        """number of images that the graph has run on"""
        self.seconds = 0.0
        """time that the graph took for them"""

    def scores(self, images: Pixels, progress: Progress | None = None) -> Outputs:
        """Prediction and scores, each (N,), of images (N, H, W, C), and `softmax_scores` if the base predicts."""
        rows = []
        for part in prefetched(lambda part: images[part], len(images)):
            rows.append(self._rows_of(part))
            if progress is not None:
                progress(len(part))
        return self._at(np.concatenate(rows))

    def with_probabilities(self, images: Pixels, progress: Progress | None = None) -> Outputs:
        """As `scores`, with the outputs by class (N, K) that the evaluation of class probabilities needs."""
        names = ["probabilities", *(["base_probabilities"] if self._manifest.prediction == "base" else [])]
        names += ["meta_alpha"] if self._manifest.alpha == "joined" else []
        wide, rows = {name: list[NDArray[Any]]() for name in names}, []
        for part in prefetched(lambda part: images[part], len(images)):
            outputs = self._run(part)
            keys = fingerprints(part).tolist()
            self._add({key: position for position, key in enumerate(keys) if key not in self._rows}, outputs)
            rows += [self._rows[key] for key in keys]
            for name in names:
                wide[name].append(outputs[name])
            if progress is not None:
                progress(len(part))
        return {**self._at(np.array(rows)), **{name: np.concatenate(parts) for name, parts in wide.items()}}

    def received(
        self, selection: Selection, encoding: Encoding, seed: int, progress: Progress
    ) -> tuple[Outputs, list[ObservedEncoding]]:
        """The `scores` of images sent in an encoding, and the encodings (N,) as observed."""
        rows, observed = [], list[ObservedEncoding]()
        for images, seen in received_chunks(selection, self._manifest.input, [encoding], seed):
            rows.append(self._rows_of(images))
            observed += seen
            progress(len(images))
        return self._at(np.concatenate(rows)), observed

    def _rows_of(self, images: NDArray[np.uint8]) -> NDArray[np.int64]:
        """(N,) the rows of the images in the columns; the graph is run on new images only."""
        keys = fingerprints(images).tolist()
        new = {key: position for position, key in reversed(list(enumerate(keys))) if key not in self._rows}
        if new:
            positions = sorted(new.values())
            outputs = self._run(images if len(positions) == len(images) else images[positions])
            self._add({keys[position]: row for row, position in enumerate(positions)}, outputs)
        return np.array([self._rows[key] for key in keys], np.int64)

    def _run(self, images: NDArray[np.uint8]) -> Outputs:
        start = self._clock()
        outputs = self._runner(images)
        self.seconds += self._clock() - start
        self.images += len(images)
        return outputs

    def _add(self, positions: dict[int, int], outputs: Outputs) -> None:
        """Keep the values of the images at `positions` of the outputs, by fingerprint."""
        if not positions:
            return
        chosen, first = list(positions.values()), len(self._rows)
        self._rows.update({key: first + row for row, key in enumerate(positions)})
        for name, values in self._narrow(outputs).items():
            self._columns.setdefault(name, []).append(values[chosen])

    def _narrow(self, outputs: Outputs) -> Outputs:
        columns = {name: outputs[name] for name in ("prediction", *self._manifest.scores)}
        return columns if self._manifest.prediction == "meta" else {**columns, **softmax_scores(outputs)}

    def _at(self, rows: NDArray[np.int64]) -> Outputs:
        for name, parts in self._columns.items():
            self._columns[name] = [np.concatenate(parts)]
        return {name: whole[rows] for name, (whole,) in self._columns.items()}


def softmax_scores(outputs: Outputs) -> dict[str, NDArray[np.float64]]:
    """Entropy and negative largest probability of the base's softmax, each (N,), as uncertainty."""
    if BASE_ENTROPY in outputs:
        return {name: outputs[name] for name in (BASE_ENTROPY, BASE_MAX_PROBABILITY)}
    base = outputs["base_probabilities"].astype(np.float64)
    logarithms = np.log(np.maximum(base, np.finfo(np.float32).tiny))
    return {BASE_ENTROPY: -(base * logarithms).sum(axis=1), BASE_MAX_PROBABILITY: -base.max(axis=1)}


def received_chunks(
    selection: Selection, spec: InputSpec, encodings: list[Encoding], seed: int
) -> Iterator[tuple[NDArray[np.uint8], list[ObservedEncoding]]]:
    """Images as they arrive at the service, (n, H, W, C), with their encodings (n,), a chunk at a time.

    The next chunk is encoded and decoded while the caller uses the present one.
    """

    def receive(part: slice) -> tuple[NDArray[np.uint8], list[ObservedEncoding]]:
        received = Selection(selection.source, selection.indices[part]).received(spec, encodings, seed)
        images = received.images[:]  # if they are decoded when read, this also observes their encodings
        return images, list(received.observed)

    return prefetched(receive, len(selection))


def stored_fingerprints(images: Selection, spec: InputSpec) -> NDArray[np.uint64]:
    """(N,) fingerprints of the images as stored, preprocessed a chunk at a time."""
    chunks = prefetched(lambda part: Selection(images.source, images.indices[part]).conformed(spec), len(images))
    return np.concatenate([fingerprints(chunk) for chunk in chunks])


def pixel_fingerprints(images: Pixels) -> NDArray[np.uint64]:
    """(N,) fingerprints of preprocessed images (N, H, W, C), decoded a chunk at a time."""
    return np.concatenate(
        [fingerprints(images[start : start + CHUNK]) for start in range(0, len(images), CHUNK)]
        or [np.zeros(0, np.uint64)]
    )


def prefetched(make: Callable[[slice], _T], count: int) -> Iterator[_T]:
    """`make` of each chunk of `count` items; the next one is made in a thread while the caller uses the present one."""
    parts = [slice(start, min(start + CHUNK, count)) for start in range(0, count, CHUNK)]
    with ThreadPoolExecutor(1, thread_name_prefix="prefetch") as pool:
        following = pool.submit(make, parts[0]) if parts else None
        for index in range(len(parts)):
            assert following is not None  # there is a next chunk
            present = following.result()
            following = pool.submit(make, parts[index + 1]) if index + 1 < len(parts) else None
            yield present
