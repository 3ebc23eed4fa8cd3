"""Each noise has its documented effect, with a random draw for each image."""

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.special import expit

from qualms_training.data.noise import NOISES, apply_noise, blend, blur, contrast, corrupt, mosaic, permutation, shuffle


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.fixture
def images() -> NDArray[np.uint8]:
    return rng(9).integers(0, 256, (6, 12, 10, 3), dtype=np.uint8)


@pytest.mark.parametrize("kind", NOISES)
@pytest.mark.parametrize("channels", [1, 3])
def test_noise_keeps_type_and_shape_depends_on_its_seed_and_does_not_change_its_input(kind: str, channels: int) -> None:
    images = rng(9).integers(0, 256, (4, 9, 7, channels), dtype=np.uint8)
    before = images.copy()
    noisy = NOISES[kind](images, rng())
    assert noisy.dtype == np.uint8
    assert noisy.shape == images.shape
    np.testing.assert_array_equal(noisy, NOISES[kind](images, rng()))
    assert (noisy != NOISES[kind](images, rng(1))).any()
    np.testing.assert_array_equal(images, before)


@pytest.mark.parametrize("kind", ["permutation", "blur", "contrast", "shuffle"])
def test_every_image_has_its_own_random_draw(kind: str, images: NDArray[np.uint8]) -> None:
    noisy = NOISES[kind](np.repeat(images[:1], 5, axis=0), rng())
    assert len({image.tobytes() for image in noisy}) == 5


def test_permutation_moves_whole_pixels(images: NDArray[np.uint8]) -> None:
    for before, after in zip(images, permutation(images, rng()), strict=True):
        assert sorted(map(tuple, before.reshape(-1, 3))) == sorted(map(tuple, after.reshape(-1, 3)))
        assert (before != after).any()


def test_blur_spreads_a_point_with_a_width_in_range() -> None:
    point = np.zeros((50, 41, 41, 1), np.uint8)
    point[:, 20, 20] = 255
    peaks = blur(point, rng())[:, 20, 20, 0]
    widest, narrowest = 255 / (2 * np.pi * 2.5**2), 255 / (2 * np.pi * 1.0**2)
    assert widest - 1 <= peaks.min() < peaks.max() <= narrowest + 1


def test_blur_mixes_channels() -> None:
    red = np.zeros((3, 8, 8, 3), np.uint8)
    red[..., 0] = 255
    assert (blur(red, rng())[..., 2] > 0).all()


def test_contrast_is_the_sigmoid_with_a_slope_in_range() -> None:
    ramp = np.broadcast_to(np.arange(256, dtype=np.uint8).reshape(1, 16, 16, 1), (40, 16, 16, 1))
    pushed = contrast(ramp, rng()).astype(int)
    x = ramp / 255 - 0.5
    gentle, steep = (255 * expit(gamma * x) for gamma in (5, 30))
    assert (pushed >= np.minimum(gentle, steep) - 0.51).all()
    assert (pushed <= np.maximum(gentle, steep) + 0.51).all()
    assert (np.diff(pushed.reshape(40, 256)) >= 0).all()


def test_shuffle_moves_whole_tiles() -> None:
    tiles = np.arange(16, dtype=np.uint8)
    image = np.kron(tiles.reshape(4, 4), np.ones((3, 2), np.uint8))[None, ..., None]
    shuffled = shuffle(image, rng())
    corners = shuffled[0, ::3, ::2, 0]
    assert sorted(corners.ravel()) == list(tiles)
    assert (np.kron(corners, np.ones((3, 2), np.uint8)) == shuffled[0, ..., 0]).all()
    assert (shuffled != image).any()


def test_mosaic_takes_each_quadrant_from_one_image() -> None:
    images = np.broadcast_to(np.arange(40, dtype=np.uint8)[:, None, None, None], (40, 8, 6, 1))
    composed = mosaic(images, rng())
    quadrants = composed[:, ::4, ::3, 0]
    assert (np.kron(quadrants, np.ones((1, 4, 3), np.uint8)) == composed[..., 0]).all()
    assert all(sorted(quadrants[:, row, column]) == list(range(40)) for row in (0, 1) for column in (0, 1))
    assert sum(len(set(image.ravel())) > 1 for image in quadrants) > 30


def test_blend_is_the_mean_of_two_images() -> None:
    values = 2 * np.arange(20, dtype=np.uint8)
    images = np.broadcast_to(values[:, None, None, None], (20, 4, 4, 1))
    blended = blend(images, rng())
    others = 2 * blended[:, 0, 0, 0].astype(int) - values
    assert sorted(others) == list(values)
    assert (blended == blended[:, :1, :1]).all()


def test_noises_are_applied_in_the_given_order(images: NDArray[np.uint8]) -> None:
    generator = rng()
    expected = permutation(blur(images, generator), generator)
    np.testing.assert_array_equal(apply_noise(images, ["blur", "permutation"], rng()), expected)
    np.testing.assert_array_equal(apply_noise(images, [], rng()), images)


def test_corrupt_is_permutation_then_blur_then_contrast(images: NDArray[np.uint8]) -> None:
    expected = apply_noise(images, ["permutation", "blur", "contrast"], rng())
    np.testing.assert_array_equal(corrupt(images, rng()), expected)


def test_the_error_for_an_unknown_noise_lists_the_accepted_ones(images: NDArray[np.uint8]) -> None:
    with pytest.raises(
        ValueError, match="'fog' is not known; accepted are permutation, blur, contrast, shuffle, mosaic, blend"
    ):
        apply_noise(images, ["blur", "fog"], rng())
