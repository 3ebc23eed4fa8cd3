"""The outline of a JSON document, found slice by slice without parsing it: nesting, counts, and where each image is.

orjson holds the GIL until it has parsed everything, and makes a Python object of every value. This scan costs the same
for every content, makes no objects, and NumPy releases the GIL, so that other threads run between two operations.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from qualms.web.bodies.limits import Limits
from qualms.web.problems import Kind, Problem

JSON_FORM = '{"images": [...]}, each image a base64 string of an image file or an array of pixels'
TYPE_NAMES: dict[type, str] = {
    dict: "an object",
    list: "an array",
    str: "a string",
    int: "a number",
    float: "a fractional or huge number",
    bool: "true or false",
    type(None): "null",
}
"""names of the types that the JSON parser returns, for error sentences"""

WHITESPACE = b" \t\n\r"
MAX_NODES = 2**20
"""arrays, objects and strings in a JSON body"""

_QUOTE, _COMMA, _COLON, _BRACKET, _BRACE = b'",:[{'
_STRUCTURAL = np.zeros(256, np.bool_)
_STRUCTURAL[list(b'"[]{}:,')] = True
_STEP = np.zeros(256, np.int8)
_STEP[list(b"[{")] = 1
_STEP[list(b"]}")] = -1
_TOKEN = b"+-.0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
"""bytes of numbers, true, false and null"""
_TOKEN_BYTES = 2**16
_OPENING: dict[bytes, type] = {b"{": dict, b"[": list, b'"': str}


@dataclass(slots=True)
class Structure:
    """Structural bytes outside strings. All but `keys` is found only in documents of several slices; -1 is none."""

    keys: int = 0
    """colons, at any depth"""
    root_separators: list[int] = field(default_factory=list)
    """positions of the first three commas and colons of the outer object"""
    array_start: int = -1
    array_end: int = -1
    """positions of the brackets of the first array or object within the outer object"""
    image_commas: list[int] = field(default_factory=list)
    """positions of the commas between images; one for each accepted image, which is enough to see that there are more"""
    end: int = -1
    """position of the bracket that closes the outer object"""


def scan(body: bytes, limits: Limits, slice_bytes: int) -> Structure:
    """Find the outline of a document; refuse one that is nested too deep or has too many values.

    The result is wrong after the first byte that is not valid JSON; parsing stops there, too.
    """
    result = Structure()
    depth = quotes = opened = commas = 0
    escaped = False
    for start in range(0, len(body), slice_bytes):
        piece, escaped = _without_escapes(body[start : start + slice_bytes], escaped)
        has_quotes = b'"' in piece
        if quotes % 2 and not has_quotes:
            continue
        data = np.frombuffer(piece, np.uint8)
        at = _STRUCTURAL[data].nonzero()[0]
        codes = data[at]
        if has_quotes:
            is_quote = codes == _QUOTE
            inside = np.logical_xor.accumulate(is_quote)
            outside = ~((~inside if quotes % 2 else inside) | is_quote)
            quotes += int(np.count_nonzero(is_quote))
            at, codes = at[outside], codes[outside]
        counts = np.bincount(codes, minlength=128)
        opened += int(counts[_BRACKET] + counts[_BRACE])
        commas += int(counts[_COMMA])
        result.keys += int(counts[_COLON])
        levels = _STEP[codes].cumsum(dtype=np.int32)
        if len(levels):
            levels += depth
            depth = int(levels[-1])
            _check_size(int(levels.max()), opened + quotes // 2, commas, limits)
            if len(body) > slice_bytes and result.end < 0:
                shallow = (levels <= 2).nonzero()[0]
                _add_outline(result, start + at[shallow], codes[shallow], levels[shallow], limits.images)
    return result


def _without_escapes(piece: bytes, escaped: bool) -> tuple[bytes, bool]:
    """Overwrite escaped backslashes and quotes; also return whether the first byte of the next piece is escaped."""
    if escaped:
        piece = b"_" + piece[1:]
    if b"\\" in piece:
        piece = piece.replace(rb"\\", b"__").replace(rb"\"", b"__")
    return piece, piece.endswith(b"\\")


def _check_size(depth: int, nodes: int, commas: int, limits: Limits) -> None:
    if depth > limits.json_depth:
        accepted = f"at most {limits.json_depth} levels"
        raise Problem.refused(Kind.MALFORMED, None, "The JSON body is nested too deep", accepted)
    if nodes > MAX_NODES:
        accepted = f"at most {MAX_NODES:,}; send image files instead of pixels"
        raise Problem.refused(Kind.TOO_LARGE, None, "The JSON body has too many arrays or strings", accepted)
    if commas >= limits.json_numbers:  # n numbers, however nested, are separated by n - 1 commas
        accepted = f"at most {limits.json_numbers:,}; send image files instead of pixels"
        raise Problem.refused(Kind.TOO_LARGE, None, "The JSON body has too many numbers", accepted)


def _add_outline(
    result: Structure, at: NDArray[np.intp], codes: NDArray[np.uint8], levels: NDArray[np.int32], max_images: int
) -> None:
    """Add the structural bytes of one slice that are at most two levels deep."""
    steps = _STEP[codes]
    separators = (levels == 1) & (steps == 0)
    result.root_separators += at[separators][: 3 - len(result.root_separators)].tolist()
    commas = at[(levels == 2) & (codes == _COMMA)]
    result.image_commas += commas[: max_images - len(result.image_commas)].tolist()
    if result.array_start < 0:
        result.array_start = _first(at[(levels == 2) & (steps > 0)])
    if result.array_end < 0:
        result.array_end = _first(at[(levels == 1) & (steps < 0)])
    result.end = _first(at[(levels == 0) & (steps < 0)])


def _first(positions: NDArray[np.intp]) -> int:
    return int(positions[0]) if len(positions) else -1


def skip_whitespace(body: bytes, start: int, end: int, slice_bytes: int) -> int:
    """The position of the first byte from `start` on that is not whitespace, or `end`."""
    while start < end:
        piece = body[start : min(start + slice_bytes, end)]
        rest = len(piece.lstrip(WHITESPACE))
        start += len(piece) - rest
        if rest:
            break
    return start


def strip_end(body: bytes, start: int, end: int, strip: bytes, slice_bytes: int) -> int:
    """The end of `body[start:end]` without the trailing bytes that are in `strip`."""
    while end > start:
        first = max(start, end - slice_bytes)
        kept = len(body[first:end].rstrip(strip))
        end = first + kept
        if kept:
            break
    return end


def not_json(position: int) -> Problem:
    """400: the document is not valid JSON."""
    return Problem.refused(
        Kind.MALFORMED, None, f"The body is not JSON (unexpected content at byte {position})", JSON_FORM
    )


def scalar_at(body: bytes, position: int, end: int) -> tuple[Any, int]:
    """The number, true, false or null that contains the byte at `position`, and where it ends."""
    before = body[max(0, position - _TOKEN_BYTES) : position]
    after = body[position : min(position + _TOKEN_BYTES, end)]
    start = position - (len(before) - len(before.rstrip(_TOKEN)))
    stop = position + (len(after) - len(after.lstrip(_TOKEN)))
    try:
        return orjson.loads(body[start:stop] if stop > position else b""), stop
    except orjson.JSONDecodeError:
        raise not_json(position) from None


def type_at(body: bytes, position: int, end: int) -> type:
    """The Python type of the JSON value that begins at `position`; the rest of an array or object is not checked."""
    opening = _OPENING.get(body[position : position + 1])
    return opening or type(scalar_at(body, position, end)[0])
