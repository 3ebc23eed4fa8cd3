"""`qualms tables` reports invalid settings and paths before any method is run."""

from pathlib import Path
from typing import Any

import pytest
import torch

from qualms_training.console import Display
from qualms_training.errors import QualmsError, RecipeError
from qualms_training.paper.command import make_tables
from qualms_training.paper.definition import Benchmark, load_benchmark
from qualms_training.paper.document import Cell, Document, Table, TableRow
from qualms_training.paper.runner import Run

pytestmark = pytest.mark.slow

EARLIER = Table("ood", "OOD", "AUROC", ["textures"], [TableRow("KNN", "distance", [Cell({0: 90.0})])])


def run_tables(out: Path, display: Display, benchmark: Benchmark | None = None, keep: Path | None = None) -> None:
    make_tables(
        benchmark or load_benchmark("tiny"),
        out=out,
        cache=out / "cache",
        data_dir=None,
        device=torch.device("cpu"),
        only=["base"],
        keep=keep,
        display=display,
    )


@pytest.fixture
def no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if a method is run."""

    def fail(*_: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(Run, "run", fail)


@pytest.mark.usefixtures("no_run")
def test_an_invalid_setting_is_reported_before_the_first_method_is_run(tmp_path: Path, display: Display) -> None:
    tiny = load_benchmark("tiny")
    benchmark = tiny.model_copy(update={"methods": {**tiny.methods, "mahalanobis": {"where": "penultimat"}}})
    with pytest.raises(RecipeError, match="'tiny': setting 'where' of method 'mahalanobis' is 'penultimat'; it should"):
        run_tables(tmp_path / "out", display, benchmark)
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("no_run")
def test_a_file_of_another_benchmark_is_reported_before_the_first_method_is_run(
    tmp_path: Path, display: Display
) -> None:
    (tmp_path / "x.csv").write_text(Document("other", [], {"fair": [EARLIER]}, []).csv())
    with pytest.raises(QualmsError, match=r"x\.csv has the tables of benchmark 'other'; 'tiny' is expected"):
        run_tables(tmp_path / "out", display, keep=tmp_path / "x.csv")
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("no_run")
def test_an_output_path_that_cannot_be_a_folder_is_reported(tmp_path: Path, display: Display) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(QualmsError, match=r"Folder .*file/x cannot be written to: Not a directory\."):
        run_tables(tmp_path / "file" / "x", display)
