"""Attacks by images that take long to decode."""

from qualms.bench.attacks.definition import Script, Wait, attack, post
from qualms.bench.attacks.payloads import (
    FORM,
    form_body,
    jpeg_12_megapixels,
    png_12_megapixels,
    progressive_jpeg,
    uniform_png,
)
from qualms.bench.load.sample_images import draw_colour_pngs


def _broken_png() -> bytes:
    """A PNG of 12 MP whose pixels end in the middle: it fails only after it was half decoded."""
    return png_12_megapixels()[:-1000]


def _many_images() -> bytes:
    return form_body(4 * draw_colour_pngs(16))


@attack("large-jpegs", "JPEGs of 12 MP at full rate", payload=jpeg_12_megapixels, connections=4)
@attack("large-pngs", "PNGs of 12 MP at full rate", payload=png_12_megapixels, connections=4)
@attack("broken-pngs", "truncated PNGs of 12 MP at full rate", payload=_broken_png, connections=4)
@attack("progressive-jpegs", "progressive JPEGs of 16 MP at full rate", payload=progressive_jpeg, connections=4)
@attack("uniform-pngs", "PNGs of 16 MP in a few kilobytes at full rate", payload=uniform_png, connections=16)
def repeated_image(picture: bytes) -> Script:
    """Post one image again and again."""
    request = post(picture)
    while True:
        yield request
        yield Wait.REPLY


@attack("many-images", "forms of 64 small images at full rate", payload=_many_images, connections=4)
def many_images(form: bytes) -> Script:
    """The largest number of images that is accepted."""
    request = post(form, FORM)
    while True:
        yield request
        yield Wait.REPLY
