"""Data sets in memory and as files have the same preprocessing and digest."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from qualms.images.input_spec import InputSpec
from qualms.images.preprocess import preprocess_batch
from qualms_training.data.dataset import ImageSet
from qualms_training.errors import DataError

SPEC = InputSpec(height=6, width=6)


def in_memory(n: int = 600, seed: int = 0) -> ImageSet:
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, (n, 5, 4), dtype=np.uint8)
    return ImageSet("noise", "test", images, rng.integers(0, 2, n), ("a", "b"))


def on_disk(folder: Path, source: ImageSet) -> ImageSet:
    paths = []
    for index, image in enumerate(np.asarray(source.images)):
        paths.append(folder / f"{index}.png")
        Image.fromarray(image).save(paths[-1])
    return ImageSet(source.name, source.split, tuple(paths), source.labels, source.classes)


def test_conformed_images_equal_preprocess_batch() -> None:
    images = in_memory()
    np.testing.assert_array_equal(images.conformed(SPEC), preprocess_batch(np.asarray(images.images), SPEC))


def test_files_and_memory_give_the_same_pixels(tmp_path: Path) -> None:
    images = in_memory(20)
    np.testing.assert_array_equal(on_disk(tmp_path, images).conformed(SPEC), images.conformed(SPEC))


def test_indices_select_and_order_images(tmp_path: Path) -> None:
    images = in_memory(20)
    whole = images.conformed(SPEC)
    for candidate in (images, on_disk(tmp_path, images)):
        np.testing.assert_array_equal(candidate.conformed(SPEC, [7, 3, 3]), whole[[7, 3, 3]])


def test_no_indices_give_an_empty_array() -> None:
    assert in_memory(5).conformed(SPEC, []).shape == (0, 6, 6, 3)


def test_progress_counts_every_image() -> None:
    done: list[int] = []
    in_memory(600).conformed(SPEC, progress=done.append)
    assert sum(done) == 600
    assert len(done) > 1


def test_digest_depends_on_content_only(tmp_path: Path) -> None:
    images = in_memory(20)
    renamed = ImageSet("other", "train", images.images, images.labels, images.classes)
    assert images.digest() == renamed.digest() == in_memory(20).digest()
    pixel = np.array(images.images)
    pixel[3, 2, 1] ^= 1
    changed = [
        ImageSet("noise", "test", pixel, images.labels, images.classes),
        ImageSet("noise", "test", images.images, 1 - images.labels, images.classes),
        ImageSet("noise", "test", images.images, images.labels, ("a", "c")),
        ImageSet("noise", "test", np.asarray(images.images).reshape(20, 4, 5), images.labels, images.classes),
    ]
    assert len({images.digest(), *(other.digest() for other in changed)}) == 5
    files = on_disk(tmp_path, images)
    before = files.digest()
    assert before == files.digest()
    Image.new("L", (4, 5)).save(tmp_path / "3.png")
    assert files.digest() != before


def test_the_error_for_a_corrupt_file_names_it_and_the_reason(tmp_path: Path) -> None:
    files = on_disk(tmp_path, in_memory(5))
    (tmp_path / "3.png").write_bytes(b"\x89PNG\r\n\x1a\nnot any more")
    with pytest.raises(DataError, match=r"3\.png is not usable: .*damaged"):
        files.conformed(SPEC)


def test_the_error_for_a_missing_file_names_it(tmp_path: Path) -> None:
    files = on_disk(tmp_path, in_memory(5))
    (tmp_path / "2.png").unlink()
    for use in (files.digest, lambda: files.conformed(SPEC)):
        with pytest.raises(DataError, match=r"2\.png cannot be read"):
            use()


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([0, 1], "3 images but labels of shape"),
        ([0, 1, 2], "labels from 0 to 2; with 2 classes, 0 to 1 are accepted"),
        ([0, -1, 1], "labels from -1"),
    ],
)
def test_labels_that_do_not_match_images_or_classes_are_an_error(labels: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        ImageSet("x", "test", np.zeros((3, 4, 4), np.uint8), np.array(labels), ("a", "b"))


def test_a_set_without_images_is_an_error() -> None:
    with pytest.raises(DataError, match="0 images"):
        ImageSet("x", "test", np.zeros((0, 4, 4), np.uint8), np.zeros(0, np.int64), ("a",))
