"""Drawn digits that look handwritten: smooth strokes with random perturbations, in the format of MNIST.

They are white on black, 28 × 28 pixels; the longer side of a digit is 20 pixels, and its centre of mass is in the
middle. A model trained on MNIST classifies them well, but it needs a calibration of its own: the embedded model `demo`.
"""

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from qualms.errors import DataError

SIZE = 28
_BOX = 20.0
"""length in pixels of a digit's longer side"""
_OVERSAMPLING = 8
_STEPS = 8
"""line segments between two control points"""

Points = NDArray[np.float64]

# One or more forms per digit. Each stroke is a list of control points of a smooth curve, in percent of a unit square with
# x to the right and y downwards; "|" separates strokes. A repeated point is a corner.
_FORMS: tuple[tuple[str, ...], ...] = (
    ("50,2 22,20 14,50 24,82 50,98 76,82 86,50 78,20 50,2",),
    ("52,0 50,50 48,100", "66,0 50,50 34,100"),
    (
        "18,24 34,4 62,4 78,24 68,48 42,74 16,96 16,96 50,94 86,96",
        "16,20 40,2 70,10 72,36 46,68 22,88 14,94 28,82 46,90 88,92",
    ),
    ("18,10 46,0 74,12 72,34 42,46 42,46 78,58 82,82 54,100 16,90",),
    ("28,4 22,32 18,54 18,54 52,54 84,52|70,24 68,60 64,100", "24,2 16,50 16,50 82,50|76,2 72,50 66,100"),
    ("82,4 34,4 34,4 28,42 28,42 60,38 82,60 74,88 44,100 16,90",),
    ("66,0 38,22 22,56 26,86 50,100 74,86 72,62 50,54 28,70", "56,0 34,34 22,66 34,96 62,96 76,76 60,58 32,68"),
    ("14,6 50,6 84,4 84,4 66,44 50,72 42,100", "14,12 14,4 14,4 50,6 86,2 86,2 70,36 54,66 48,100"),
    ("70,14 46,2 26,18 38,40 62,56 76,80 50,100 24,82 38,58 62,40 72,16",),
    (
        "74,22 54,4 28,14 24,36 46,50 70,38 76,16 76,16 72,50 64,76 56,100",
        "76,20 50,2 24,22 36,46 62,42 76,18 74,52 66,98",
    ),
)


def draw(digit: int, rng: np.random.Generator) -> NDArray[np.uint8]:
    """Draw one digit; grey values (28, 28)."""
    forms = _FORMS[digit]
    strokes = [_curve(points) for points in _strokes(forms[rng.integers(len(forms))], rng)]
    width = rng.uniform(1.9, 3.2)
    points = np.concatenate(strokes)
    low, high = points.min(axis=0), points.max(axis=0)
    scale = (_BOX - width) / (high - low).max()
    strokes = [(stroke - (low + high) / 2) * scale + SIZE / 2 for stroke in strokes]
    return _centre(_render(strokes, width, int(rng.integers(225, 256))))


def draw_many(count: int, seed: int) -> Iterator[tuple[int, NDArray[np.uint8]]]:
    """`count` pairs of class and image (28, 28); the classes take turns, and equal seeds give equal images."""
    rng = np.random.default_rng(seed)
    for index in range(count):
        yield index % 10, draw(index % 10, rng)


def write_folder(out: Path, count: int, seed: int) -> None:
    """Write `count` digits as OUT/CLASS/NUMBER.png; OUT must be empty or not exist."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise DataError(f"{out} already exists; it should be an empty folder or a path that does not exist.")
    for digit in range(10):
        (out / str(digit)).mkdir(parents=True, exist_ok=True)
    for index, (digit, image) in enumerate(draw_many(count, seed)):
        Image.fromarray(image).save(out / str(digit) / f"{index:06}.png")


def _strokes(form: str, rng: np.random.Generator) -> list[Points]:
    """Control points of a form after random shifts, slant, rotation and stretching; one array (N, 2) per stroke."""
    angle, slant = rng.normal(0, 0.1), rng.normal(0.08, 0.16)
    matrix = np.array([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
    matrix = matrix @ np.array([[1.0, -slant], [0.0, 1.0]]) @ np.diag([rng.uniform(0.62, 0.86), 1.0])
    strokes = []
    for stroke in form.split("|"):
        points = np.array([[float(value) for value in pair.split(",")] for pair in stroke.split()]) / 100
        shifted = points + rng.normal(0, 0.04, points.shape)
        for index in range(1, len(points)):  # the two points of a corner stay equal
            if (points[index] == points[index - 1]).all():
                shifted[index] = shifted[index - 1]
        strokes.append(shifted @ matrix.T)
    return strokes


def _curve(points: Points) -> Points:
    """A Catmull–Rom spline through the points (N, 2); it is split at repeated points."""
    padded = np.concatenate((points[:1], points, points[-1:]))
    t = np.arange(_STEPS)[:, None] / _STEPS
    pieces = []
    for a, b, c, d in zip(padded, padded[1:], padded[2:], padded[3:], strict=False):
        if (b == c).all():
            continue
        start = b if (a == b).all() else a
        end = c if (d == c).all() else d
        pieces.append(
            0.5
            * (
                2 * b
                + (c - start) * t
                + (2 * start - 5 * b + 4 * c - end) * t**2
                + (3 * b - start - 3 * c + end) * t**3
            )
        )
    return np.concatenate((*pieces, points[-1:]))


def _render(strokes: list[Points], width: float, grey: int) -> NDArray[np.uint8]:
    """Draw the strokes with round ends on a canvas (28 · 8, 28 · 8)."""
    canvas = Image.new("L", (SIZE * _OVERSAMPLING, SIZE * _OVERSAMPLING))
    pen = ImageDraw.Draw(canvas)
    radius = width * _OVERSAMPLING / 2
    for stroke in strokes:
        points = [(float(x), float(y)) for x, y in stroke * _OVERSAMPLING]
        pen.line(points, grey, round(2 * radius))
        for x, y in points:
            pen.ellipse((x - radius, y - radius, x + radius, y + radius), grey)
    return np.asarray(canvas)


def _centre(canvas: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Move the centre of mass to the middle without moving ink off the canvas, then reduce to (28, 28)."""
    shifts = []
    for axis in (1, 0):
        ink = canvas.sum(axis=axis, dtype=np.float64)
        inked = np.flatnonzero(ink)
        shift = round((len(ink) - 1) / 2 - float(ink @ np.arange(len(ink)) / ink.sum()))
        shifts.append(int(np.clip(shift, -inked[0], len(ink) - 1 - inked[-1])))
    moved = Image.fromarray(np.roll(canvas, shifts, axis=(0, 1)))
    return np.asarray(moved.resize((SIZE, SIZE), Image.Resampling.BOX))
