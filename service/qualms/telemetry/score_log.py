"""A file of the scores of served images, one JSON line per image, from which `qualms calibrate --from-log` recalibrates.

A line has the SHA-256 of the graph, fingerprint and encoding of the image, the predicted class and all scores; no pixels. Lines
are written by a thread of their own. If it falls behind, batches are dropped and counted; predictions never wait for a disk.
"""

import logging
import os
import queue
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

import numpy as np
import orjson
from numpy.typing import NDArray

from qualms.errors import QualmsError, first_line
from qualms.images.fingerprints import fingerprints
from qualms.images.observed import ObservedEncoding

_MAX_BATCHES = 64
_MAX_BYTES = 32 * 2**20
"""batches, and bytes of their images, that wait for the thread"""
CLOSE_SECONDS = 5.0
_FIRST_KEY = b'{"graph":'
"""the beginning of every line"""
_log = logging.getLogger("qualms.score_log")

_Batch = tuple[NDArray[np.uint8], int, Mapping[str, NDArray[Any]], Mapping[int, ObservedEncoding]]
"""images, their bytes, outputs and encodings"""


class ScoreLogError(QualmsError):
    """The file of scores cannot be written."""


class ScoreLog:
    """Appends scores to a file until it has `max_images` lines; call `close` to write what is queued.

    Every process needs a file of its own.
    """

    def __init__(self, path: Path, max_images: int, graph_sha256: str, scores: list[str]) -> None:
        """ScoreLogError if the file cannot be opened."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists() and not path.is_file():
                raise ScoreLogError(f"The score log {path} is not a file; give another path.")
            lines, end = _read_existing(path, graph_sha256)
            self._file: IO[bytes] = path.open("ab", buffering=0)
            self._file.truncate(end)
            self._left = max_images - lines
        except OSError as error:
            raise ScoreLogError(f"The score log {path} cannot be written: {error.strerror or error}.") from None
        self._path, self._graph, self._scores = path, graph_sha256, scores
        self._queue: queue.Queue[_Batch | None] = queue.Queue(_MAX_BATCHES)
        self._not_queued = self._not_written = 0
        self._taken = self._given = 0  # bytes of images; each is changed by one thread only
        self._thread = threading.Thread(target=self._work, name="score-log", daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> int:
        """Images that were not written because the thread fell behind or the disk failed."""
        return self._not_queued + self._not_written

    def write(
        self,
        images: NDArray[np.uint8],
        outputs: Mapping[str, NDArray[Any]],
        encodings: Mapping[int, ObservedEncoding] = MappingProxyType({}),
    ) -> None:
        """Queue the scores of images (N, H, W, C), of the first ones only if the file is nearly full; returns at once.

        `encodings` are those of the images by row, as far as they are known.
        """
        count = min(self._left, len(images))
        if count <= 0:
            return
        waiting = self._given - self._taken
        if (waiting and waiting + images.nbytes > _MAX_BYTES) or self._queue.full():
            self._not_queued += count
            return
        self._given += images.nbytes
        self._queue.put_nowait((images[:count], images.nbytes, outputs, encodings))
        self._left -= count
        if self._left <= 0:
            _log.warning("score log full", extra={"path": str(self._path)})

    def close(self, timeout: float = CLOSE_SECONDS) -> None:
        """Write what is queued, for at most `timeout` seconds, and close the file."""
        deadline = time.monotonic() + timeout
        with suppress(queue.Full):
            self._queue.put(None, timeout=timeout)
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():  # the disk does not answer; the thread ends with the process
            _log.error("score log not closed", extra={"path": str(self._path)})
            return
        self._file.close()

    def _work(self) -> None:
        while (batch := self._queue.get()) is not None:
            images, size, outputs, encodings = batch
            try:
                self._append(self._lines(images, outputs, encodings))
            except Exception as error:  # the thread must go on: `close` waits for it
                if not self._not_written:
                    _log.error("score log failed", extra={"path": str(self._path), "reason": first_line(error)})
                self._not_written += len(images)
            self._taken += size

    def _append(self, lines: bytes) -> None:
        """Write all of the lines, or none of them if the disk is full."""
        end = self._file.seek(0, os.SEEK_END)
        written = 0
        try:
            while written < len(lines):
                written += self._file.write(lines[written:])
        except OSError:
            self._file.truncate(end)
            raise

    def _lines(
        self,
        images: NDArray[np.uint8],
        outputs: Mapping[str, NDArray[Any]],
        encodings: Mapping[int, ObservedEncoding],
    ) -> bytes:
        columns = [outputs[name] for name in self._scores]
        lines = []
        for row, fingerprint in enumerate(fingerprints(images).tolist()):
            line = {
                "graph": self._graph,
                "image": f"{fingerprint:016x}",
                "encoding": encodings[row].text if row in encodings else None,
                "prediction": int(outputs["prediction"][row]),
                "scores": {name: column[row] for name, column in zip(self._scores, columns, strict=True)},
            }
            lines.append(orjson.dumps(line, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE))
        return b"".join(lines)


def _read_existing(path: Path, graph_sha256: str) -> tuple[int, int]:
    """Number of lines of an earlier log, and its size without an unfinished last line, which a crash may have left.

    ScoreLogError if the file is not a score log, or that of another model.
    """
    if not path.exists():
        return 0, 0
    lines = end = 0
    with path.open("rb") as file:
        for line in file:
            known = line.startswith(_FIRST_KEY)
            if not known or (line.endswith(b"\n") and graph_sha256.encode() not in line[: len(_FIRST_KEY) + 80]):
                reason = "has scores of another model" if known else "is not a score log"
                raise ScoreLogError(f"The file {path} {reason}; give another path.")
            if line.endswith(b"\n"):
                lines, end = lines + 1, end + len(line)
    return lines, end
