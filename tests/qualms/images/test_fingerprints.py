import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from qualms.images.fingerprints import fingerprints
from qualms.images.input_spec import InputSpec
from qualms.images.preprocess import preprocess


@pytest.fixture
def images() -> NDArray[np.uint8]:
    return np.random.default_rng(0).integers(0, 256, (20, 4, 3, 3), np.uint8)


def test_a_fingerprint_is_the_start_of_the_sha256_of_the_pixels(images: NDArray[np.uint8]) -> None:
    result = fingerprints(images)
    assert result.dtype == np.uint64
    assert result.shape == (20,)
    for image, fingerprint in zip(images, result.tolist(), strict=True):
        assert fingerprint.to_bytes(8, "little") == hashlib.sha256(image.tobytes()).digest()[:8]


def test_different_images_have_different_fingerprints(images: NDArray[np.uint8]) -> None:
    changed = images.copy()
    changed[:, 0, 0, 0] ^= 1
    assert len({*fingerprints(images).tolist(), *fingerprints(changed).tolist()}) == 40


def test_the_memory_layout_does_not_matter(images: NDArray[np.uint8]) -> None:
    strided = np.ascontiguousarray(images.transpose(3, 2, 1, 0)).transpose(3, 2, 1, 0)
    assert not strided[0].flags.c_contiguous
    np.testing.assert_array_equal(fingerprints(strided), fingerprints(images))


@pytest.mark.parametrize(("kind", "equal"), [("PNG", True), ("BMP", True), ("TIFF", True), ("JPEG", False)])
def test_files_with_the_same_pixels_have_the_same_fingerprint(
    images: NDArray[np.uint8], encode: Callable[..., bytes], kind: str, equal: bool
) -> None:
    options: dict[str, Any] = {"quality": 90} if kind == "JPEG" else {}
    decoded = preprocess(encode(images[0], kind, **options), InputSpec(height=4, width=3))
    assert (fingerprints(decoded[np.newaxis])[0] == fingerprints(images)[0]) == equal


def test_no_images_have_no_fingerprints() -> None:
    result = fingerprints(np.empty((0, 4, 3, 3), np.uint8))
    assert result.dtype == np.uint64
    assert result.shape == (0,)
