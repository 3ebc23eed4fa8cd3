"""Images for benchmark requests, drawn by our own code and identical in every run.

`qualms.demo.digits` draws realistic digits of 28 × 28 grey pixels only; the simpler drawing of this module fits the
input of any model, and the published figures depend on its exact pixels.
"""

import io
import random
from typing import Literal

import numpy as np
from PIL import Image, ImageDraw

from qualms.bench.load.photographs import PhotoKind, draw_photographs
from qualms.images.input_spec import InputSpec

_OVERSAMPLING = 4
_CORNERS = ((0.3, 0.15), (0.7, 0.15), (0.7, 0.5), (0.7, 0.85), (0.3, 0.85), (0.3, 0.5))
_SEGMENTS = ((0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5, 0), (5, 2))
"""the seven segments of a calculator digit, each a pair of corners"""
_DIGITS = ("012345", "12", "01643", "01623", "1562", "05623", "056234", "012", "0123456", "015623")
"""the segments of each digit"""

_COLOUR_SIDE = 32
_COLOUR_NOISE = 13.0
"""standard deviation of the pixel noise; files of photographs of this size are as large, about 2.6 kB"""

SmallPictures = Literal["digits", "colour"]
"""`digits`: digits in the model's size and colour. `colour`: photo-like 32 × 32 RGB images, whatever the model."""
Pictures = Literal[SmallPictures, PhotoKind]
"""small PNG files, or JPEG files of photographs"""


def sample_files(pictures: Pictures, spec: InputSpec) -> list[bytes]:
    """The files that a benchmark sends to a model with this input."""
    if pictures == "digits":
        return draw_pngs(spec)
    return draw_colour_pngs() if pictures == "colour" else draw_photographs(pictures)


def draw_colour_pngs(count: int = 16, seed: int = 0) -> list[bytes]:
    """`count` different 32 × 32 RGB PNG files of noisy colour gradients."""
    rng = np.random.default_rng(seed)
    files = []
    for _ in range(count):
        corners = Image.fromarray(rng.integers(0, 256, (4, 4, 3), np.uint8))
        gradient = np.asarray(corners.resize((_COLOUR_SIDE, _COLOUR_SIDE), Image.Resampling.BICUBIC), np.float64)
        noisy = gradient + rng.normal(0.0, _COLOUR_NOISE, gradient.shape)
        file = io.BytesIO()
        Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(file, "PNG")
        files.append(file.getvalue())
    return files


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
