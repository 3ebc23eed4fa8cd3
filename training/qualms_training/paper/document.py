"""Tables of results, the marks of their best rows, and their output as Markdown, CSV and HTML."""

import csv
import html
import io
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from scipy.stats import ttest_rel

from qualms_training.paper.published import Figure
from qualms_training.reporting.report import Grid, to_markdown

BEST_MARK = "●"
SEEN_NOISE_MARK = "†"
ROUNDING = 0.05
"""differences up to this are not visible with one decimal"""
SIGNIFICANCE = 0.05

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 90rem; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; margin: 0 0 2rem; }
caption { text-align: left; font-weight: 600; padding: .5rem 0; }
th, td { padding: .2rem .7rem; border-bottom: 1px solid #ddd; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
td.best { font-weight: 700; }
"""

FIELDS = (
    "benchmark",
    "protocol",
    "table",
    "method",
    "score",
    "column",
    "metric",
    "mean",
    "std",
    "seeds",
    "best",
    "paper_mean",
    "paper_std",
    "missing",
    "seen_noise",
)
"""header of the CSV file"""


class Summary(NamedTuple):
    """A figure over seeds."""

    mean: float
    std: float
    """standard deviation"""
    seeds: int


@dataclass(frozen=True)
class Cell:
    """Our figure for each seed, and the paper's figure."""

    values: Mapping[int, float] = field(default_factory=dict)
    """by seed"""
    paper: Figure | None = None
    best: bool = False
    """whether no other row of the column is clearly better"""
    missing: str = "–"
    """text of a cell without values"""
    decimals: int = 1
    seen_noise: bool = False
    """whether the row was trained or stopped with noise that is part of this column"""
    kept: Summary | None = None
    """the figure of an earlier table, if there are no values of single seeds"""

    def with_paper(self, paper: Figure | None) -> "Cell":
        """A copy of this cell with the paper's figure."""
        return replace(self, paper=paper)

    @property
    def summary(self) -> Summary | None:
        """The figure over seeds, or None if there is none."""
        if not self.values:
            return self.kept
        values = list(self.values.values())
        return Summary(float(np.mean(values)), float(np.std(values)), len(values))

    def __str__(self) -> str:
        paper = f" ({self.paper.mean:.1f})" if self.paper else ""
        summary = self.summary
        if summary is None:
            return self.missing + paper
        spread = f" ± {summary.std:,.{self.decimals}f}" if summary.seeds > 1 else ""
        marks = f"{f' {SEEN_NOISE_MARK}' if self.seen_noise else ''}{f' {BEST_MARK}' if self.best else ''}"
        return f"{summary.mean:,.{self.decimals}f}{spread}{marks}{paper}"


@dataclass(frozen=True)
class TableRow:
    """One score of one method, with the names that the tables use."""

    method: str
    score: str
    cells: list[Cell]
    rated: bool = True
    """whether its cells can be marked as best"""

    @property
    def title(self) -> str:
        """Method and score in words."""
        return f"{self.method} · {self.score}" if self.score else self.method


@dataclass(frozen=True)
class Table:
    """One table of one protocol."""

    name: str
    """short name, for a column of the CSV file"""
    title: str
    metric: str | None
    """metric of all cells, or None if columns have different ones"""
    columns: list[str]
    rows: list[TableRow]
    note: str = ""
    """sentence after the title"""


@dataclass(frozen=True)
class Document:
    """All tables of a benchmark, with the text around them."""

    name: str
    head: Sequence[str]
    """paragraphs before the tables: description, command, explanation of the cells"""
    tables: Mapping[str, Sequence[Table]]
    """by protocol; tables that do not depend on the protocol are under the empty string"""
    notes: Sequence[str]
    """reasons for missing methods and columns"""

    def markdown(self) -> str:
        """The document as Markdown."""
        parts = [f"# {self.name}\n", *(f"{paragraph}\n" for paragraph in self.head)]
        parts += [to_markdown(grid) for grid in self.grids()]
        return "\n".join([*parts, *(f"- {note}" for note in self.notes)]) + "\n"

    def grids(self) -> list[Grid]:
        """All tables as strings, each with its protocol in the title."""
        return [_grid(table, protocol) for protocol, tables in self.tables.items() for table in tables]

    def html(self) -> str:
        """The document as one self-contained HTML page."""
        parts = [f"<h1>{html.escape(self.name)}</h1>", *(f"<p>{_html_text(text)}</p>" for text in self.head)]
        parts += [_html_table(grid) for grid in self.grids()]
        parts.append("<ul>" + "".join(f"<li>{_html_text(note)}</li>" for note in self.notes) + "</ul>")
        body = "\n".join(parts)
        return (
            f'<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<title>{html.escape(self.name)}</title>\n'
            f"<style>{_STYLE}</style>\n{body}\n</html>\n"
        )

    def csv(self) -> str:
        """All cells as CSV, one line per cell."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(FIELDS)
        for protocol, tables in self.tables.items():
            for table in tables:
                for row in table.rows:
                    for column, cell in zip(table.columns, row.cells, strict=True):
                        summary = cell.summary
                        ours = [f"{summary.mean:.3f}", f"{summary.std:.3f}", summary.seeds] if summary else ["", "", 0]
                        paper = [cell.paper.mean, cell.paper.std] if cell.paper else ["", ""]
                        missing = "" if summary else cell.missing
                        names = [self.name, protocol, table.name, row.method, row.score, column, table.metric]
                        writer.writerow([*names, *ours, int(cell.best), *paper, missing, int(cell.seen_noise)])
        return text.getvalue()


def mark_best(table: Table, unrated: Sequence[str]) -> Table:
    """In each column that is not `unrated`, mark every row that no other row clearly beats.

    Rows without values of single seeds are not compared. Rows that have seen a column's noise are excluded there, because
    they have an unfair advantage. If the rows that remain belong to a single method, no row of the column is marked.
    """
    marked = [list(row.cells) for row in table.rows]
    for position, column in enumerate(table.columns):
        with_values = [index for index, row in enumerate(table.rows) if row.rated and row.cells[position].values]
        rated = [index for index in with_values if not table.rows[index].cells[position].seen_noise]
        one_method_left = len(rated) < len(with_values) and len({table.rows[index].method for index in rated}) < 2
        if one_method_left or column in unrated:
            continue
        sign = -1.0 if "FPR95" in (table.metric, column.rpartition(" ")[2]) else 1.0
        values = {index: table.rows[index].cells[position].values for index in rated}
        for index in rated:
            # Compare with every row and not only with the highest mean: a row with few seeds may have the highest mean
            # by chance without being significantly better than any other.
            if not any(clearly_better(other, values[index], sign) for other in values.values()):
                marked[index][position] = replace(marked[index][position], best=True)
    return replace(table, rows=[replace(row, cells=cells) for row, cells in zip(table.rows, marked, strict=True)])


def clearly_better(one: Mapping[int, float], other: Mapping[int, float], sign: float = 1.0) -> bool:
    """Whether `one` is significantly higher than `other` (lower, for sign −1), given their values by seed.

    The difference of the means must exceed `ROUNDING`, and a one-sided paired t-test over the shared seeds must be
    significant at 5 %. If they share fewer than two seeds, only the means are compared.
    """
    shared = sorted(set(one) & set(other))
    if len(shared) < 2:
        return bool(sign * (np.mean(list(one.values())) - np.mean(list(other.values()))) > ROUNDING)
    first, second = (sign * np.array([values[seed] for seed in shared]) for values in (one, other))
    if np.mean(first - second) <= ROUNDING:
        return False
    with warnings.catch_warnings():
        # scipy warns if all differences are equal, as they are for deterministic methods; the p-value is then 0.
        warnings.simplefilter("ignore", RuntimeWarning)
        return bool(ttest_rel(first, second, alternative="greater").pvalue < SIGNIFICANCE)


def _grid(table: Table, protocol: str) -> Grid:
    rows = [(row.title, [str(cell) for cell in row.cells]) for row in table.rows]
    title = f"{table.title}, protocol {protocol}" if protocol else table.title
    return Grid(f"{title}. {table.note}" if table.note else title, table.columns, rows)


def _html_text(text: str) -> str:
    """Escaped text, with Markdown's backticks as <code> elements."""
    return re.sub("`(.+?)`", r"<code>\1</code>", html.escape(text))


def _html_table(grid: Grid) -> str:
    head = "".join(f"<th>{html.escape(column)}</th>" for column in ["", *grid.columns])
    lines = [f"<table><caption>{html.escape(grid.title)}</caption>", f"<tr>{head}</tr>"]
    for name, cells in grid.rows:
        columns = "".join(
            f'<td class="best">{html.escape(cell)}</td>' if BEST_MARK in cell else f"<td>{html.escape(cell)}</td>"
            for cell in cells
        )
        lines.append(f"<tr><td>{html.escape(name)}</td>{columns}</tr>")
    return "\n".join([*lines, "</table>"])
