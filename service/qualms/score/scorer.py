"""The scoring of one chunk of files: read, decode, run, decide, rows. The same whatever executes it.

Files are decoded as by the service: plain PNG and JPEG files in this process, all others in a worker process that is killed if a
file takes too much time or memory, or crashes the decoder.
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qualms.decisions.operating_point import DEFAULT_OPERATING_POINT, OperatingPoint
from qualms.errors import ImageError
from qualms.images.estimates import estimate
from qualms.images.observed import observe
from qualms.images.pillow_decoder import MAX_PIXELS, MAX_SIDE
from qualms.images.plain_files import read_plain
from qualms.images.preprocess import preprocess_plain, preprocess_with_pillow
from qualms.images.worker_pool import DeadlinePassed, WorkerPool
from qualms.model import Model, open_model
from qualms.replies import AlphaDetail
from qualms.score.chunks import Chunk
from qualms.score.items import Item, read_item
from qualms.score.rows import ERROR, PATH, TERMS_FIELD, Part, result_columns

_DECODE_SECONDS = 600.0
"""time that one file may take, or a process that decodes files needs to start, if the machine does other work"""


@dataclass(frozen=True)
class ScoreOptions:
    """The options that determine the rows of a run, beside the model and the files."""

    point: OperatingPoint = DEFAULT_OPERATING_POINT
    alpha: bool = False
    threads: int = 1
    """of each model; sums may be rounded otherwise with another number"""
    cuda: bool = False
    """run on GPUs"""


class Scorer:
    """Scores chunks with one model."""

    def __init__(self, model: Model, options: ScoreOptions) -> None:
        """OperatingPointError if the calibration does not support the operating point."""
        model.rule(options.point)
        self._model, self._options = model, options
        manifest = model.bundle.manifest
        self._spec = manifest.input
        self._columns = result_columns(manifest, options.point, alpha=options.alpha)
        self._explain = manifest.alpha == "joined"
        self._terms = manifest.flag_terms if self._explain else []
        # A worker decodes while this process waits for it, so it needs the same priority.
        self._pool = (
            WorkerPool(1, idle_priority=False, start_seconds=_DECODE_SECONDS) if sys.platform == "linux" else None
        )

    def close(self) -> None:
        """End the worker process."""
        if self._pool is not None:
            self._pool.close()

    def score(self, chunk: Chunk) -> Part:
        """The rows of a chunk."""
        errors: list[str | None] = []
        pixels: list[NDArray[np.uint8]] = []
        sizes: list[str] = []
        for item, data in zip(chunk.items, chunk.data, strict=True):
            try:
                image, size = self._decode(item, data)
            except ImageError as error:
                errors.append(str(error))
                continue
            errors.append(None)
            pixels.append(image)
            sizes.append(size)
        columns: dict[str, list[Any]] = {PATH: [item.path for item in chunk.items], ERROR: errors}
        return Part(chunk.number, columns | self._values(pixels, sizes, errors))

    def _decode(self, item: Item, data: bytes | ImageError | None) -> tuple[NDArray[np.uint8], str]:
        """The model's input, and the size of the image relative to it."""
        if isinstance(data, ImageError):
            raise data
        if data is None:
            data = read_item(item)
        plain = read_plain(data)
        image = None if plain is None else preprocess_plain(data, plain, self._spec)
        if image is None:
            image = self._decode_in_worker(data)
        return image, observe(data, self._spec).size

    def _decode_in_worker(self, data: bytes) -> NDArray[np.uint8]:
        if self._pool is None:
            return preprocess_with_pillow(data, self._spec)
        needed = estimate(data, None, self._spec, MAX_PIXELS)
        try:
            return self._pool.preprocess(
                data,
                self._spec,
                max_pixels=MAX_PIXELS,
                max_side=MAX_SIDE,
                max_memory=needed.memory,
                deadline=time.monotonic() + _DECODE_SECONDS,
                pixels=needed.pixels,
            )
        except DeadlinePassed:
            raise ImageError(f"The image takes more than {_DECODE_SECONDS:g} s to decode.", reason="failed") from None

    def _values(
        self, pixels: list[NDArray[np.uint8]], sizes: list[str], errors: Sequence[str | None]
    ) -> dict[str, list[Any]]:
        """The columns of results; None in the rows of files that could not be read."""
        names = [column.name for column in self._columns if column.field is not None]
        if not pixels:
            return {name: [None] * len(errors) for name in names}
        alpha: AlphaDetail = "all" if self._options.alpha else "none"
        rows = self._model.rows(np.stack(pixels), sizes, self._options.point, explain=self._explain, alpha=alpha)
        fields: dict[int, list[str]] = {}
        selectors: dict[int, list[int]] = {}
        values = []
        for rule, row in rows:
            if id(rule) not in selectors:
                fields[id(rule)] = self._model.fields(rule, explain=self._explain, alpha=alpha)
                selectors[id(rule)] = self._selector(fields[id(rule)])
            flat = self._flat(row, fields[id(rule)])
            values.append([flat[index] for index in selectors[id(rule)]])
        read = iter(zip(*values, strict=True))
        columns = {name: list(next(read)) for name in names}
        if len(values) == len(errors):
            return columns
        return {name: _spread(column, errors) for name, column in columns.items()}

    def _flat(self, row: tuple[Any, ...], fields: list[str]) -> tuple[Any, ...]:
        """A row whose flag terms are values at its end."""
        return (*row, *row[fields.index(TERMS_FIELD)].values()) if self._terms else row

    def _selector(self, fields: list[str]) -> list[int]:
        """The positions in a flat row of the columns."""
        terms = [f"{TERMS_FIELD}.{term}" for term in self._terms]
        positions = {field: index for index, field in enumerate([*fields, *terms])}
        return [positions[column.field] for column in self._columns if column.field is not None]


def _spread(column: list[Any], errors: Sequence[str | None]) -> list[Any]:
    values = iter(column)
    return [next(values) if error is None else None for error in errors]


def open_scorer(path: str, options: ScoreOptions) -> Scorer:
    """A scorer with the bundle at this path: for the processes of an executor."""
    return Scorer(open_model(path, threads=options.threads), options)
