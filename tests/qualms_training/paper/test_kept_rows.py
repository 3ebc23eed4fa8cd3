"""Rows of an earlier CSV file fill in for methods without results, and files that are not such tables are reported."""

import csv
from pathlib import Path

import pytest

from qualms_training.errors import QualmsError
from qualms_training.paper.document import FIELDS, Cell, Document, Table, TableRow, mark_best
from qualms_training.paper.kept_rows import KeptRows, read_kept_rows
from qualms_training.paper.published import Figure

TITLE = "Fused, selected weights"


def earlier(score: str = "Ent") -> Document:
    """Tables of two protocols, made from results of three seeds."""
    values = [Cell({0: 90.0, 1: 92.0, 2: 91.0}, Figure(88.5, None), best=True), Cell(missing="not available")]
    ood = Table(
        "ood",
        "OOD",
        "AUROC",
        ["svhn", "lsun"],
        [
            TableRow("KNN", score, values),
            TableRow("Fused", "fused", [Cell({0: 99.9}, seen_noise=True), values[1]]),
        ],
    )
    cost = Table("cost", "Cost", None, ["seconds to fit"], [TableRow("KNN", "", [Cell({0: 2.0})])])
    return Document("mine", [], {"fair": [ood], "as-published": [ood], "": [cost]}, [])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "earlier.csv"
    path.write_text(earlier().csv())
    return path


def table(*columns: str, metric: str | None = "AUROC") -> Table:
    """A table in which KNN and the old default have no results."""
    rows = [
        TableRow("Base Model", "Ent", [Cell({0: 80.0, 1: 81.0}) for _ in columns]),
        TableRow(TITLE, "", [Cell(missing="not run") for _ in columns]),
        TableRow("KNN", "distance", [Cell(missing="not run", decimals=2) for _ in columns]),
    ]
    return Table("ood", "OOD", metric, list(columns), rows)


def texts(made: Table) -> dict[str, list[str]]:
    return {row.title: [str(cell) for cell in row.cells] for row in made.rows}


def test_kept_rows_replace_the_empty_row_of_their_method_in_place(file: Path) -> None:
    kept = read_kept_rows(file, "mine")["fair"]
    assert texts(kept.into(table("lsun", "svhn"), [TITLE, "KNN"])) == {
        "Base Model · Ent": ["80.5 ± 0.5", "80.5 ± 0.5"],
        f"{TITLE} · fused": ["not available", "99.9 †"],
        "KNN · Ent": ["not available", "91.00 ± 0.82 (88.5)"],
    }


def test_a_method_that_is_not_to_be_kept_stays_as_it_is(file: Path) -> None:
    kept = read_kept_rows(file, "mine")["fair"]
    assert texts(kept.into(table("svhn"), [TITLE]))["KNN · distance"] == ["not run"]


def test_a_column_that_the_earlier_table_lacks_is_empty(file: Path) -> None:
    kept = read_kept_rows(file, "mine")["fair"]
    assert texts(kept.into(table("svhn", "new"), ["KNN"]))["KNN · Ent"] == ["91.00 ± 0.82 (88.5)", "–"]


def test_a_table_of_a_new_metric_has_no_kept_rows_and_a_note(file: Path) -> None:
    made = read_kept_rows(file, "mine")["fair"].into(table("svhn", metric="new"), ["KNN"])
    assert [row.method for row in made.rows] == ["Base Model", TITLE]
    assert made.note == "The kept rows have no such figures."


def test_kept_rows_are_neither_marked_nor_compared(file: Path) -> None:
    kept = read_kept_rows(file, "mine")["fair"]
    rows = mark_best(kept.into(table("svhn"), [TITLE, "KNN"]), unrated=()).rows
    assert [row.method for row in rows if row.cells[0].best] == ["Base Model"]


def test_a_csv_file_of_kept_rows_has_the_same_figures(file: Path) -> None:
    kept = read_kept_rows(file, "mine")["fair"]
    made = Document("mine", [], {"fair": [kept.into(table("svhn"), ["KNN"])]}, [])
    (line,) = [row for row in csv.DictReader(made.csv().splitlines()) if row["method"] == "KNN"]
    figures = {"mean": "91.000", "std": "0.816", "seeds": "3", "paper_mean": "88.5", "paper_std": "", "best": "0"}
    assert line | figures == line


def test_protocols_are_separate_and_share_the_tables_without_protocol(file: Path) -> None:
    kept = read_kept_rows(file, "mine")
    assert list(kept) == ["fair", "as-published"]
    for rows in kept.values():
        assert rows.scores == {"KNN": ["Ent"], TITLE: ["fused"]}
        assert rows.tables["cost", ""]["KNN"][""]["seconds to fit"].kept == (2.0, 0.0, 1)


def test_rows_without_figures_are_not_kept(tmp_path: Path) -> None:
    empty = Table("ood", "OOD", "AUROC", ["svhn"], [TableRow("KNN", "Ent", [Cell(missing="not run")])])
    (tmp_path / "empty.csv").write_text(Document("mine", [], {"fair": [empty]}, []).csv())
    assert read_kept_rows(tmp_path / "empty.csv", "mine")["fair"].scores == {}
    assert KeptRows().scores == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"t\.csv is not a table of `qualms tables`: its first line should be benchmark,protocol,"),
        ("a,b\n1,2\n", "is not a table of `qualms tables`"),
        (earlier().csv().replace("mine", "mnist"), "has the tables of benchmark 'mnist'; 'mine' is expected"),
        (earlier().csv().replace("91.000", "many"), "line 2: mean: Input should be a valid number"),
        (earlier().csv().replace("91.000", "nan"), "line 2: mean: Input should be a finite number"),
        (",".join(FIELDS) + "\nmine,fair\n", "line 2: 2 fields; 15 are expected"),
        (",".join(FIELDS) + '\n"mine', "is not a CSV file"),
        ("\N{LATIN SMALL LETTER E WITH ACUTE}".encode("latin-1"), "is not a CSV file"),
        (None, "cannot be read: No such file or directory"),
    ],
)
def test_a_file_that_is_no_table_of_the_benchmark_is_reported(
    text: str | bytes | None, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "t.csv"
    if text is not None:
        path.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(QualmsError, match=message):
        read_kept_rows(path, "mine")


@pytest.mark.parametrize("benchmark", ["mnist", "cifar10", "cifar100", "transfer"])
def test_the_published_tables_can_be_kept(benchmark: str) -> None:
    path = Path(__file__).parents[3] / "training" / "results" / f"tables-{benchmark}.csv"
    assert read_kept_rows(path, benchmark)["fair"].scores
