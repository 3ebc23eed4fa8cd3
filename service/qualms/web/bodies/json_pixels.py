"""An array of pixels in a JSON document, read slice by slice with NumPy instead of as one Python object per number."""

import re

import numpy as np
from numpy.typing import NDArray

from qualms.web.bodies.json_structure import TYPE_NAMES, not_json, scalar_at, type_at
from qualms.web.problems import Kind, Problem

PIXELS = "whole numbers from 0 to 255, as an array of shape H×W or H×W×C with C = 1, 3 or 4"

_SPACE, _NUMBER, _OPEN, _CLOSE, _COMMA, _OTHER = range(6)
_KIND = np.full(256, _OTHER, np.uint8)
_KIND[list(b" \t\n\r")] = _SPACE
_KIND[list(b"0123456789")] = _NUMBER
_KIND[list(b"[],")] = _OPEN, _CLOSE, _COMMA
_STEP = np.array([0, 0, 1, -1, 0], np.int8)
_FOLLOWS = np.zeros((5, 5), np.bool_)
"""whether the second kind of token may follow the first; an array begins as if after a comma"""
_FOLLOWS[_COMMA, [_NUMBER, _OPEN]] = True
_FOLLOWS[_OPEN, [_NUMBER, _OPEN, _CLOSE]] = True
_FOLLOWS[[[_NUMBER], [_CLOSE]], [_COMMA, _CLOSE]] = True
_NEGATIVE_ZERO = re.compile(rb"-0(?![0-9.eE])")


class PixelArray:
    """Collects the pixels of one array; every slice must continue the same shape."""

    def __init__(self, body: bytes, field: str) -> None:
        self._body = body
        self._field = field
        self._values: list[NDArray[np.uint8]] = []
        self._previous = _COMMA
        self._depth = self._count = self._dimensions = 0
        self._sizes: dict[int, int] = {}
        self._closed_at: dict[int, int] = {}

    def read(self, start: int, end: int, slice_bytes: int) -> NDArray[np.uint8]:
        """The pixels of `body[start:end]`, which has balanced brackets and begins with one."""
        body = self._body
        while start < end:
            stop = last = min(start + slice_bytes, end)
            # A number is not divided; one that has more than 3 digits is refused without its end.
            while stop < min(last + 3, end) and body[stop] in b"0123456789" and body[stop - 1] in b"-0123456789":
                stop += 1
            self._add(start, stop)
            start = stop
        sizes = [self._sizes[level] for level in range(self._dimensions)]
        shape = [size // inner for size, inner in zip(sizes, [*sizes[1:], 1], strict=True)]
        if len(shape) not in (2, 3) or shape[2:] not in ([], [1], [3], [4]):
            raise wrong_shape(self._field, shape)
        return np.concatenate(self._values).reshape(shape)

    def _add(self, start: int, stop: int) -> None:
        piece = self._body[start:stop]
        if b"-" in piece:
            piece = _NEGATIVE_ZERO.sub(b" 0", piece)  # the only number with a sign that is a pixel
        codes = np.frombuffer(piece, np.uint8)
        kinds = _KIND[codes]
        if (other := kinds == _OTHER).any():
            raise self._not_a_pixel(start + int(other.argmax()))
        digits = kinds == _NUMBER
        begins = digits.copy()
        begins[1:] &= ~digits[:-1]
        self._add_tokens(start, kinds, begins | (kinds > _NUMBER))
        self._add_values(start, codes, digits, begins)

    def _add_tokens(self, start: int, kinds: NDArray[np.uint8], is_token: NDArray[np.bool_]) -> None:
        """Check that tokens are in a valid order, and that arrays at the same level have the same size."""
        tokens = kinds[is_token]
        if not len(tokens):
            return
        before = np.concatenate([np.array([self._previous], np.uint8), tokens[:-1]])
        if not (valid := _FOLLOWS.take(5 * before + tokens)).all():
            raise not_json(start + int(np.flatnonzero(is_token)[valid.argmin()]))
        closes, numbers = tokens == _CLOSE, tokens == _NUMBER
        if (closes & (before == _OPEN)).any():
            raise Problem.refused(Kind.WRONG_SHAPE, self._field, f"{self._field} holds an empty array", PIXELS)
        levels = self._depth + np.cumsum(_STEP[tokens], dtype=np.int32)
        if len(number_levels := levels[numbers]):
            self._dimensions = self._dimensions or int(number_levels[0])
            if (number_levels != self._dimensions).any():
                raise self._holds("an array")
        counts = self._count + np.cumsum(numbers)
        self._previous, self._depth, self._count = int(tokens[-1]), int(levels[-1]), int(counts[-1])
        closed_levels, closed_counts = levels[closes], counts[closes]
        for level in range(self._dimensions):
            self._add_rows(level, closed_counts[closed_levels == level])

    def _add_rows(self, level: int, counts: NDArray[np.intp]) -> None:
        """Check the arrays that end at `level`; `counts` is the number of pixels before the end of each."""
        if not len(counts):
            return
        sizes = np.diff(counts, prepend=self._closed_at.get(level, 0))
        self._closed_at[level] = int(counts[-1])
        if (sizes != self._sizes.setdefault(level, int(sizes[0]))).any():
            raise rows_differ(self._field)

    def _add_values(
        self, start: int, codes: NDArray[np.uint8], digits: NDArray[np.bool_], begins: NDArray[np.bool_]
    ) -> None:
        """Add the value of each number, from its last digit and the two bytes before."""
        follows = digits & ~begins
        zero = begins[:-1] & follows[1:] & (codes[:-1] == ord("0"))
        if zero.any():
            raise self._not_a_pixel(start + int(zero.argmax()))
        long = follows[3:] & follows[2:-1] & follows[1:-2]
        if long.any():
            raise self._not_a_pixel(start + int(long.argmax()))
        values = ((codes - ord("0")) * digits).astype(np.uint16)
        tens = 10 * values[:-1] * follows[1:]
        hundreds = 100 * values[:-2] * (follows[1:-1] & follows[2:])
        values[1:] += tens
        values[2:] += hundreds
        ends = digits.copy()
        ends[:-1] &= ~digits[1:]
        pixels = values[ends]
        if pixels.max(initial=0) > 255:
            raise outside_range(self._field, f"the pixel {pixels[pixels > 255][0]}")
        self._values.append(pixels.astype(np.uint8))

    def _not_a_pixel(self, position: int) -> Problem:
        """The problem with the value at this position."""
        end = len(self._body)
        if self._body[position] in b'{"':
            return self._holds(TYPE_NAMES[type_at(self._body, position, end)])
        value, _ = scalar_at(self._body, position, end)
        if type(value) is int:
            return outside_range(self._field, f"the pixel {value}")
        return self._holds(TYPE_NAMES[type(value)])

    def _holds(self, what: str) -> Problem:
        return not_pixels(self._field, what)


def rows_differ(field: str) -> Problem:
    """422: the array has no shape."""
    return Problem.refused(Kind.WRONG_SHAPE, field, f"{field} has rows of different lengths", PIXELS)


def wrong_shape(field: str, shape: list[int]) -> Problem:
    """422: the array has a shape that no image has."""
    return Problem.refused(Kind.WRONG_SHAPE, field, f"{field} has the shape {'×'.join(map(str, shape))}", PIXELS)


def not_pixels(field: str, what: str) -> Problem:
    """422: the array holds other things than numbers."""
    return Problem.refused(Kind.INVALID, field, f"{field} holds {what} among its pixels", PIXELS)


def outside_range(field: str, what: str) -> Problem:
    """422: the array holds numbers that are not pixels."""
    return Problem.refused(Kind.INVALID, field, f"{field} has {what}", PIXELS)
