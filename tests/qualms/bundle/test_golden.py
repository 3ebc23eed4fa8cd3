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
def test_the_drawing_never_changes(spec: InputSpec, digest: str) -> None:
    """Every bundle ever written holds this digest: whoever changes the drawing makes them all unreadable."""
    assert golden.digest(golden.draw(spec)) == digest


@pytest.mark.parametrize("spec", [GREY, COLOUR, InputSpec(height=6, width=5)])
def test_images_are_bytes_of_the_models_shape_and_differ(spec: InputSpec) -> None:
    images = golden.draw(spec)
    assert images.dtype == np.uint8
    assert images.shape == (golden.COUNT, *spec.shape)
    assert len({image.tobytes() for image in images}) == golden.COUNT


def test_fewer_images_are_the_first_of_more() -> None:
    np.testing.assert_array_equal(golden.draw(GREY, 3), golden.draw(GREY, 8)[:3])


def test_they_reach_from_black_to_white_with_everything_between() -> None:
    assert np.unique(golden.draw(COLOUR)).tolist() == list(range(256))


def test_the_digest_sees_pixels_and_shape() -> None:
    images = golden.draw(GREY)
    changed = images.copy()
    changed[3, 2, 1, 0] ^= 1
    found = {golden.digest(images), golden.digest(changed), golden.digest(images.reshape(8, 14, 56, 1))}
    assert len(found) == 3


def test_the_largest_input_does_not_overflow() -> None:
    """Drawn whole it would take gigabytes: what grows with the size is the index that is hashed."""
    last = 4096 * 4096 * 3 * 64 - 1
    mixed = (last * 2654435761 + 104729) % (1 << 32)
    mixed = (mixed ^ mixed >> 15) * 73244475 % (1 << 32) >> 13
    assert golden._hash(np.array([last])).tolist() == [mixed]
