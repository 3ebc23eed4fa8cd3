"""Folders with and without class folders: sorted by name; files of file managers are ignored, other unexpected files are errors."""

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from qualms.images.input_spec import InputSpec
from qualms_training.data.dataset import ImageSet
from qualms_training.data.sources.folder import SUFFIXES, has_images, read_flat_folder, read_folder
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


def test_names_of_folders_that_are_not_utf_8_are_refused(pets: Path) -> None:
    name = os.fsdecode(b"caf\xe9")
    paint(pets / name / "a.png")
    for folder in (pets, pets / name):
        with pytest.raises(DataError, match=r"The name of folder '.*caf\\udce9' is not UTF-8"):
            read_folder(folder, "train")


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


# Flat folders


@pytest.fixture
def flat(tmp_path: Path) -> Path:
    root = tmp_path / "photos"
    for name, value in (("b.png", 1), ("a.PNG", 2), ("z.bmp", 3), ("c.tif", 4)):
        paint(root / name, value)
    return root


def test_a_flat_folder_has_images_without_labels_sorted_by_name(flat: Path) -> None:
    images = read_flat_folder(flat, "calibration")
    assert not isinstance(images, ImageSet)
    assert (images.name, images.split, len(images)) == ("photos", "calibration", 4)
    assert images.conformed(InputSpec(height=4, width=4, colour="L"))[:, 0, 0, 0].tolist() == [2, 1, 4, 3]


@pytest.mark.parametrize("recursive", [False, True])
def test_hidden_files_and_files_of_file_managers_in_a_flat_folder_are_ignored(flat: Path, recursive: bool) -> None:
    for name in (".DS_Store", "._b.png", ".hidden.png", "Thumbs.db", "desktop.ini"):
        (flat / name).write_bytes(b"x")
    paint(flat / ".thumbnails" / "b.png")
    assert len(read_flat_folder(flat, "calibration", recursive=recursive)) == 4
    assert has_images(flat)


def test_files_of_file_managers_alone_are_no_images(tmp_path: Path) -> None:
    for name in (".hidden.png", "Thumbs.db", "notes.txt"):
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "folder.png").mkdir()
    assert not has_images(tmp_path)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_every_accepted_suffix_makes_a_folder_flat(suffix: str, tmp_path: Path) -> None:
    (tmp_path / f"image{suffix.upper()}").write_bytes(b"x")
    assert has_images(tmp_path)
    assert len(read_flat_folder(tmp_path, "calibration")) == 1


def test_the_error_for_a_folder_of_images_and_folders_names_both_and_the_option(flat: Path) -> None:
    paint(flat / "cat" / "a.png")
    with pytest.raises(
        DataError, match=r"photos holds both images and the folder cat; accepted are .* With --unlabelled"
    ) as caught:
        read_flat_folder(flat, "calibration")
    assert "\n" not in str(caught.value)


def test_recursive_reading_takes_the_images_of_all_folders(flat: Path) -> None:
    paint(flat / "cat" / "a.png", 5)
    paint(flat / "cat" / "old" / "b.png", 6)
    paint(flat / ".cache" / "c.png", 7)
    (flat / "empty").mkdir()
    images = read_flat_folder(flat, "calibration", recursive=True)
    values = images.conformed(InputSpec(height=4, width=4, colour="L"))[:, 0, 0, 0]
    assert sorted(values.tolist()) == [1, 2, 3, 4, 5, 6]
    again = read_flat_folder(flat, "calibration", recursive=True)
    assert images.images == again.images


@pytest.mark.parametrize("recursive", [False, True])
def test_a_file_in_a_flat_folder_that_is_not_an_image_is_named(flat: Path, recursive: bool) -> None:
    (flat / "notes.txt").write_bytes(b"x")
    with pytest.raises(DataError, match=r"photos/notes\.txt does not have the suffix of an image; accepted are \.png"):
        read_flat_folder(flat, "calibration", recursive=recursive)


@pytest.mark.parametrize("recursive", [False, True])
def test_a_flat_folder_without_images_is_named(tmp_path: Path, recursive: bool) -> None:
    (tmp_path / ".DS_Store").write_bytes(b"x")
    with pytest.raises(DataError, match=rf"{tmp_path.name} has no images; accepted are \.png"):
        read_flat_folder(tmp_path, "calibration", recursive=recursive)


def test_a_flat_folder_may_hold_one_image(tmp_path: Path) -> None:
    paint(tmp_path / "only.png", 9)
    images = read_flat_folder(tmp_path, "calibration")
    assert images.conformed(InputSpec(height=4, width=4, colour="L")).max() == 9
