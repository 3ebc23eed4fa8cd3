"""npz files: errors name what is missing or malformed, nothing is unpickled, and writing is atomic."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qualms_training.data.dataset import ImageSet
from qualms_training.data.sources.npz import read_npz, write_npz
from qualms_training.errors import DataError

GOOD: dict[str, Any] = {
    "images": np.arange(3 * 4 * 4, dtype=np.uint8).reshape(3, 4, 4),
    "labels": np.array([0, 1, 1]),
    "classes": np.array(["cat", "dog"]),
}


def store(folder: Path, **changes: Any) -> None:
    np.savez(
        folder / "pets-test.npz",
        **{key: value for key, value in (GOOD | changes).items() if value is not None},
    )


def test_a_written_set_is_read_back_unchanged(tmp_path: Path) -> None:
    images = ImageSet("pets", "test", GOOD["images"], GOOD["labels"], ("cat", "dog"))
    assert write_npz(tmp_path, images) == tmp_path / "pets-test.npz"
    assert read_npz(tmp_path, "pets", "test").digest() == images.digest()
    assert [path.name for path in tmp_path.iterdir()] == ["pets-test.npz"]


def test_a_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store(tmp_path)
    before = (tmp_path / "pets-test.npz").read_bytes()

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(np, "savez", fail)
    with pytest.raises(OSError, match="disk full"):
        write_npz(tmp_path, ImageSet("pets", "test", GOOD["images"], GOOD["labels"], ("cat", "dog")))
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [before]


def test_integer_labels_of_any_type_become_int64(tmp_path: Path) -> None:
    store(tmp_path, labels=GOOD["labels"].astype(np.uint8))
    assert read_npz(tmp_path, "pets", "test").labels.dtype == np.int64


def test_the_error_for_a_missing_set_names_folder_file_present_sets_and_download(tmp_path: Path) -> None:
    store(tmp_path)
    with pytest.raises(DataError) as caught:
        read_npz(tmp_path, "mnist", "train")
    for part in (
        str(tmp_path),
        "mnist-train.npz",
        "pets-test",
        "`qualms data mnist --out DIR`",
        "--data",
        "QUALMS_DATA",
    ):
        assert part in str(caught.value)


def test_the_error_suggests_a_download_only_for_downloadable_sets(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="--data or QUALMS_DATA") as caught:
        read_npz(tmp_path, "tiny_imagenet", "test")
    assert "qualms data" not in str(caught.value)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"there is no folder .*nowhere"):
        read_npz(tmp_path / "nowhere", "mnist", "train")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labels": None}, "it has no labels; needed are images, labels, classes"),
        ({"labels": None, "classes": None}, "no labels and no classes"),
        ({"images": GOOD["images"].astype(np.float32)}, "images is float32"),
        ({"images": GOOD["images"][..., None].repeat(2, -1)}, r"images is uint8 of shape \(3, 4, 4, 2\)"),
        ({"labels": GOOD["labels"].astype(float)}, "labels is float64"),
        ({"labels": GOOD["labels"][:, None]}, r"labels is int64 of shape \(3, 1\)"),
        ({"classes": np.array([1, 2])}, "classes is int64"),
        ({"labels": np.array([0, 1])}, "3 images but labels of shape"),
        ({"labels": np.array([0, 1, 2])}, "labels from 0 to 2"),
        ({"images": GOOD["images"][:0], "labels": GOOD["labels"][:0]}, "0 images"),
        ({"classes": np.array(["cat", "dog"], dtype=object)}, "not an npz file of plain arrays"),
    ],
)
def test_the_error_for_a_malformed_file_names_it_and_the_problem(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    store(tmp_path, **changes)
    with pytest.raises(DataError, match=rf"pets-test\.npz is malformed: .*{message}"):
        read_npz(tmp_path, "pets", "test")


@pytest.mark.parametrize("damage", ["text", "empty", "cut", "npy", "flipped"])
def test_a_file_that_is_not_an_npz_file_is_named(tmp_path: Path, damage: str) -> None:
    store(tmp_path)
    path = tmp_path / "pets-test.npz"
    whole = path.read_bytes()
    if damage == "npy":
        with path.open("wb") as file:
            np.save(file, GOOD["images"])
    else:
        flipped = whole[:150] + bytes([whole[150] ^ 255]) + whole[151:]
        path.write_bytes({"text": b"hello", "empty": b"", "cut": whole[:-50], "flipped": flipped}[damage])
    with pytest.raises(DataError, match=r"pets-test\.npz is malformed"):
        read_npz(tmp_path, "pets", "test")


def test_real_sets_are_read_completely(data_dir: Path) -> None:
    mnist = read_npz(data_dir, "mnist", "test")
    assert np.asarray(mnist.images).shape == (10_000, 28, 28)
    assert mnist.classes == tuple("0123456789")
