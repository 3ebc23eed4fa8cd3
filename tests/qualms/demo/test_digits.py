import numpy as np
import pytest

from qualms.demo.digits import SIZE, draw, draw_many


def test_the_same_seed_draws_the_same_digits_and_another_seed_others() -> None:
    first, again, other = (np.array([image for _, image in draw_many(20, seed)]) for seed in (3, 3, 4))
    assert np.array_equal(first, again)
    assert not any(np.array_equal(a, b) for a, b in zip(first, other, strict=True))


def test_every_class_is_drawn_as_often_as_the_others() -> None:
    assert np.bincount([digit for digit, _ in draw_many(50, 0)]).tolist() == [5] * 10


@pytest.mark.parametrize("digit", range(10))
def test_a_digit_is_framed_as_mnist_frames_its_own(digit: int) -> None:
    rng = np.random.default_rng(digit)
    for _ in range(20):
        image = draw(digit, rng)
        assert image.shape == (SIZE, SIZE)
        rows, columns = (np.flatnonzero(image.max(axis=axis) > 60) for axis in (1, 0))
        longer = max(np.ptp(rows), np.ptp(columns)) + 1
        assert 17 <= longer <= 22  # 20 pixels, give or take the soft edge
        places = np.indices(image.shape).reshape(2, -1) @ image.ravel() / image.sum(dtype=np.float64)
        assert np.allclose(places, (SIZE - 1) / 2, atol=1.0)


def test_ink_never_leaves_on_one_side_to_come_back_on_the_other() -> None:
    for _, image in draw_many(500, 1):
        assert np.count_nonzero([image[0].any(), image[-1].any()]) < 2
        assert np.count_nonzero([image[:, 0].any(), image[:, -1].any()]) < 2
