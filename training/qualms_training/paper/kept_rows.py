"""Rows of earlier tables: a CSV file of `qualms tables` supplies the rows of methods that have no result in a run."""

import csv
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, NonNegativeInt, ValidationError

from qualms.bundle.manifest import first_problem
from qualms_training.errors import QualmsError
from qualms_training.paper.document import FIELDS, Cell, Summary, Table
from qualms_training.paper.published import Figure
from qualms_training.paper.registry import METHODS

RENAMED = {"Fused": METHODS["fused-selected"].title}
"""titles in tables of earlier versions, with the titles of the same methods now"""

OptionalNumber = Annotated[float | None, BeforeValidator(lambda text: text or None)]
Rows = Mapping[str, Mapping[str, Mapping[str, Cell]]]
"""cells by title of the method, score and column"""


class _Line(BaseModel):
    """One line of the CSV file, which is one cell. The fields are `FIELDS`."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    benchmark: str
    protocol: str
    table: str
    method: str
    score: str
    column: str
    metric: str
    mean: OptionalNumber
    std: OptionalNumber
    seeds: NonNegativeInt
    best: bool
    paper_mean: OptionalNumber
    paper_std: OptionalNumber
    missing: str
    seen_noise: bool

    def cell(self) -> Cell:
        kept = None if self.mean is None else Summary(self.mean, self.std or 0.0, self.seeds)
        paper = None if self.paper_mean is None else Figure(self.paper_mean, self.paper_std)
        return Cell(kept=kept, paper=paper, missing=self.missing, seen_noise=self.seen_noise)


@dataclass(frozen=True)
class KeptRows:
    """Rows of the earlier tables of one protocol, and of those that do not depend on the protocol."""

    tables: Mapping[tuple[str, str], Rows] = field(default_factory=dict)
    """by name and metric of the table"""

    @property
    def scores(self) -> dict[str, list[str]]:
        """Scores with figures, by title of the method; tables without scores do not count."""
        scores: dict[str, dict[str, None]] = {}
        for rows in self.tables.values():
            for title, by_score in rows.items():
                for score, cells in by_score.items():
                    if any(cell.kept for cell in cells.values()):
                        scores.setdefault(title, {}).update({score: None} if score else {})
        return {title: list(names) for title, names in scores.items()}

    def columns(self, table: str) -> list[str]:
        """Columns of the earlier tables of this name."""
        rows = [rows for (name, _), rows in self.tables.items() if name == table]
        cells = [cells for by_method in rows for by_score in by_method.values() for cells in by_score.values()]
        return list(dict.fromkeys(column for columns in cells for column in columns))

    def into(self, table: Table, titles: Collection[str]) -> Table:
        """The table with the kept rows of the methods in `titles`, each of which has one row without figures in it.

        A method has no row in tables that the earlier version did not have.
        """
        earlier = self.tables.get((table.name, table.metric or ""), {})
        rows, left_out = [], False
        for row in table.rows:
            if row.method not in titles:
                rows.append(row)
                continue
            kept = earlier.get(row.method, {})
            left_out = left_out or not kept
            for score, cells in kept.items():
                columns = zip(table.columns, row.cells, strict=True)
                merged = [_merged(empty, cells.get(column)) for column, empty in columns]
                rows.append(replace(row, score=score, cells=merged))
        note = " ".join(filter(None, [table.note, "The kept rows have no such figures." if left_out else ""]))
        return replace(table, rows=rows, note=note)


def _merged(empty: Cell, kept: Cell | None) -> Cell:
    """The kept cell with the format of the empty one; empty if the earlier table did not have the column."""
    return Cell(decimals=empty.decimals) if kept is None else replace(kept, decimals=empty.decimals)


def read_kept_rows(path: Path, benchmark: str) -> dict[str, KeptRows]:
    """The rows of a file by protocol. QualmsError if it is not a table of this benchmark."""
    by_protocol: dict[str, dict[tuple[str, str], dict[str, dict[str, dict[str, Cell]]]]] = {}
    for line in _lines(path, benchmark):
        tables = by_protocol.setdefault(line.protocol, {})
        rows = tables.setdefault((line.table, line.metric), {}).setdefault(RENAMED.get(line.method, line.method), {})
        rows.setdefault(line.score, {})[line.column] = line.cell()
    shared = by_protocol.pop("", {})
    return {protocol: KeptRows({**tables, **shared}) for protocol, tables in by_protocol.items()}


def _lines(path: Path, benchmark: str) -> list[_Line]:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            header, *rows = [tuple(row) for row in csv.reader(file, strict=True)] or [()]
    except OSError as error:
        raise QualmsError(f"File {path} cannot be read: {error.strerror}.") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise QualmsError(f"File {path} is not a CSV file: {error}.") from None
    if header != FIELDS:
        raise QualmsError(
            f"File {path} is not a table of `qualms tables`: its first line should be {','.join(FIELDS)}."
        )
    lines = []
    for number, row in enumerate(rows, start=2):
        if len(row) != len(FIELDS):
            raise QualmsError(f"File {path}, line {number}: {len(row)} fields; {len(FIELDS)} are expected.")
        try:
            line = _Line.model_validate(dict(zip(FIELDS, row, strict=True)))
        except ValidationError as error:
            raise QualmsError(f"File {path}, line {number}: {first_problem(error)}.") from None
        if line.benchmark != benchmark:
            raise QualmsError(f"File {path} has the tables of benchmark {line.benchmark!r}; {benchmark!r} is expected.")
        lines.append(line)
    return lines
