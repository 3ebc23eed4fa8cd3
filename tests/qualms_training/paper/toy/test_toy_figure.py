"""The toy figure shows the α of the recipes' own bundles, for the images with the median flag score."""

import io
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console

from qualms.bundle.file import open_bundle
from qualms.bundle.runtime import GraphRunner
from qualms_training.console import Display
from qualms_training.data import load
from qualms_training.errors import DataError, QualmsError
from qualms_training.paper.toy.toy_figure import leading, make_toy_figure, median_index
from qualms_training.recipe import load_recipe


def draw(out: Path, display: Display, ood: str = "textures", **options: Any) -> None:
    settings: dict[str, Any] = {"cache": out / "cache", "data_dir": None, "device": torch.device("cpu"), **options}
    make_toy_figure(load_recipe("tiny"), load_recipe("tiny"), ood, out=out, display=display, **settings)


@pytest.fixture(scope="module")
def drawn(tiny_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished figure, with the base of the tiny run."""
    out = tmp_path_factory.mktemp("toy")
    shutil.copytree(tiny_run / "cache", out / "cache")
    draw(out, Display(Console(file=io.StringIO())))
    return out


def picture_width(out: Path) -> int:
    with Image.open(out / "toy-figure.png") as picture:
        return picture.width


def test_the_median_of_an_even_number_is_the_smaller_of_the_two_middle_ones() -> None:
    assert median_index(np.array([5, 1, 9], np.float32)) == 0
    assert median_index(np.array([5, 1, 9, 3], np.float32)) == 3


def test_leading_classes_are_in_descending_order() -> None:
    assert leading(np.array([1.0, 7.0, 1.5, 1.0, 3.0])).tolist() == [1, 4, 2]


@pytest.mark.slow
def test_the_figure_shows_the_alpha_of_the_bundle(tiny_run: Path, drawn: Path) -> None:
    runner = GraphRunner(open_bundle(tiny_run / "seed-0" / "model.onnx").graph)
    record = json.loads((drawn / "toy-figure.json").read_text())
    columns = ["taps pool1 and pool2", "tap pool1 only", "tap pool2 only", "served, α = 1 + n·p"]
    for name in ("shapes", "textures"):
        source = load(name, "test")
        outputs = runner(np.asarray(source.images))
        panels = [panel for panel in record if panel["data"] == name]
        assert [panel["column"] for panel in panels] == columns
        assert {panel["index"] for panel in panels} == {median_index(outputs["fused"])}
        index = panels[0]["index"]
        assert panels[0]["class"] == source.classes[source.labels[index]]
        assert panels[0]["alpha"] == pytest.approx(outputs["meta_alpha"][index], rel=1e-3)
        assert panels[0]["mutual_information"] == pytest.approx(outputs["meta_mutual_information"][index], rel=1e-3)
        assert panels[3]["alpha"] == pytest.approx(outputs["alpha"][index], rel=1e-3)
        assert panels[3]["mutual_information"] == pytest.approx(outputs["mutual_information"][index], rel=1e-3)
        assert len({tuple(panel["alpha"]) for panel in panels}) == 4
        assert f"{name} test image {index} (class {panels[0]['class']})" in (drawn / "toy-figure.md").read_text()


@pytest.mark.slow
def test_a_second_run_trains_nothing_and_images_are_drawn_on_request_only(
    drawn: Path, tmp_path: Path, display: Display
) -> None:
    out = shutil.copytree(drawn, tmp_path / "out")
    weights = {file: file.stat().st_mtime_ns for file in out.rglob("*.pt")}
    width = picture_width(out)
    draw(out, display, with_images=True)
    assert {file: file.stat().st_mtime_ns for file in out.rglob("*.pt")} == weights
    assert picture_width(out) > 1.1 * width


def test_missing_data_are_reported_before_anything_is_written(tmp_path: Path, display: Display) -> None:
    (tmp_path / "data").mkdir()
    with pytest.raises(DataError, match="fashion_mnist"):
        draw(tmp_path / "out", display, "fashion_mnist", data_dir=tmp_path / "data")
    assert not (tmp_path / "out").exists()


def test_an_output_path_that_cannot_be_a_folder_is_reported(tmp_path: Path, display: Display) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(QualmsError, match=r"Folder .*file/x cannot be written to: Not a directory\."):
        draw(tmp_path / "file" / "x", display)
