"""A data set is loaded by name: synthetic, from class folders, or from npz files in the data folder."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from qualms.images.input_spec import InputSpec
from qualms_training.data import load, load_ood
from qualms_training.data.dataset import Images, ImageSet
from qualms_training.data.sources.given_sets import GivenSets
from qualms_training.data.sources.npz import write_npz
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
        "There is no folder 'mnist'",
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


def save_images(folder: Path, count: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for index in range(count):
        Image.new("L", (4, 4), index).save(folder / f"{index}.png")


def test_an_ood_set_may_be_a_folder_of_images_without_classes(tmp_path: Path) -> None:
    save_images(tmp_path, 3)
    images = load_ood(f"folder:{tmp_path}")
    assert len(images) == 3
    assert not isinstance(images, ImageSet)
    with pytest.raises(DataError, match="belongs to no class"):
        load(f"folder:{tmp_path}", "test")


def test_all_images_of_an_ood_folder_without_splits_are_used(tmp_path: Path) -> None:
    save_images(tmp_path / "cat", 3)
    save_images(tmp_path / "dog", 2)
    assert len(load_ood(f"folder:{tmp_path}")) == 5
    assert len(load(f"folder:{tmp_path}", "test")) == 2


def test_the_test_images_of_an_ood_folder_with_splits_are_used(tmp_path: Path) -> None:
    save_images(tmp_path / "train" / "cat", 3)
    save_images(tmp_path / "test" / "cat", 2)
    assert len(load_ood(f"folder:{tmp_path}")) == 2


def test_ood_sets_by_name_and_missing_folders_are_treated_as_all_others(tmp_path: Path, stored: Path) -> None:
    assert len(load_ood("mnist", stored)) == 2
    with pytest.raises(DataError, match="does not exist"):
        load_ood(f"folder:{tmp_path / 'nowhere'}")


def test_given_sets_are_loaded_by_name_and_all_others_from_the_data_folder(stored: Path) -> None:
    mine = ImageSet("mine", "train", np.zeros((3, 4, 4), np.uint8), np.array([0, 1, 1]), ("a", "b"))
    plain = Images("others", "test", np.zeros((4, 4, 4), np.uint8))
    given = GivenSets({("mine", "train"): mine, ("others", "test"): plain}, stored)
    assert load("mine", "train", given) is mine
    assert load("mine", "train", given, ["b", "a"]).labels.tolist() == [1, 0, 0]
    assert len(load("mnist", "test", given)) == 2
    assert load_ood("others", given) is plain
    assert len(load_ood("mnist", given)) == 2
    with pytest.raises(DataError, match="'others' .* has no labels"):
        load("others", "test", given)
