"""Tables on the console and as Markdown, CSV and HTML files."""

import csv
import html
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from qualms_training.paper.cells import MARK, Table
from qualms_training.reporting.report import Grid, to_markdown

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


@dataclass(frozen=True)
class Document:
    """All that a benchmark has to say."""

    name: str
    head: Sequence[str]
    """paragraphs before the tables: what this is, how it was made, how to read it"""
    tables: Mapping[str, Sequence[Table]]
    """by protocol; under no name, what does not depend on it"""
    notes: Sequence[str]
    """what was not run and what is not available, with the reasons"""

    def markdown(self) -> str:
        """For a file beside the code."""
        parts = [f"# {self.name}\n", *(f"{paragraph}\n" for paragraph in self.head)]
        parts += [to_markdown(grid) for grid in self.grids()]
        return "\n".join([*parts, *(f"- {note}" for note in self.notes)]) + "\n"

    def grids(self) -> list[Grid]:
        """Every table with its protocol in the title."""
        return [to_grid(table, protocol) for protocol, tables in self.tables.items() for table in tables]

    def html(self) -> str:
        """One page that needs nothing else."""
        parts = [f"<h1>{html.escape(self.name)}</h1>", *(f"<p>{_prose(text)}</p>" for text in self.head)]
        parts += [_html_table(grid) for grid in self.grids()]
        parts.append("<ul>" + "".join(f"<li>{_prose(note)}</li>" for note in self.notes) + "</ul>")
        body = "\n".join(parts)
        return (
            f'<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<title>{html.escape(self.name)}</title>\n'
            f"<style>{_STYLE}</style>\n{body}\n</html>\n"
        )

    def csv(self) -> str:
        """One line a cell."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(FIELDS)
        for protocol, tables in self.tables.items():
            for table in tables:
                for row in table.rows:
                    for column, cell in zip(table.columns, row.cells, strict=True):
                        ours = [f"{cell.mean:.3f}", f"{cell.std:.3f}"] if cell.values else ["", ""]
                        theirs = [cell.paper.mean, cell.paper.std] if cell.paper else ["", ""]
                        missing = "" if cell.values else cell.missing
                        place = [self.name, protocol, table.name, row.method, row.score, column, table.metric]
                        marks = [len(cell.values), int(cell.best)]
                        writer.writerow([*place, *ours, *marks, *theirs, missing, int(cell.seen)])
        return text.getvalue()


def to_grid(table: Table, protocol: str) -> Grid:
    """A table as strings."""
    rows = [(row.title, [str(cell) for cell in row.cells]) for row in table.rows]
    title = f"{table.title}, protocol {protocol}" if protocol else table.title
    return Grid(f"{title}. {table.note}" if table.note else title, table.columns, rows)


def _prose(text: str) -> str:
    """A sentence whose names of commands and columns stand between backticks, as in Markdown."""
    return re.sub("`(.+?)`", r"<code>\1</code>", html.escape(text))


def _html_table(grid: Grid) -> str:
    head = "".join(f"<th>{html.escape(column)}</th>" for column in ["", *grid.columns])
    lines = [f"<table><caption>{html.escape(grid.title)}</caption>", f"<tr>{head}</tr>"]
    for name, cells in grid.rows:
        shown = "".join(
            f'<td class="best">{html.escape(cell)}</td>' if MARK in cell else f"<td>{html.escape(cell)}</td>"
            for cell in cells
        )
        lines.append(f"<tr><td>{html.escape(name)}</td>{shown}</tr>")
    return "\n".join([*lines, "</table>"])
