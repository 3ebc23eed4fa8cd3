"""The user's own images by path: labels come from class folders or npz files, flat folders have none."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from qualms.images.input_spec import InputSpec
from qualms_training.data.dataset import Images, ImageSet
from qualms_training.data.sources.npz import write_npz
from qualms_training.data.sources.own_images import labels_by_name, read_images, read_labelled_images, without_labels
from qualms_training.errors import DataError

SPEC = InputSpec(height=4, width=4, colour="L")


def paint(path: Path, value: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", (4, 4), value).save(path)


@pytest.fixture
def classes(tmp_path: Path) -> Path:
    """A folder of class folders."""
    for name, value in (("cat/a.png", 1), ("cat/b.png", 2), ("dog/a.png", 3)):
        paint(tmp_path / "pets" / name, value)
    return tmp_path / "pets"


@pytest.fixture
def flat(tmp_path: Path) -> Path:
    """A folder of images without labels."""
    for value in (1, 2):
        paint(tmp_path / "photos" / f"{value}.png", value)
    return tmp_path / "photos"


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """A NAME-SPLIT.npz file, whose name has a dash."""
    pixels = np.arange(3, dtype=np.uint8)[:, None, None] * np.ones((4, 4), np.uint8)
    return write_npz(tmp_path, ImageSet("my-pets", "held", pixels, np.array([1, 0, 1]), ("cat", "dog")))


def test_class_folders_and_npz_files_have_labels(classes: Path, archive: Path) -> None:
    for path, labels, name in ((classes, [0, 0, 1], ("pets", "test")), (archive, [1, 0, 1], ("my-pets", "held"))):
        images = read_images(path, "test")
        assert isinstance(images, ImageSet)
        assert images.labels.tolist() == labels
        assert (images.name, images.split) == name
        assert read_labelled_images(path, "test").digest() == images.digest()


def test_a_folder_for_the_split_is_preferred(tmp_path: Path) -> None:
    for name in ("test/cat/a.png", "calibration/cat/b.png", "calibration/dog/c.png"):
        paint(tmp_path / name, 1)
    assert len(read_images(tmp_path, "calibration")) == 2
    assert len(read_images(tmp_path, "test")) == 1


def test_a_flat_folder_has_no_labels(flat: Path) -> None:
    images = read_images(flat, "calibration")
    assert type(images) is Images
    assert images.conformed(SPEC)[:, 0, 0, 0].tolist() == [1, 2]


def test_labels_are_needed_for_an_evaluation(flat: Path) -> None:
    with pytest.raises(
        DataError, match=r"photos has images without class folders, and labels are needed here"
    ) as caught:
        read_labelled_images(flat, "test")
    assert "\n" not in str(caught.value)


def test_labels_can_be_ignored(classes: Path, flat: Path, archive: Path) -> None:
    for path, values in ((classes, [1, 2, 3]), (flat, [1, 2]), (archive, [0, 1, 2])):
        images = without_labels(path, "calibration")
        assert type(images) is Images
        assert images.conformed(SPEC)[:, 0, 0, 0].tolist() == values


def test_images_below_a_folder_of_images_are_used_only_without_labels(flat: Path) -> None:
    paint(flat / "more" / "3.png", 3)
    with pytest.raises(DataError, match="holds both images and the folder more"):
        read_images(flat, "calibration")
    assert len(without_labels(flat, "calibration")) == 3


@pytest.mark.parametrize("read", [read_images, without_labels, read_labelled_images])
def test_a_missing_folder_is_named_with_the_nearest(read: Callable[[Path, str], Images], tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    with pytest.raises(DataError, match=r"^There is no folder '.*photoz'; did you mean 'photos'\? "):
        read(tmp_path / "photoz", "test")
    with pytest.raises(DataError, match=r"^There is no folder '.*below'\. "):
        read(tmp_path / "nowhere" / "below", "test")


@pytest.mark.parametrize("read", [read_images, without_labels, read_labelled_images])
def test_a_path_that_is_neither_folder_nor_npz_file_is_named(
    read: Callable[[Path, str], Images], tmp_path: Path, archive: Path
) -> None:
    text = tmp_path / "notes-test.txt"
    text.write_text("not images")
    nameless = archive.rename(tmp_path / "pets.npz")
    for path in (text, nameless):
        with pytest.raises(DataError, match=rf"{path.name}' is neither a folder of images.* nor a NAME-SPLIT\.npz"):
            read(path, "test")


def test_a_missing_npz_file_is_named_with_those_present(archive: Path) -> None:
    with pytest.raises(DataError, match=r"'other' \(split 'test'\) was not found: .*my-pets-held"):
        read_images(archive.parent / "other-test.npz", "test")


def test_an_empty_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no class folders"):
        read_images(tmp_path, "calibration")
    with pytest.raises(DataError, match="has no images"):
        without_labels(tmp_path, "calibration")


def test_labels_are_matched_by_the_names_of_the_classes(classes: Path) -> None:
    images = read_labelled_images(classes, "test")
    assert labels_by_name(images, ["emu", "dog", "cat"]).tolist() == [2, 2, 1]
    with pytest.raises(DataError, match=r"'pets' .*has the class 'cat', which the model does not have; .*emu, dog"):
        labels_by_name(images, ["emu", "dog"])
