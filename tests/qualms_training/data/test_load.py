"""A data set is loaded by name: synthetic, from class folders, or from npz files in the data folder."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from qualms.images.input_spec import InputSpec
from qualms_training.data import load
from qualms_training.data.dataset import ImageSet
from qualms_training.data.npz import write_npz
from qualms_training.errors import DataError


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    write_npz(tmp_path, ImageSet("mnist", "test", np.zeros((2, 4, 4), np.uint8), np.array([0, 1]), ("a", "b")))
    return tmp_path


def test_synthetic_sets_need_no_data_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QUALMS_DATA", raising=False)
    assert load("strokes", "test").name == "strokes"


def test_a_folder_of_class_folders_is_read_by_path(tmp_path: Path) -> None:
    (tmp_path / "cat").mkdir()
    Image.new("L", (4, 4)).save(tmp_path / "cat/a.png")
    assert load(f"folder:{tmp_path}", "train").classes == ("cat",)


def test_npz_files_are_read_from_the_given_folder_or_from_qualms_data(
    stored: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUALMS_DATA", "/nowhere")
    assert len(load("mnist", "test", stored)) == 2
    monkeypatch.setenv("QUALMS_DATA", str(stored))
    assert len(load("mnist", "test")) == 2


@pytest.mark.parametrize("value", [None, ""])
def test_the_error_without_a_data_folder_lists_every_way_to_give_one(
    monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    monkeypatch.delenv("QUALMS_DATA", raising=False)
    if value is not None:
        monkeypatch.setenv("QUALMS_DATA", value)
    with pytest.raises(DataError) as caught:
        load("mnist", "test")
    for part in (
        "'mnist'",
        "--data",
        "QUALMS_DATA",
        "`qualms data mnist --out DIR`",
        "folder:PATH",
        "shapes",
    ):
        assert part in str(caught.value)


def test_the_error_suggests_a_download_only_for_downloadable_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QUALMS_DATA", raising=False)
    with pytest.raises(DataError, match="folder:PATH") as caught:
        load("tiny_imagenet", "test")
    assert "qualms data" not in str(caught.value)


@pytest.mark.parametrize(("name", "side"), [("mnist", 28), ("omniglot", 105), ("cifar10", 32)])
def test_real_sets_are_preprocessed_to_the_input_spec(data_dir: Path, name: str, side: int) -> None:
    images = load(name, "test", data_dir)
    assert np.asarray(images.images).shape[1:3] == (side, side)
    batch = images.conformed(InputSpec(height=32, width=32), range(20))
    assert batch.shape == (20, 32, 32, 3)
