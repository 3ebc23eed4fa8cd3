"""A folder of class folders: sorted by name; files of file managers are ignored, other unexpected files are errors."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from qualms.images.input_spec import InputSpec
from qualms_training.data.folder import read_folder
from qualms_training.errors import DataError


def paint(path: Path, value: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", (4, 4), value).save(path)


@pytest.fixture
def pets(tmp_path: Path) -> Path:
    root = tmp_path / "pets"
    for name, value in (("dog/b.png", 1), ("dog/a.PNG", 2), ("cat/z.bmp", 3), ("cat/sub.tif", 4)):
        paint(root / name, value)
    return root


def test_classes_and_files_are_sorted_by_name(pets: Path) -> None:
    images = read_folder(pets, "train")
    assert (images.name, images.split, images.classes) == ("pets", "train", ("cat", "dog"))
    assert images.labels.tolist() == [0, 0, 1, 1]
    spec = InputSpec(height=4, width=4, colour="L")
    assert images.conformed(spec)[:, 0, 0, 0].tolist() == [4, 3, 2, 1]


def test_hidden_files_and_files_of_file_managers_are_ignored(pets: Path) -> None:
    for name in (
        ".DS_Store",
        "cat/.DS_Store",
        "cat/._z.bmp",
        "dog/Thumbs.db",
        "dog/desktop.ini",
        "README.md",
    ):
        (pets / name).write_bytes(b"x")
    (pets / ".cache").mkdir()
    assert len(read_folder(pets, "train")) == 4


def test_a_folder_per_split_is_used_if_it_exists(pets: Path, tmp_path: Path) -> None:
    paint(tmp_path / "both/train/cat/a.png")
    paint(tmp_path / "both/test/cat/b.png")
    paint(tmp_path / "both/test/dog/c.png")
    assert read_folder(tmp_path / "both", "train").classes == ("cat",)
    assert len(read_folder(tmp_path / "both", "test")) == 2
    paint(pets / "train/steam.png")
    assert read_folder(pets, "train").classes == ("cat", "dog", "train")


def test_the_error_for_a_missing_split_names_the_accepted_layouts(tmp_path: Path) -> None:
    paint(tmp_path / "train/cat/a.png")
    with pytest.raises(DataError, match="holds the folder cat; accepted are FOLDER/CLASS/IMAGE and FOLDER/SPLIT"):
        read_folder(tmp_path, "test")


def test_an_empty_class_folder_is_named(pets: Path) -> None:
    (pets / "emu").mkdir()
    (pets / "emu/.DS_Store").write_bytes(b"x")
    with pytest.raises(DataError, match=r"pets/emu has no images"):
        read_folder(pets, "train")


def test_a_folder_without_class_folders_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no class folders"):
        read_folder(tmp_path, "train")


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere does not exist"):
        read_folder(tmp_path / "nowhere", "train")


@pytest.mark.parametrize("name", ["cat/notes.txt", "cat/noextension", "dog/movie.mp4"])
def test_a_file_that_is_not_an_image_is_named(pets: Path, name: str) -> None:
    (pets / name).write_bytes(b"x")
    with pytest.raises(DataError, match=rf"{name} does not have the suffix of an image; accepted are \.png"):
        read_folder(pets, "train")


def test_an_image_outside_class_folders_is_named(pets: Path) -> None:
    paint(pets / "stray.png")
    with pytest.raises(DataError, match=r"stray\.png belongs to no class"):
        read_folder(pets, "train")


def test_the_error_for_a_corrupt_image_names_it_and_the_reason(pets: Path) -> None:
    (pets / "dog/b.png").write_bytes((pets / "dog/b.png").read_bytes()[:40])
    images = read_folder(pets, "train")
    with pytest.raises(DataError, match=r"dog/b\.png is not usable: .*damaged or truncated"):
        images.conformed(InputSpec(height=4, width=4))


def test_images_of_different_sizes_and_modes_become_one_array(tmp_path: Path) -> None:
    paint(tmp_path / "a/1.png")
    Image.new("RGB", (9, 3), "red").save(tmp_path / "a/2.jpg")
    batch = read_folder(tmp_path, "train").conformed(InputSpec(height=5, width=5))
    assert batch.shape == (2, 5, 5, 3)
    assert batch.dtype == np.uint8
