"""Pictures to send: digits drawn by our own code, the same on every run, in the size and colour a model takes."""

import io
import random

from PIL import Image, ImageDraw

from qualms.images.input_spec import InputSpec

COUNT = 16
"""different pictures, so that nothing on the way can profit from seeing the same bytes again"""

_OVERSAMPLED = 4
_CORNERS = ((0.3, 0.15), (0.7, 0.15), (0.7, 0.5), (0.7, 0.85), (0.3, 0.85), (0.3, 0.5))
_BARS = ((0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5, 0), (5, 2))
"""the seven bars of a digit, as on a pocket calculator, from corner to corner"""
_DIGITS = ("012345", "12", "01643", "01623", "1562", "05623", "056234", "012", "0123456", "015623")
"""the bars that each digit is made of"""


def draw(spec: InputSpec, count: int = COUNT, seed: int = 0) -> list[bytes]:
    """`count` PNG files of hand-shaken digits, light on dark."""
    rng = random.Random(seed)
    return [_png(index % len(_DIGITS), spec, rng) for index in range(count)]


def _png(digit: int, spec: InputSpec, rng: random.Random) -> bytes:
    width, height = _OVERSAMPLED * spec.width, _OVERSAMPLED * spec.height
    picture = Image.new(spec.colour, (width, height))
    ink = tuple(rng.randrange(180, 256) for _ in range(spec.channels))
    corners = [(width * (x + rng.gauss(0, 0.03)), height * (y + rng.gauss(0, 0.03))) for x, y in _CORNERS]
    pen = ImageDraw.Draw(picture)
    for bar in _DIGITS[digit]:
        start, end = _BARS[int(bar)]
        pen.line((corners[start], corners[end]), ink, max(1, width // 10))
    file = io.BytesIO()
    picture.resize((spec.width, spec.height), Image.Resampling.BOX).save(file, "PNG")
    return file.getvalue()
