"""The three files say the same."""

import csv
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from qualms_training.paper.cells import Cell, Row, Table
from qualms_training.paper.figures import Figure
from qualms_training.paper.output import FIELDS, Document


@pytest.fixture
def document() -> Document:
    cells = [
        Cell({0: 99.0, 1: 98.0}, Figure(97.0, 0.5), best=True),
        Cell(missing="not available"),
        Cell({0: 99.9}, seen=True),
    ]
    columns = ["a<b", "lsun", "corrupted"]
    table = Table("ood", "OOD detection, AUROC in %", "AUROC", columns, [Row("KNN", "distance", cells)])
    return Document("mine", ["Made by `x`."], {"fair": [table], "as-published": [table]}, ["lsun: none & nothing."])


def test_markdown_has_a_table_for_each_protocol_and_the_notes(document: Document) -> None:
    text = document.markdown()
    assert text.startswith("# mine\n\nMade by `x`.\n")
    assert "### OOD detection, AUROC in %, protocol as-published" in text
    assert text.count("| KNN · distance | 98.5 ± 0.5 ● (97.0) | not available | 99.9 † |") == 2
    assert text.endswith("- lsun: none & nothing.\n")


def test_a_tables_note_follows_its_title(document: Document) -> None:
    (table, _) = (tables[0] for tables in document.tables.values())
    noted = replace(document, tables={"fair": [replace(table, note="AUPR is not rated.")], "": [table]})
    assert [grid.title for grid in noted.grids()] == [
        "OOD detection, AUROC in %, protocol fair. AUPR is not rated.",
        "OOD detection, AUROC in %",
    ]


def test_csv_has_a_line_for_each_cell(document: Document) -> None:
    rows = list(csv.DictReader(document.csv().splitlines()))
    assert len(rows) == 6
    assert FIELDS[-1] == "seen_noise"
    assert [row["seen_noise"] for row in rows[:3]] == ["0", "0", "1"]
    assert tuple(rows[0]) == FIELDS
    assert rows[0] | {"mean": "98.500", "std": "0.500", "seeds": "2", "best": "1", "paper_mean": "97.0"} == rows[0]
    assert (rows[1]["mean"], rows[1]["missing"], rows[1]["seeds"]) == ("", "not available", "0")


def test_html_is_one_page_with_all_text_escaped(document: Document) -> None:
    class Cells(HTMLParser):
        found: list[str]
        inside = False

        def handle_starttag(self, tag: str, attrs: object) -> None:
            self.inside = tag in ("td", "th")

        def handle_data(self, data: str) -> None:
            if self.inside and data.strip():
                self.found.append(data)

    parser = Cells()
    parser.found = []
    parser.feed(document.html())
    assert parser.found == 2 * [
        *("a<b", "lsun", "corrupted"),
        *("KNN · distance", "98.5 ± 0.5 ● (97.0)", "not available", "99.9 †"),
    ]
    assert "none &amp; nothing" in document.html()
    assert "<p>Made by <code>x</code>.</p>" in document.html()
