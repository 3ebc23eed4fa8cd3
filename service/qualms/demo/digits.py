"""Handwritten-looking digits, drawn: strokes with a shaky hand, framed as MNIST frames its own.

White on black, 28 × 28, the longer side of the digit 20 pixels, the centre of mass in the middle. They are not
MNIST; a model that knows MNIST reads them well, but its calibration is not theirs (see `service/models/demo.onnx`).
"""

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

SIZE = 28
_BOX = 20.0
"""pixels that the longer side of a digit fills"""
_OVERSAMPLED = 8
_STEPS = 8
"""line segments from one control point to the next"""

Points = NDArray[np.float64]

# Strokes as control points of smooth curves, x to the right and y downwards in a unit square; several forms a digit.
# A point that is given twice is a corner.
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
    """One digit as grey pixels (28, 28)."""
    forms = _FORMS[digit]
    strokes = [_curve(points) for points in _strokes(forms[rng.integers(len(forms))], rng)]
    width = rng.uniform(1.9, 3.2)
    everything = np.concatenate(strokes)
    low, high = everything.min(axis=0), everything.max(axis=0)
    scale = (_BOX - width) / (high - low).max()
    strokes = [(points - (low + high) / 2) * scale + SIZE / 2 for points in strokes]
    return _centred(_ink(strokes, width, int(rng.integers(225, 256))))


def draw_many(count: int, seed: int) -> Iterator[tuple[int, NDArray[np.uint8]]]:
    """`count` digits with their pixels, each class as often as the others, the same for the same seed."""
    rng = np.random.default_rng(seed)
    for index in range(count):
        yield index % 10, draw(index % 10, rng)


def _strokes(form: str, rng: np.random.Generator) -> list[Points]:
    """Control points, each a little beside its place, then the whole leaning, turned and stretched."""
    turn, lean = rng.normal(0, 0.1), rng.normal(0.08, 0.16)
    matrix = np.array([[math.cos(turn), -math.sin(turn)], [math.sin(turn), math.cos(turn)]])
    matrix = matrix @ np.array([[1.0, -lean], [0.0, 1.0]]) @ np.diag([rng.uniform(0.62, 0.86), 1.0])
    found = []
    for stroke in form.split("|"):
        points = np.array([[float(value) for value in pair.split(",")] for pair in stroke.split()]) / 100
        shaken = points + rng.normal(0, 0.04, points.shape)
        for place in range(1, len(points)):  # a corner stays one
            if (points[place] == points[place - 1]).all():
                shaken[place] = shaken[place - 1]
        found.append(shaken @ matrix.T)
    return found


def _curve(points: Points) -> Points:
    """A Catmull–Rom spline through the points; a doubled point breaks it into two."""
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


def _ink(strokes: list[Points], width: float, grey: int) -> NDArray[np.uint8]:
    """The strokes on a large canvas (28 · 8, 28 · 8), with round ends."""
    canvas = Image.new("L", (SIZE * _OVERSAMPLED, SIZE * _OVERSAMPLED))
    pen = ImageDraw.Draw(canvas)
    radius = width * _OVERSAMPLED / 2
    for stroke in strokes:
        places = [(float(x), float(y)) for x, y in stroke * _OVERSAMPLED]
        pen.line(places, grey, round(2 * radius))
        for x, y in places:
            pen.ellipse((x - radius, y - radius, x + radius, y + radius), grey)
    return np.asarray(canvas)


def _centred(canvas: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Move the centre of mass to the middle, as far as the ink stays on the canvas, then make it small."""
    shifts = []
    for axis in (1, 0):
        ink = canvas.sum(axis=axis, dtype=np.float64)
        places = np.arange(len(ink))
        marked = np.flatnonzero(ink)
        wanted = round((len(ink) - 1) / 2 - float(ink @ places / ink.sum()))
        shifts.append(int(np.clip(wanted, -marked[0], len(ink) - 1 - marked[-1])))
    moved = Image.fromarray(np.roll(canvas, shifts, axis=(0, 1)))
    return np.asarray(moved.resize((SIZE, SIZE), Image.Resampling.BOX))
