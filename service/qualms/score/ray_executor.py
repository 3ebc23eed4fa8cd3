"""Execution of chunks on a Ray cluster; the rows are those of `LocalExecutor`, because both use `Scorer` on the same chunks.

The model is sent through Ray's object store, because its path need not exist on other nodes. Files are read by the node that scores
them: their paths must be those of a shared file system, or URIs.
"""

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from qualms.bundle.file import bundle_from_bytes
from qualms.cluster.connection import ClusterOptions, check_versions, connected, versions
from qualms.cluster.ordered_map import ordered_map
from qualms.errors import BundleError
from qualms.model import Model
from qualms.score.chunks import MAX_CHUNK, Chunk
from qualms.score.scorer import ScoreOptions, Scorer

_TASK_CHUNKS = 8
"""chunks of small images in one task, which should take long beside the milliseconds that Ray needs for it"""
_PACKAGES = ("qualms", "onnxruntime", "numpy", "pillow")
"""packages that determine the rows"""


class RayExecutor:
    """Models on the nodes of a cluster."""

    def __init__(
        self,
        model: str,
        options: ScoreOptions,
        processes: int,
        *,
        digest: str,
        cluster: ClusterOptions,
    ) -> None:
        """`digest` is that of the bundle at the path `model`. At most `processes` models run at once; 0 for no limit."""
        self._model, self._options, self._processes = Path(model), options, processes
        self._digest, self._cluster = digest, cluster
        self._stack = ExitStack()
        self._ray: Any = None

    def __enter__(self) -> "RayExecutor":
        self._ray = self._stack.enter_context(connected(self._cluster.address))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def map(self, chunks: Iterable[Chunk]) -> Iterator[bytes]:
        """As in `Executor`."""
        try:
            data = self._model.read_bytes()
        except OSError as error:
            raise BundleError(f"{self._model} cannot be read: {error.strerror}.") from None
        opener = _OpenScorer(self._ray, self._ray.put(data), self._digest, self._options, versions(*_PACKAGES))
        for parts in ordered_map(self._ray, _Tasks(chunks), opener, self._cluster, self._processes or None):
            yield from parts


@dataclass(frozen=True)
class _Tasks:
    """Several chunks at a time, with absolute paths, since other nodes have other working directories."""

    chunks: Iterable[Chunk]

    def __iter__(self) -> Iterator[list[Chunk]]:
        task: list[Chunk] = []
        for chunk in self.chunks:
            sent = any(data is not None for data in chunk.data)
            if task and (sent or len(task) >= _TASK_CHUNKS):
                yield task
                task = []
            task.append(chunk._replace(items=[_absolute(item) for item in chunk.items]))
            if sent or len(chunk.items) < MAX_CHUNK:  # large images, whose models are slow, or bytes that are sent
                yield task
                task = []
        if task:
            yield task


def _absolute(item: Any) -> Any:
    return item._replace(source=os.path.abspath(item.source)) if item.kind in ("file", "range", "zip") else item  # noqa: PTH100


@dataclass(frozen=True)
class _OpenScorer:
    """Opens the model on a node."""

    ray: Any
    model: Any
    """reference to the bytes of the bundle"""
    digest: str
    options: ScoreOptions
    versions: dict[str, str]

    @property
    def key(self) -> str:
        """Everything that determines the rows."""
        return f"{self.digest} {self.options}"

    def open(self) -> Callable[[list[Chunk]], list[bytes]]:
        """The function that scores chunks."""
        check_versions(self.versions)
        data = self.ray.get(self.model)
        if hashlib.sha256(data).hexdigest() != self.digest:
            raise BundleError("The model was changed while the run began; run the command again.")
        bundle = bundle_from_bytes(data, "The model")
        scorer = Scorer(Model(bundle, self.options.threads, cuda=self.options.cuda), self.options)
        return lambda chunks: [scorer.score(chunk).to_json() for chunk in chunks]
