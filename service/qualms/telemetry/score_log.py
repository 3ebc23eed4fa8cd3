"""A file of the scores of served images, one JSON line per image, from which `qualms calibrate --from-log` recalibrates.

A line has the SHA-256 of the graph, the fingerprint of the image, the predicted class and all scores; it has no pixels. Lines
are written by a thread of their own. If it falls behind, batches are dropped and counted; predictions never wait for a disk.
"""

import logging
import queue
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
import orjson
from numpy.typing import NDArray

from qualms.errors import QualmsError, first_line
from qualms.images.fingerprints import fingerprints

_MAX_BATCHES = 64
"""batches that wait for the thread"""
_log = logging.getLogger("qualms.score_log")

_Batch = tuple[NDArray[np.uint8], Mapping[str, NDArray[Any]]]


class ScoreLogError(QualmsError):
    """The file of scores cannot be written."""


class ScoreLog:
    """Appends scores to a file until it has `max_images` lines; call `close` to write what is queued."""

    def __init__(self, path: Path, max_images: int, graph_sha256: str, scores: list[str]) -> None:
        """ScoreLogError if the file cannot be opened."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists() and not path.is_file():
                raise ScoreLogError(f"The score log {path} is not a file; give another path.")
            self._file: IO[bytes] = path.open("ab", buffering=0)
            with path.open("rb") as file:
                self._left = max_images - sum(1 for _ in file)
        except OSError as error:
            raise ScoreLogError(f"The score log {path} cannot be written: {error.strerror or error}.") from None
        self._path, self._graph, self._scores = path, graph_sha256, scores
        self._queue: queue.Queue[_Batch | None] = queue.Queue(_MAX_BATCHES)
        self._not_queued = self._not_written = 0
        self._thread = threading.Thread(target=self._work, name="score-log", daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> int:
        """Images that were not written because the thread fell behind or the disk failed."""
        return self._not_queued + self._not_written

    def write(self, images: NDArray[np.uint8], outputs: Mapping[str, NDArray[Any]]) -> None:
        """Queue the scores of images (N, H, W, C), of the first ones only if the file is nearly full; returns at once."""
        count = min(self._left, len(images))
        if count <= 0:
            return
        try:
            self._queue.put_nowait((images[:count], outputs))
        except queue.Full:
            self._not_queued += count
            return
        self._left -= count
        if self._left <= 0:
            _log.warning("score log full", extra={"path": str(self._path)})

    def close(self) -> None:
        """Write what is queued and close the file."""
        self._queue.put(None)
        self._thread.join()
        self._file.close()

    def _work(self) -> None:
        while (batch := self._queue.get()) is not None:
            images, outputs = batch
            try:
                self._file.write(self._lines(images, outputs))
            except Exception as error:  # the thread must go on: `close` waits for it
                if not self._not_written:
                    _log.error("score log failed", extra={"path": str(self._path), "reason": first_line(error)})
                self._not_written += len(images)

    def _lines(self, images: NDArray[np.uint8], outputs: Mapping[str, NDArray[Any]]) -> bytes:
        columns = [outputs[name] for name in self._scores]
        lines = []
        for row, fingerprint in enumerate(fingerprints(images).tolist()):
            line = {
                "graph": self._graph,
                "image": f"{fingerprint:016x}",
                "prediction": int(outputs["prediction"][row]),
                "scores": {name: column[row] for name, column in zip(self._scores, columns, strict=True)},
            }
            lines.append(orjson.dumps(line, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE))
        return b"".join(lines)
