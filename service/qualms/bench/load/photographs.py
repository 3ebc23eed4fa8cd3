"""JPEG files that cost as much to decode as photographs, drawn by our own code and identical in every run.

Light and shade, shapes with edges, texture at several scales and the noise of a sensor are added up as luma, over slowly
varying colour. Files are as large as photographs of the same number of pixels from cameras and web sites.
"""

import io
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

PhotoKind = Literal["photo-224", "photo-640", "photo-12mp"]

_QUALITY = 88
_SUBSAMPLING = 2
"""Pillow's number for 4:2:0: chroma has half the width and height, as in nearly all photographs"""
_SHADE = (4, 45.0)
"""cells across the width and standard deviation of large areas of light and shade"""
_COLOUR = (6, 15.0)
_SHAPES = 24
_FLIPS = (None, Image.Transpose.FLIP_LEFT_RIGHT, Image.Transpose.FLIP_TOP_BOTTOM, Image.Transpose.ROTATE_180)
"""each drawing gives as many files, because drawing 12 MP takes longer than encoding them"""


@dataclass(frozen=True)
class _Photograph:
    """The size of one kind of photograph, and what determines the size of its files."""

    width: int
    height: int
    drawings: int
    texture: tuple[tuple[int, float], ...]
    """cells across the width and standard deviation, for each scale"""
    noise: float
    """standard deviation of the noise of each pixel"""


_PHOTOGRAPHS: dict[PhotoKind, _Photograph] = {
    "photo-224": _Photograph(224, 224, 4, ((16, 20.0), (56, 10.0)), 6.0),
    "photo-640": _Photograph(640, 480, 4, ((20, 20.0), (80, 12.0), (240, 8.0)), 6.0),
    "photo-12mp": _Photograph(4000, 3000, 1, ((30, 20.0), (200, 10.0), (1000, 8.0)), 6.0),
}


def draw_photographs(kind: PhotoKind, seed: int = 0) -> list[bytes]:
    """Different JPEG files of one kind: 16 of the small ones, 4 of 12 megapixels."""
    photograph, rng = _PHOTOGRAPHS[kind], np.random.default_rng(seed)
    files = []
    for _ in range(photograph.drawings):
        image = _draw(photograph, rng)
        for flip in _FLIPS:
            file = io.BytesIO()
            flipped = image if flip is None else image.transpose(flip)
            flipped.save(file, "JPEG", quality=_QUALITY, subsampling=_SUBSAMPLING)
            files.append(file.getvalue())
    return files


def _draw(photograph: _Photograph, rng: np.random.Generator) -> Image.Image:
    width, height = photograph.width, photograph.height
    luma = photograph.noise * rng.standard_normal((height, width), np.float32)
    for cells, deviation in (_SHADE, *photograph.texture):
        luma += _smooth(cells, deviation, width, height, rng)
    for _ in range(_SHAPES):
        _add_disc(luma, rng)
    chroma = [_smooth(*_COLOUR, width, height, rng) for _ in range(2)]
    planes = [Image.fromarray((128 + plane).clip(0, 255).astype(np.uint8)) for plane in (luma, *chroma)]
    return Image.merge("YCbCr", planes)


def _smooth(cells: int, deviation: float, width: int, height: int, rng: np.random.Generator) -> NDArray[np.float32]:
    """Random values on a grid, interpolated, (height, width)."""
    grid = rng.normal(0.0, deviation, (cells * height // width + 2, cells + 1)).astype(np.float32)
    return np.asarray(Image.fromarray(grid).resize((width, height), Image.Resampling.BILINEAR))


def _add_disc(luma: NDArray[np.float32], rng: np.random.Generator) -> None:
    """Make a disc of random place and size lighter or darker; its border is a sharp edge."""
    height, width = luma.shape
    x, y, radius = rng.uniform(0, width), rng.uniform(0, height), width * rng.uniform(0.03, 0.25)
    columns = np.arange(max(0, int(x - radius)), min(width, int(x + radius)), dtype=np.float32)
    rows = np.arange(max(0, int(y - radius)), min(height, int(y + radius)), dtype=np.float32)
    inside = (columns - np.float32(x)) ** 2 + (rows[:, np.newaxis] - np.float32(y)) ** 2 < radius**2
    part = luma[int(rows[0]) : int(rows[-1]) + 1, int(columns[0]) : int(columns[-1]) + 1]
    part += np.float32(rng.normal(0.0, 30.0)) * inside
