"""Tables mark the best rows by paired differences over seeds, and all output formats hold the same figures."""

import csv
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
from scipy.stats import t as student

from qualms_training.paper.document import FIELDS, Cell, Document, Table, TableRow, clearly_better, mark_best
from qualms_training.paper.published import Figure


def seeds(*values: float) -> dict[int, float]:
    return dict(enumerate(values))


@pytest.mark.parametrize("seed", range(8))
def test_clearly_better_is_a_paired_t_test(seed: int) -> None:
    rng = np.random.default_rng(seed)
    first, second = rng.normal(1.0, 1, 5), rng.normal(0, 1, 5)
    gaps = first - second
    expected = gaps.mean() > student.ppf(0.95, 4) * gaps.std(ddof=1) / np.sqrt(5)
    assert clearly_better(seeds(*first), seeds(*second)) == expected
    assert clearly_better(seeds(*-first), seeds(*-second), sign=-1.0) == expected


def test_a_difference_smaller_than_the_rounding_is_not_better() -> None:
    assert not clearly_better(seeds(99.04, 99.04, 99.04), seeds(99, 99, 99))
    assert clearly_better(seeds(99.1, 99.1, 99.1), seeds(99, 99, 99))


def test_values_of_one_seed_are_compared_without_a_test() -> None:
    assert clearly_better({0: 99.2}, {0: 99.0})
    assert not clearly_better({0: 99.02}, {0: 99.0})
    assert clearly_better({0: 1.0}, {0: 3.0}, sign=-1.0)


def table(metric: str) -> Table:
    rows = [
        TableRow("a", "", [Cell(seeds(99, 98, 99))]),
        TableRow("b", "", [Cell(seeds(98.9, 98.3, 98.8))]),
        TableRow("c", "", [Cell(seeds(90, 91, 90))]),
        TableRow("control", "", [Cell(seeds(100, 100, 100))], rated=False),
        TableRow("d", "", [Cell(missing="not run")]),
    ]
    return Table("t", "T", metric, ["x"], rows)


def best(marked: Table) -> list[str]:
    return [row.method for row in marked.rows if row.cells[0].best]


def test_the_best_row_and_all_insignificantly_worse_rows_are_marked_except_controls() -> None:
    assert best(mark_best(table("AUROC"), unrated=())) == ["a", "b"]


def test_a_row_that_is_clearly_worse_than_some_other_row_is_not_marked() -> None:
    rows = [
        TableRow("lucky", "", [Cell({0: 99.8, 1: 100.0})]),
        TableRow("good", "", [Cell(seeds(99.8, 99.9, 99.8, 99.9, 99.8))]),
        TableRow("beaten", "", [Cell(seeds(99.3, 99.1, 99.2, 99.3, 99.2))]),
    ]
    assert not clearly_better(rows[0].cells[0].values, rows[2].cells[0].values)
    assert best(mark_best(Table("t", "T", "AUROC", ["x"], rows), unrated=())) == ["lucky", "good"]


def test_lower_is_better_for_fpr95() -> None:
    assert best(mark_best(table("FPR95"), unrated=())) == ["c"]


def test_an_unrated_column_has_no_marks() -> None:
    assert best(mark_best(table("AUROC"), unrated=("x",))) == []


def test_rows_that_have_seen_the_noise_are_excluded_from_the_comparison() -> None:
    rows = [
        TableRow("seen", "", [Cell(seeds(100, 100, 100), seen_noise=True)]),
        TableRow("a", "", [Cell(seeds(99, 98, 99))]),
        TableRow("c", "", [Cell(seeds(90, 91, 90))]),
    ]
    assert best(mark_best(Table("t", "T", "AUROC", ["x"], rows), unrated=())) == ["a"]


def test_no_row_is_marked_if_all_other_methods_have_seen_the_noise() -> None:
    seen = TableRow("seen", "", [Cell(seeds(100, 100, 100), seen_noise=True)])
    left = [TableRow("a", score, [Cell(seeds(99, 98, 99))]) for score in ("Ent", "MaxP")]
    assert best(mark_best(Table("t", "T", "AUROC", ["x"], [seen, *left]), unrated=())) == []
    assert best(mark_best(Table("t", "T", "AUROC", ["x"], left), unrated=())) == ["a", "a"]


def test_a_cell_shows_mean_deviation_marks_and_the_papers_figure() -> None:
    assert str(Cell(seeds(99.0, 98.0), Figure(97.25, 0.1), best=True)) == "98.5 ± 0.5 ● (97.2)"
    assert str(Cell(seeds(99.0, 98.0), Figure(97.25, 0.1), seen_noise=True)) == "98.5 ± 0.5 † (97.2)"
    assert str(Cell({0: 12345.6}, decimals=0)) == "12,346"
    assert str(Cell(missing="not run", paper=Figure(99.0, None))) == "not run (99.0)"


@pytest.fixture
def document() -> Document:
    cells = [
        Cell({0: 99.0, 1: 98.0}, Figure(97.0, 0.5), best=True),
        Cell(missing="not available"),
        Cell({0: 99.9}, seen_noise=True),
    ]
    columns = ["a<b", "lsun", "corrupted"]
    table = Table("ood", "OOD detection, AUROC in %", "AUROC", columns, [TableRow("KNN", "distance", cells)])
    return Document("mine", ["Made by `x`."], {"fair": [table], "as-published": [table]}, ["lsun: none & nothing."])


def test_markdown_has_one_table_per_protocol_and_the_notes(document: Document) -> None:
    text = document.markdown()
    assert text.startswith("# mine\n\nMade by `x`.\n")
    assert "### OOD detection, AUROC in %, protocol as-published" in text
    assert text.count("| KNN · distance | 98.5 ± 0.5 ● (97.0) | not available | 99.9 † |") == 2
    assert text.endswith("- lsun: none & nothing.\n")


def test_the_note_of_a_table_follows_its_title(document: Document) -> None:
    (table, _) = (tables[0] for tables in document.tables.values())
    noted = replace(document, tables={"fair": [replace(table, note="AUPR is not rated.")], "": [table]})
    assert [grid.title for grid in noted.grids()] == [
        "OOD detection, AUROC in %, protocol fair. AUPR is not rated.",
        "OOD detection, AUROC in %",
    ]


def test_csv_has_one_line_per_cell(document: Document) -> None:
    rows = list(csv.DictReader(document.csv().splitlines()))
    assert len(rows) == 6
    assert FIELDS[-1] == "seen_noise"
    assert [row["seen_noise"] for row in rows[:3]] == ["0", "0", "1"]
    assert tuple(rows[0]) == FIELDS
    assert rows[0] | {"mean": "98.500", "std": "0.500", "seeds": "2", "best": "1", "paper_mean": "97.0"} == rows[0]
    assert (rows[1]["mean"], rows[1]["missing"], rows[1]["seeds"]) == ("", "not available", "0")


def test_html_is_one_page_with_escaped_text(document: Document) -> None:
    class Cells(HTMLParser):
        texts: list[str]
        inside = False

        def handle_starttag(self, tag: str, attrs: object) -> None:
            self.inside = tag in ("td", "th")

        def handle_data(self, data: str) -> None:
            if self.inside and data.strip():
                self.texts.append(data)

    parser = Cells()
    parser.texts = []
    parser.feed(document.html())
    assert parser.texts == 2 * [
        *("a<b", "lsun", "corrupted"),
        *("KNN · distance", "98.5 ± 0.5 ● (97.0)", "not available", "99.9 †"),
    ]
    assert "none &amp; nothing" in document.html()
    assert "<p>Made by <code>x</code>.</p>" in document.html()
