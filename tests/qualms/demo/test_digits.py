from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from qualms.demo.digits import SIZE, draw, draw_many, write_folder
from qualms.errors import DataError


def test_equal_seeds_draw_equal_digits_and_different_seeds_different_ones() -> None:
    first, again, other = (np.array([image for _, image in draw_many(20, seed)]) for seed in (3, 3, 4))
    assert np.array_equal(first, again)
    assert not any(np.array_equal(a, b) for a, b in zip(first, other, strict=True))


def test_all_classes_are_drawn_equally_often() -> None:
    assert np.bincount([digit for digit, _ in draw_many(50, 0)]).tolist() == [5] * 10


@pytest.mark.parametrize("digit", range(10))
def test_size_and_centre_of_a_digit_are_as_in_mnist(digit: int) -> None:
    rng = np.random.default_rng(digit)
    for _ in range(20):
        image = draw(digit, rng)
        assert image.shape == (SIZE, SIZE)
        rows, columns = (np.flatnonzero(image.max(axis=axis) > 60) for axis in (1, 0))
        longer = max(np.ptp(rows), np.ptp(columns)) + 1
        assert 17 <= longer <= 22  # 20 pixels, apart from the blurred edge
        centre = np.indices(image.shape).reshape(2, -1) @ image.ravel() / image.sum(dtype=np.float64)
        assert np.allclose(centre, (SIZE - 1) / 2, atol=1.0)


def test_centring_does_not_wrap_ink_around_the_edges() -> None:
    for _, image in draw_many(500, 1):
        assert np.count_nonzero([image[0].any(), image[-1].any()]) < 2
        assert np.count_nonzero([image[:, 0].any(), image[:, -1].any()]) < 2


def test_the_folder_contains_the_drawn_digits_by_class(tmp_path: Path) -> None:
    write_folder(tmp_path / "drawn", 20, 0)
    for index, (digit, image) in enumerate(draw_many(20, 0)):
        file = Image.open(tmp_path / "drawn" / str(digit) / f"{index:06}.png")
        assert np.array_equal(np.asarray(file), image)


def test_a_folder_that_is_not_empty_is_left_unchanged(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(DataError, match="already exists"):
        write_folder(tmp_path, 20, 0)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
