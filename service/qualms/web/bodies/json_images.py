"""Images in a JSON body: base64 strings of image files, or arrays of pixels.

orjson parses small bodies. It holds the GIL until it is done, so a large body is parsed slice by slice, which never holds
the GIL for much more than a millisecond, and makes no Python object for a number.

Both give the same images and refuse the same documents with the same status, with three exceptions. A large document that
is not valid JSON may be refused for a fault before the invalid byte. Repeated keys are refused before their values. The
part of a data: URL before its comma has at most 64 kB, escape sequences included.
"""

import base64
import re
from collections.abc import Callable
from itertools import chain, pairwise
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from qualms.images.preprocess import ImageInput
from qualms.web.bodies.json_pixels import PixelArray, not_pixels, outside_range, rows_differ, wrong_shape
from qualms.web.bodies.json_structure import (
    JSON_FORM,
    TYPE_NAMES,
    WHITESPACE,
    Structure,
    not_json,
    scalar_at,
    scan,
    skip_whitespace,
    strip_end,
    type_at,
)
from qualms.web.bodies.limits import Limits, too_many_images
from qualms.web.problems import Kind, Problem, quoted

SLICE_BYTES = 2**16
_KEY_BYTES = 2**10
"""of a longer key only the beginning is decoded, for the error sentence"""
_WHOLE_ESCAPES = re.compile(rb"(?:[^\\]++|\\u[0-9a-fA-F]{4}|\\[^u])*+")
"""matches up to an escape sequence that is invalid or cut off"""
_BASE64 = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/="


def parse_json(body: bytes, limits: Limits, slice_bytes: int = SLICE_BYTES) -> list[ImageInput]:
    """The images of a JSON body, in order. Bodies of more than `slice_bytes` are parsed in slices of that size."""
    structure = scan(body, limits, slice_bytes)
    if len(body) <= slice_bytes:
        return _parse_whole(body, structure.keys, limits)
    return [
        _read_image(body, start, end, f"images[{index}]", slice_bytes)
        for index, (start, end) in enumerate(_find_images(body, structure, limits, slice_bytes))
    ]


# Small bodies


def _parse_whole(body: bytes, keys: int, limits: Limits) -> list[ImageInput]:
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise Problem.refused(Kind.MALFORMED, None, f"The body is not JSON ({error})", JSON_FORM) from None
    if type(document) is not dict:
        raise _wrong_root(type(document))
    for key in document:
        if key != "images":
            raise _unknown_key(key)
    values = document.get("images")
    if type(values) is not list or not values:
        raise _no_images("empty" if values == [] else TYPE_NAMES[type(values)] if document else "missing")
    if len(values) > limits.images:
        raise too_many_images(limits)
    images = [_convert_image(value, f"images[{index}]") for index, value in enumerate(values)]
    if keys > 1:  # images contain no objects, so the other key was a second "images"
        raise _repeated_key()
    return images


def _convert_image(value: object, field: str) -> ImageInput:
    if type(value) is str:
        text = value.encode()
        return _from_base64(text, _base64_start(text, 0, len(text), field), len(text), field, SLICE_BYTES)
    if type(value) is list:
        return _from_lists(value, field)
    raise _wrong_image(type(value), field)


def _from_lists(values: list[Any], field: str) -> NDArray[np.uint8]:
    """Flatten an array level by level; each level must hold arrays of one length, the last one integers."""
    shape = [len(values)]
    while (kinds := set(map(type, values))) == {list}:
        lengths = set(map(len, values))
        if len(lengths) > 1:
            raise rows_differ(field)
        shape.append(lengths.pop())
        values = list(chain.from_iterable(values))
    if kinds - {int}:
        raise not_pixels(field, " and ".join(sorted(TYPE_NAMES[kind] for kind in kinds - {int})))
    if not values or len(shape) not in (2, 3) or shape[2:] not in ([], [1], [3], [4]):
        raise wrong_shape(field, shape)
    try:
        return np.frombuffer(bytes(values), np.uint8).reshape(shape)
    except ValueError:
        raise outside_range(field, f"pixels from {min(values)} to {max(values)}") from None


# Large bodies


def _find_images(body: bytes, structure: Structure, limits: Limits, slice_bytes: int) -> list[tuple[int, int]]:
    """Where each image begins and ends, without whitespace around it, in a document {"images": [...]}."""

    def skip(start: int, end: int) -> int:
        return skip_whitespace(body, start, end, slice_bytes)

    def strip(start: int, end: int) -> int:
        return strip_end(body, start, end, WHITESPACE, slice_bytes)

    size = len(body)
    root = skip(0, size)
    root_type = type_at(body, root, size)
    if root_type is not dict:
        raise _wrong_root(root_type)
    if structure.end < 0 or body[structure.end] != ord("}"):
        raise not_json(size)
    if (trailing := skip(structure.end + 1, size)) < size:
        raise not_json(trailing)
    _check_keys(body, root, structure, skip, strip)
    value = skip(structure.root_separators[0] + 1, structure.end)
    start, end = structure.array_start, structure.array_end
    if (value_type := type_at(body, value, size)) is not list:
        raise _no_images(TYPE_NAMES[value_type])
    if value != start or body[end] != ord("]") or skip(end + 1, structure.end) != structure.end:
        raise not_json(end)
    if not structure.image_commas and skip(start + 1, end) == end:
        raise _no_images("empty")
    if len(structure.image_commas) >= limits.images:
        raise too_many_images(limits)
    edges = [start, *structure.image_commas, end]
    spans = []
    for before, after in pairwise(edges):
        first = skip(before + 1, after)
        spans.append((first, strip(first, after)))
    return spans


def _check_keys(
    body: bytes, root: int, structure: Structure, skip: Callable[[int, int], int], strip: Callable[[int, int], int]
) -> None:
    """Refuse any other keys of the outer object than one "images"."""

    def check_key(before: int, colon: int) -> None:
        start = skip(before + 1, colon)
        if body[colon] != ord(":"):
            raise not_json(colon)
        key = _key(body, start, strip(start, colon))
        if key != "images":
            raise _unknown_key(key)

    separators = structure.root_separators
    if not separators:
        content = skip(root + 1, structure.end)
        raise _no_images("missing") if content == structure.end else not_json(content)
    check_key(root, separators[0])
    if len(separators) > 1:
        if body[separators[1]] != ord(",") or len(separators) == 2:
            raise not_json(separators[1])
        check_key(separators[1], separators[2])
        raise _repeated_key()


def _key(body: bytes, start: int, end: int) -> str:
    text = body[start:end] if end - start <= _KEY_BYTES else _beginning(body[start : start + _KEY_BYTES])
    try:
        key = orjson.loads(text)
    except orjson.JSONDecodeError:
        raise not_json(start) from None
    if type(key) is not str:
        raise not_json(start)
    return key


def _beginning(text: bytes) -> bytes:
    """The beginning of a JSON string as a JSON string."""
    whole = _WHOLE_ESCAPES.match(text)
    assert whole is not None
    return whole[0].decode("utf-8", "ignore").encode() + b'"'


def _read_image(body: bytes, start: int, end: int, field: str, slice_bytes: int) -> ImageInput:
    opening = body[start : min(start + 1, end)]
    if opening == b"[":
        return PixelArray(body, field).read(start, end, slice_bytes)
    if opening == b'"':
        if end - start < 2 or body[end - 1] != ord('"'):
            raise not_json(end)
        return _read_string(body, start + 1, end - 1, field, slice_bytes)
    if opening == b"{":
        raise _wrong_image(dict, field)
    value, stop = scalar_at(body, start, end)
    raise _wrong_image(type(value), field) if stop == end else not_json(stop)


def _read_string(body: bytes, start: int, end: int, field: str, slice_bytes: int) -> bytes:
    if body.find(b"\\", start, end) >= 0:
        text = _unescape(body, start, end, field)
        return _from_base64(text, 0, len(text), field, slice_bytes)
    data = _base64_start(body, start, end, field)
    _decode_string(body[start:data], start)
    return _from_base64(body, data, end, field, slice_bytes)


def _unescape(body: bytes, start: int, end: int, field: str) -> bytes:
    """The base64 data of a string with escape sequences. Pieces never end within one; the first has the URL's header."""
    pieces: list[bytes] = []
    while start < end:
        whole = _WHOLE_ESCAPES.match(body, start, min(start + SLICE_BYTES, end))
        if not whole or not whole[0]:
            raise not_json(start)
        piece = _decode_string(whole[0], start).encode()
        if not pieces:
            piece = piece[_base64_start(piece, 0, len(piece), field) :]
        if piece.translate(None, _BASE64):
            raise _not_base64(field, "Only base64 data is allowed")
        pieces.append(piece)
        start = whole.end()
    return b"".join(pieces)


def _decode_string(text: bytes, position: int) -> str:
    try:
        decoded: str = orjson.loads(b'"' + text + b'"')
    except orjson.JSONDecodeError:
        raise not_json(position) from None
    return decoded


# Base64


def _base64_start(text: bytes, start: int, end: int, field: str) -> int:
    """Where the base64 data begins: after the header of a data: URL."""
    if text[start : min(start + 5, end)].lower() != b"data:":
        return start
    header, comma, _ = text[start : min(start + SLICE_BYTES, end)].partition(b",")
    if not comma or not header.lower().endswith(b";base64"):
        raise Problem.refused(Kind.INVALID, field, f"{field} is a data: URL that is not base64", JSON_FORM)
    return start + len(header) + 1


def _from_base64(text: bytes, start: int, end: int, field: str, slice_bytes: int) -> bytes:
    """Decode `text[start:end]` in slices."""
    padding = strip_end(text, start, end, b"=", slice_bytes)
    step = max(slice_bytes // 4, 1) * 4
    pieces = []
    try:
        while padding - start > step:
            pieces.append(base64.b64decode(text[start : start + step], validate=True))
            start += step
        # More than 4 padding bytes are as right or wrong as 4.
        last = base64.b64decode(text[start : min(padding + 4, end)], validate=True)
    except ValueError as error:
        raise _not_base64(field, str(error)) from None
    if any(len(piece) < step // 4 * 3 for piece in pieces):
        raise _not_base64(field, "Excess data after padding")
    return b"".join([*pieces, last])


# Problems


def _wrong_root(kind: type) -> Problem:
    return Problem.refused(Kind.INVALID, None, f"The JSON body is {TYPE_NAMES[kind]}", JSON_FORM)


def _unknown_key(key: str) -> Problem:
    return Problem.refused(Kind.INVALID, key, f"The key {quoted(key)} is unknown", JSON_FORM)


def _no_images(what: str) -> Problem:
    return Problem.refused(Kind.INVALID, "images", f"The key 'images' is {what}", JSON_FORM)


def _repeated_key() -> Problem:
    return Problem.refused(Kind.INVALID, "images", "The key 'images' is given more than once", JSON_FORM)


def _wrong_image(kind: type, field: str) -> Problem:
    return Problem.refused(Kind.INVALID, field, f"{field} is {TYPE_NAMES[kind]}", JSON_FORM)


def _not_base64(field: str, reason: str) -> Problem:
    return Problem.refused(Kind.MALFORMED, field, f"{field} is not base64 ({reason})", JSON_FORM)
