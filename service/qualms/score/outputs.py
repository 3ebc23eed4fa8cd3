"""The formats of the output, by the ending of its file: CSV, JSON lines and Parquet."""

import csv
import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import orjson

from qualms.errors import ExtraMissingError
from qualms.score.items import ScoreError
from qualms.score.rows import Column, Part

_ROW_GROUP = 16_384
"""rows of a row group of a Parquet file, which are held in memory"""
FORMATS = {".csv": "csv", ".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}


class Writer(Protocol):
    """Writes parts to a file."""

    def write(self, part: Part) -> None:
        """Add the rows of a part."""


def check_format(path: Path) -> str:
    """The format of an output file; ScoreError for another ending, ExtraMissingError if its library is missing."""
    kind = FORMATS.get(path.suffix.lower())
    if kind is None:
        raise ScoreError(f"The output {path} has the ending {path.suffix!r}; accepted are {', '.join(FORMATS)}.")
    if kind == "parquet":
        _pyarrow()
    return kind


@contextmanager
def open_writer(path: Path, kind: str, columns: Sequence[Column]) -> Iterator[Writer]:
    """A writer of this format to a new file."""
    if kind == "parquet":
        with _parquet(path, columns) as writer:
            yield writer
        return
    with path.open("wb") as file:
        yield _CsvWriter(file, columns) if kind == "csv" else _JsonWriter(file, columns)
        file.flush()


class _CsvWriter:
    """Comma-separated values with a header, UTF-8; lists are JSON texts, booleans true and false, and missing values empty."""

    def __init__(self, file: io.BufferedWriter, columns: Sequence[Column]) -> None:
        self._file, self._columns = file, columns
        self._rows([[column.name for column in columns]])

    def write(self, part: Part) -> None:
        self._rows(zip(*(_texts(part.columns[column.name], column.kind) for column in self._columns), strict=True))

    def _rows(self, rows: Any) -> None:
        lines: list[str] = []
        # csv quotes only those line breaks that are in its terminator, so a name with a carriage return needs both there.
        csv.writer(SimpleNamespace(write=lines.append), lineterminator="\r\n").writerows(rows)
        self._file.write("".join(f"{line[:-2]}\n" for line in lines).encode())


_BOOLS = {True: "true", False: "false", None: None}


def _texts(values: list[Any], kind: str) -> list[Any]:
    """Values that the csv module writes as intended."""
    if kind == "bool":
        return [_BOOLS[value] for value in values]
    if kind in ("texts", "floats"):
        return [None if value is None else orjson.dumps(value).decode() for value in values]
    return values


class _JsonWriter:
    """One JSON object per line."""

    def __init__(self, file: io.BufferedWriter, columns: Sequence[Column]) -> None:
        self._file, self._names = file, [column.name for column in columns]

    def write(self, part: Part) -> None:
        rows = zip(*(part.columns[name] for name in self._names), strict=True)
        lines = [
            orjson.dumps(dict(zip(self._names, row, strict=True)), option=orjson.OPT_APPEND_NEWLINE) for row in rows
        ]
        self._file.write(b"".join(lines))


@contextmanager
def _parquet(path: Path, columns: Sequence[Column]) -> Iterator[Writer]:
    """Parquet in row groups of a fixed size."""
    arrow, parquet = _pyarrow()
    kinds = {
        "text": arrow.string(),
        "bool": arrow.bool_(),
        "int": arrow.int64(),
        "float": arrow.float64(),
        "texts": arrow.list_(arrow.string()),
        "floats": arrow.list_(arrow.float64()),
    }
    schema = arrow.schema([(column.name, kinds[column.kind]) for column in columns])
    with parquet.ParquetWriter(path, schema) as file:
        writer = _ParquetWriter(file, arrow, schema)
        yield writer
        writer.flush()


class _ParquetWriter:
    def __init__(self, file: Any, arrow: Any, schema: Any) -> None:
        self._file, self._arrow, self._schema = file, arrow, schema
        self._batches: list[Any] = []
        self._rows = 0

    def write(self, part: Part) -> None:
        arrays = [self._arrow.array(part.columns[field.name], field.type) for field in self._schema]
        self._batches.append(self._arrow.record_batch(arrays, schema=self._schema))
        self._rows += len(part)
        if self._rows >= _ROW_GROUP:
            self.flush()

    def flush(self) -> None:
        if self._batches:
            table = self._arrow.Table.from_batches(self._batches, self._schema)
            self._file.write_table(table, row_group_size=self._rows)
        self._batches, self._rows = [], 0


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow  # noqa: PLC0415  # an extra
        from pyarrow import parquet  # noqa: PLC0415
    except ImportError:
        raise ExtraMissingError(
            "Parquet files need pyarrow: run pip install 'qualms[parquet]', or write to .csv or .jsonl."
        ) from None
    return pyarrow, parquet
