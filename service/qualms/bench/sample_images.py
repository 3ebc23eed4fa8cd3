"""Images for benchmark requests: digits drawn by our own code, identical in every run, in the model's size and colour.

`qualms.demo.digits` draws realistic digits of 28 × 28 grey pixels only; this simpler drawing fits the input of any
model, and the published figures depend on its exact pixels.
"""

import io
import random

from PIL import Image, ImageDraw

from qualms.images.input_spec import InputSpec

_OVERSAMPLING = 4
_CORNERS = ((0.3, 0.15), (0.7, 0.15), (0.7, 0.5), (0.7, 0.85), (0.3, 0.85), (0.3, 0.5))
_SEGMENTS = ((0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5, 0), (5, 2))
"""the seven segments of a calculator digit, each a pair of corners"""
_DIGITS = ("012345", "12", "01643", "01623", "1562", "05623", "056234", "012", "0123456", "015623")
"""the segments of each digit"""


def draw_pngs(spec: InputSpec, count: int = 16, seed: int = 0) -> list[bytes]:
    """`count` different PNG files of digits, light on dark; they differ so that no cache can benefit from equal bytes."""
    rng = random.Random(seed)
    return [_png(index % len(_DIGITS), spec, rng) for index in range(count)]


def _png(digit: int, spec: InputSpec, rng: random.Random) -> bytes:
    width, height = _OVERSAMPLING * spec.width, _OVERSAMPLING * spec.height
    image = Image.new(spec.colour, (width, height))
    ink = tuple(rng.randrange(180, 256) for _ in range(spec.channels))
    corners = [(width * (x + rng.gauss(0, 0.03)), height * (y + rng.gauss(0, 0.03))) for x, y in _CORNERS]
    pen = ImageDraw.Draw(image)
    for segment in _DIGITS[digit]:
        start, end = _SEGMENTS[int(segment)]
        pen.line((corners[start], corners[end]), ink, max(1, width // 10))
    file = io.BytesIO()
    image.resize((spec.width, spec.height), Image.Resampling.BOX).save(file, "PNG")
    return file.getvalue()
