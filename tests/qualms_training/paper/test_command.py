"""What is wrong with an order is said before anything is run."""

from pathlib import Path
from typing import Any

import pytest
import torch

from qualms_training.console import Display
from qualms_training.errors import QualmsError, RecipeError
from qualms_training.paper.command import make_tables
from qualms_training.paper.definition import Benchmark, load_benchmark
from qualms_training.paper.runner import Run


def order(out: Path, display: Display, benchmark: Benchmark | None = None) -> None:
    make_tables(
        benchmark or load_benchmark("tiny"),
        out=out,
        cache=out / "cache",
        data_dir=None,
        device=torch.device("cpu"),
        only=["base"],
        display=display,
    )


@pytest.fixture
def never(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing may be run."""

    def fail(*_: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(Run, "run", fail)


@pytest.mark.usefixtures("never")
def test_a_wrong_setting_of_any_method_is_said_before_the_first_is_run(tmp_path: Path, display: Display) -> None:
    tiny = load_benchmark("tiny")
    benchmark = tiny.model_copy(update={"methods": {**tiny.methods, "mahalanobis": {"where": "penultimat"}}})
    with pytest.raises(RecipeError, match="'tiny': setting 'where' of method 'mahalanobis' is 'penultimat'; it should"):
        order(tmp_path / "out", display, benchmark)
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("never")
def test_a_place_that_is_no_folder_is_a_sentence(tmp_path: Path, display: Display) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(QualmsError, match=r"Folder .*file/x cannot be written to: Not a directory\."):
        order(tmp_path / "file" / "x", display)
