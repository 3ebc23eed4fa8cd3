import numpy as np
import pytest

from qualms.bundle import golden
from qualms.images.input_spec import InputSpec

GREY = InputSpec(height=28, width=28, colour="L")
COLOUR = InputSpec(height=32, width=48)


@pytest.mark.parametrize(
    ("spec", "digest"),
    [
        (GREY, "1e24c02c42243dc9a44ad34e96f77804d0fa03b97b13a649c5fc34144c0e770b"),
        (COLOUR, "5c22f2646c97e4f7d178606780d90f66fe3a45c6e2620ee343ce9e6e26103cbd"),
    ],
)
def test_the_golden_inputs_never_change(spec: InputSpec, digest: str) -> None:
    """Every existing bundle stores this digest, so a change of the images would make all of them unusable."""
    assert golden.digest(golden.draw(spec)) == digest


@pytest.mark.parametrize("spec", [GREY, COLOUR, InputSpec(height=6, width=5)])
def test_images_are_distinct_uint8_arrays_of_the_input_shape(spec: InputSpec) -> None:
    images = golden.draw(spec)
    assert images.dtype == np.uint8
    assert images.shape == (golden.COUNT, *spec.shape)
    assert len({image.tobytes() for image in images}) == golden.COUNT


def test_a_smaller_count_gives_the_first_images() -> None:
    np.testing.assert_array_equal(golden.draw(GREY, 3), golden.draw(GREY, 8)[:3])


def test_the_images_contain_every_pixel_value() -> None:
    assert np.unique(golden.draw(COLOUR)).tolist() == list(range(256))


def test_the_digest_depends_on_pixels_and_shape() -> None:
    images = golden.draw(GREY)
    changed = images.copy()
    changed[3, 2, 1, 0] ^= 1
    digests = {golden.digest(images), golden.digest(changed), golden.digest(images.reshape(8, 14, 56, 1))}
    assert len(digests) == 3


def test_the_hash_of_the_largest_index_does_not_overflow() -> None:
    """Only the hash is tested, because drawing the largest input would take gigabytes of memory."""
    last = 4096 * 4096 * 3 * 64 - 1
    mixed = (last * 2654435761 + 104729) % (1 << 32)
    mixed = (mixed ^ mixed >> 15) * 73244475 % (1 << 32) >> 13
    assert golden._hash(np.array([last])).tolist() == [mixed]
