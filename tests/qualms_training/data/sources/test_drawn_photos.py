"""Drawn photos are reproducible, have the requested size and differ by class."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from qualms_training.data import load
from qualms_training.data.sources.drawn_photos import draw_photo, draw_photos
from qualms_training.errors import DataError


def test_photos_are_in_class_folders_and_reproducible(tmp_path: Path) -> None:
    for name in ("first", "again"):
        draw_photos(tmp_path / name, 7, 3, size=(64, 48))
    files = sorted(path.relative_to(tmp_path / "first") for path in (tmp_path / "first").rglob("*.jpg"))
    assert list(map(str, files)) == [
        f"class000{label}/00{index}.jpg" for label in range(3) for index in range(3 - (label > 0))
    ]
    for file in files:
        assert (tmp_path / "first" / file).read_bytes() == (tmp_path / "again" / file).read_bytes()
    with Image.open(tmp_path / "first" / files[0]) as image:
        assert (image.format, image.mode, image.size) == ("JPEG", "RGB", (64, 48))
    assert load(f"folder:{tmp_path / 'first'}", "train").classes == ("class0000", "class0001", "class0002")


def test_photos_of_a_class_differ_but_less_than_those_of_other_classes() -> None:
    def mean_colour(label: int, number: int) -> list[float]:
        return np.asarray(draw_photo(label, (64, 48), np.random.default_rng(number))).mean(axis=(0, 1)).tolist()  # type: ignore[no-any-return]

    colours = np.array([[mean_colour(label, number) for number in range(8)] for label in range(12)])
    within = colours.std(axis=1).mean()
    between = colours.mean(axis=1).std(axis=0).mean()
    assert 0 < within < between


@pytest.mark.parametrize(("count", "classes"), [(5, 1), (3, 4)])
def test_too_few_classes_or_images_are_an_error(count: int, classes: int, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"{count} images of {classes} classes were requested"):
        draw_photos(tmp_path / "out", count, classes)


def test_photos_are_not_mixed_with_existing_files(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").touch()
    with pytest.raises(DataError, match="is not empty"):
        draw_photos(tmp_path, 4, 2)


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=rf"^Folder .*{name} cannot be written to: "):
        draw_photos(tmp_path / name, 4, 2)
