"""Cells, rows and tables, and who is best in a column beyond the noise of seeds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from scipy.stats import t as student

from qualms_training.paper.figures import Figure

MARK = "●"
SEEN = "†"
ROUNDING = 0.05  # what one decimal cannot show
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Cell:
    """Our figure of each seed, the paper's, and whether nothing else in the column is clearly better."""

    values: Mapping[int, float] = field(default_factory=dict)
    paper: Figure | None = None
    best: bool = False
    missing: str = "–"
    """what stands where there is no value"""
    decimals: int = 1
    seen: bool = False
    """whether it is on noise that the row has seen"""

    def beside(self, paper: Figure | None) -> "Cell":
        """The same cell with the paper's figure."""
        return replace(self, paper=paper)

    @property
    def mean(self) -> float:
        """Over seeds."""
        return float(np.mean(list(self.values.values())))

    @property
    def std(self) -> float:
        """Over seeds."""
        return float(np.std(list(self.values.values())))

    def __str__(self) -> str:
        theirs = f" ({self.paper.mean:.1f})" if self.paper else ""
        if not self.values:
            return self.missing + theirs
        spread = f" ± {self.std:,.{self.decimals}f}" if len(self.values) > 1 else ""
        marks = f"{f' {SEEN}' if self.seen else ''}{f' {MARK}' if self.best else ''}"
        return f"{self.mean:,.{self.decimals}f}{spread}{marks}{theirs}"


@dataclass(frozen=True)
class Row:
    """One method and score, both by the names that tables use."""

    method: str
    score: str
    cells: list[Cell]
    rated: bool = True
    """whether it may be the best"""

    @property
    def title(self) -> str:
        """Method and score in words."""
        return f"{self.method} · {self.score}" if self.score else self.method


@dataclass(frozen=True)
class Table:
    """One table of one protocol."""

    name: str
    """short, for a column of a file"""
    title: str
    metric: str | None
    """what all its cells are, if they are one thing"""
    columns: list[str]
    rows: list[Row]
    note: str = ""
    """a sentence after the title"""


def mark_best(table: Table, unrated: Sequence[str]) -> Table:
    """Mark in each column but the unrated every row that no other clearly beats.

    Rows that have seen a column's noise are left out of it: they would be best by what they were shown. Where they leave
    a single method, there is nothing to be better than.
    """
    marked = [list(row.cells) for row in table.rows]
    for at, column in enumerate(table.columns):
        able = [index for index, row in enumerate(table.rows) if row.rated and row.cells[at].values]
        rated = [index for index in able if not table.rows[index].cells[at].seen]
        alone = len(rated) < len(able) and len({table.rows[index].method for index in rated}) < 2
        if alone or column in unrated:
            continue
        sign = -1.0 if "FPR95" in (table.metric, column.rpartition(" ")[2]) else 1.0
        values = {index: table.rows[index].cells[at].values for index in rated}
        for index in rated:
            # Every other row, not the best alone: one of few seeds may lead by luck and yet beat nothing clearly.
            if not any(clearly_better(other, values[index], sign) for other in values.values()):
                marked[index][at] = replace(marked[index][at], best=True)
    return replace(table, rows=[replace(row, cells=cells) for row, cells in zip(table.rows, marked, strict=True)])


def clearly_better(one: Mapping[int, float], other: Mapping[int, float], sign: float = 1.0) -> bool:
    """Whether the mean of `one` is above that of `other` (below, for sign −1) beyond the noise of seeds.

    By a paired t-test over the seeds that both have, one-sided at 5 %, and by more than rounding hides. Where they
    share one seed at most, the means are compared by rounding alone.
    """
    gaps = sign * np.array([one[seed] - other[seed] for seed in sorted(set(one) & set(other))])
    if len(gaps) < 2:
        return bool(sign * (np.mean(list(one.values())) - np.mean(list(other.values()))) > ROUNDING)
    noise = float(student.ppf(CONFIDENCE, len(gaps) - 1)) * gaps.std(ddof=1) / np.sqrt(len(gaps))
    return bool(gaps.mean() > max(noise, ROUNDING))
