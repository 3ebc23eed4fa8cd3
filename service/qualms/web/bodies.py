"""Parse a request's body into images: a raw image file, multipart files, base64 or pixel arrays in JSON, within limits.

Every error is a Problem that names the image or field. Nothing is decoded here: an image is the bytes of a file, or
pixels.
"""

import base64
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import orjson
from numpy.typing import NDArray
from python_multipart import MultipartParser
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header
from starlette.types import Receive

from qualms.inference.batch import ClientDisconnected
from qualms.web.problems import Kind, Problem, quoted

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

ImageInput: TypeAlias = bytes | NDArray[np.uint8]
"""the bytes of an image file, or pixels of shape (H, W) or (H, W, 1|3|4)"""

RAW_IMAGE_TYPES = ("image/*", "application/octet-stream")
MULTIPART = "multipart/form-data"
JSON = "application/json"
MEDIA_TYPES = (*RAW_IMAGE_TYPES, MULTIPART, JSON)
"""accepted values of Content-Type"""

_ACCEPTED = ", ".join(MEDIA_TYPES)
_JSON_FORM = '{"images": [...]}, each image a base64 string of an image file or an array of pixels'
_PIXELS = "whole numbers from 0 to 255, as an array of shape H×W or H×W×C with C = 1, 3 or 4"
_TYPE_NAMES = {
    dict: "an object",
    list: "an array",
    str: "a string",
    int: "a number",
    float: "a fractional or huge number",
    bool: "true or false",
    type(None): "null",
}
"""names of the types that the JSON parser returns, for error sentences"""

_MAX_NODES = 2**20
"""arrays, objects and strings in a JSON body: 3 bytes of JSON may become a Python object of about 100 bytes"""
_NOT_STRUCTURE = bytes(set(range(256)) - set(b'"[]{}:'))
_STEP = np.zeros(256, np.int8)
_STEP[list(b"[{")] = 1
_STEP[list(b"]}")] = -1
_CHUNK = 2**16


@dataclass(frozen=True, slots=True)
class Limits:
    """Maximum contents of a request."""

    body_bytes: int
    images: int
    json_depth: int


class UploadBudget:
    """Counts the bodies that are being received, and limits the memory they use together."""

    def __init__(self) -> None:
        self.count = 0
        self.bytes = 0

    @contextmanager
    def upload(self, max_bytes: int) -> Iterator[Callable[[int], None]]:
        """Count one body while it is received. Call the function it yields with the size of each piece.

        The function raises a Problem if all uploads together exceed `max_bytes`.
        """
        held = 0

        def reserve(size: int) -> None:
            nonlocal held
            if self.bytes + size > max_bytes:
                raise Problem.too_many_uploads()
            self.bytes += size
            held += size

        self.count += 1
        try:
            yield reserve
        finally:
            self.count -= 1
            self.bytes -= held


async def read_body(
    headers: Mapping[bytes, bytes], receive: Receive, max_bytes: int, reserve: Callable[[int], None] = lambda _: None
) -> bytes:
    """Receive the whole body; one that is announced as too large is refused before it is read.

    A body that arrives in one message, as small ones do, is not copied. `reserve` is called with the size of every piece
    and may refuse it.
    """
    announced = headers.get(b"content-length")
    if announced is not None and _length(announced) > max_bytes:
        raise _too_large(max_bytes)
    chunks, size, more = [], 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        chunk: bytes = message.get("body", b"")
        more = message.get("more_body", False)
        size += len(chunk)
        if size > max_bytes:
            raise _too_large(max_bytes)
        reserve(len(chunk))
        chunks.append(chunk)
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def parse_images(content_type: bytes, body: bytes, limits: Limits) -> list[ImageInput]:
    """The images of a body, in order; `content_type` is the header's value, empty if there is none."""
    if not body:
        raise Problem.refused(Kind.MALFORMED, None, "The body is empty", f"at least one image, as {_ACCEPTED}")
    if len(body) > limits.body_bytes:
        raise _too_large(limits.body_bytes)
    media_type = content_type.partition(b";")[0].strip().lower().decode("latin-1")
    if media_type.startswith("image/") or media_type in RAW_IMAGE_TYPES:
        return [body]
    if media_type == MULTIPART:
        return _from_multipart(content_type, body, limits)
    if media_type == JSON:
        return _from_json(body, limits)
    what = f"The Content-Type {quoted(media_type)} is not accepted" if media_type else "There is no Content-Type"
    raise Problem.refused(Kind.UNSUPPORTED, "Content-Type", what, _ACCEPTED)


def _length(value: bytes) -> int:
    try:
        return int(value)
    except ValueError:
        name = quoted(value.decode("latin-1"))
        raise Problem(Kind.MALFORMED, f"The Content-Length {name} is not a number.", field="Content-Length") from None


def _too_large(max_bytes: int) -> Problem:
    return Problem.refused(Kind.TOO_LARGE, None, "The body is too large", f"at most {max_bytes:,} bytes")


def _too_many(limits: Limits) -> Problem:
    return Problem.refused(Kind.TOO_LARGE, "images", "There are too many images", f"at most {limits.images:,}")


# Multipart


def _from_multipart(content_type: bytes, body: bytes, limits: Limits) -> list[ImageInput]:
    boundary = parse_options_header(content_type)[1].get(b"boundary")
    if not boundary:
        raise Problem(Kind.MALFORMED, "The Content-Type multipart/form-data names no boundary.", field="Content-Type")
    # The delimiter cannot occur within a part, so counting it bounds the number of parts without parsing.
    if body.count(b"\r\n--" + boundary) > limits.images + 1:
        raise _too_many(limits)
    parts = _Parts()
    try:
        MultipartParser(boundary, parts.callbacks()).write(body)
    except FormParserError as error:
        raise Problem(Kind.MALFORMED, f"The body is not multipart/form-data: {error}.") from None
    if not parts.complete:
        raise Problem(Kind.MALFORMED, "The multipart body is cut short: its closing boundary is missing.")
    if not parts.files:
        raise Problem.refused(Kind.INVALID, "images", "The form has no file", "one file per image")
    if len(parts.files) > limits.images:
        raise _too_many(limits)
    return parts.files


class _Parts:
    """Collects the file parts of a multipart body from the parser's callbacks."""

    def __init__(self) -> None:
        self.files: list[ImageInput] = []
        self.complete = False
        self._header = self._value = self._disposition = self._data = b""

    def callbacks(self) -> "MultipartCallbacks":
        return {
            "on_part_begin": self._part_begin,
            "on_header_begin": self._header_begin,
            "on_header_field": self._header_field,
            "on_header_value": self._header_value,
            "on_header_end": self._header_end,
            "on_headers_finished": self._headers_finished,
            "on_part_data": self._part_data,
            "on_part_end": self._part_end,
            "on_end": self._end,
        }

    def _part_begin(self) -> None:
        self._disposition = self._data = b""

    def _header_begin(self) -> None:
        self._header = self._value = b""

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _header_end(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition = self._value

    def _headers_finished(self) -> None:
        _, options = parse_options_header(self._disposition)
        if b"filename" not in options:
            name = options.get(b"name", b"").decode("utf-8", "replace")
            what = f"The form field {quoted(name)} is not a file"
            raise Problem.refused(Kind.INVALID, name, what, "parts with a filename, one per image")

    def _part_data(self, data: bytes, start: int, end: int) -> None:
        self._data += data[start:end]

    def _part_end(self) -> None:
        self.files.append(self._data)

    def _end(self) -> None:
        self.complete = True


# JSON


def _from_json(body: bytes, limits: Limits) -> list[ImageInput]:
    keys = _check_structure(body, limits.json_depth)
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise Problem.refused(Kind.MALFORMED, None, f"The body is not JSON ({error})", _JSON_FORM) from None
    if type(document) is not dict:
        raise Problem.refused(Kind.INVALID, None, f"The JSON body is {_TYPE_NAMES[type(document)]}", _JSON_FORM)
    for key in document:
        if key != "images":
            raise Problem.refused(Kind.INVALID, key, f"The key {quoted(key)} is unknown", _JSON_FORM)
    values = document.get("images")
    if type(values) is not list or not values:
        what = "empty" if values == [] else _TYPE_NAMES[type(values)] if document else "missing"
        raise Problem.refused(Kind.INVALID, "images", f"The key 'images' is {what}", _JSON_FORM)
    if len(values) > limits.images:
        raise _too_many(limits)
    images = [_json_image(value, f"images[{index}]") for index, value in enumerate(values)]
    if keys > 1:  # images contain no objects, so the other key was a second "images"
        raise Problem.refused(Kind.INVALID, "images", "The key 'images' is given more than once", _JSON_FORM)
    return images


def _check_structure(body: bytes, max_depth: int) -> int:
    """Refuse, before parsing, JSON that is nested too deep or has too many nodes; return the number of keys.

    Only quotes, brackets and colons outside strings are counted. Counts are wrong after the first byte that is not valid
    JSON, but the parser stops there, too.
    """
    unescaped = body.replace(rb"\\", b"").replace(rb"\"", b"")
    codes = np.frombuffer(unescaped.translate(None, _NOT_STRUCTURE), np.uint8)
    depth = quotes = opened = keys = 0
    for start in range(0, len(codes), _CHUNK):
        chunk = codes[start : start + _CHUNK]
        seen = quotes + np.cumsum(chunk == ord('"'))
        outside = chunk[seen % 2 == 0]
        levels = depth + np.cumsum(_STEP[outside], dtype=np.int64)
        if levels.max(initial=0) > max_depth:
            accepted = f"at most {max_depth} levels"
            raise Problem.refused(Kind.MALFORMED, None, "The JSON body is nested too deep", accepted)
        quotes = int(seen[-1])
        depth = int(levels[-1]) if len(levels) else depth
        opened += int(np.count_nonzero(_STEP[outside] > 0))
        keys += int(np.count_nonzero(outside == ord(":")))
        if opened + quotes // 2 > _MAX_NODES:
            accepted = f"at most {_MAX_NODES:,}; send image files instead of pixels"
            raise Problem.refused(Kind.TOO_LARGE, None, "The JSON body has too many arrays or strings", accepted)
    return keys


def _json_image(value: object, field: str) -> ImageInput:
    if type(value) is str:
        return _from_base64(value, field)
    if type(value) is list:
        return _from_pixels(value, field)
    raise Problem.refused(Kind.INVALID, field, f"{field} is {_TYPE_NAMES[type(value)]}", _JSON_FORM)


def _from_base64(text: str, field: str) -> bytes:
    if text[:5].lower() == "data:":
        header, comma, text = text.partition(",")
        if not comma or not header.lower().endswith(";base64"):
            raise Problem.refused(Kind.INVALID, field, f"{field} is a data: URL that is not base64", _JSON_FORM)
    try:
        return base64.b64decode(text, validate=True)
    except ValueError as error:
        raise Problem.refused(Kind.MALFORMED, field, f"{field} is not base64 ({error})", _JSON_FORM) from None


def _from_pixels(values: list[Any], field: str) -> NDArray[np.uint8]:
    """Flatten an array level by level; each level must hold arrays of one length, the last one integers."""
    shape = [len(values)]
    while (kinds := set(map(type, values))) == {list}:
        lengths = set(map(len, values))
        if len(lengths) > 1:
            raise Problem.refused(Kind.WRONG_SHAPE, field, f"{field} has rows of different lengths", _PIXELS)
        shape.append(lengths.pop())
        values = list(chain.from_iterable(values))
    if kinds - {int}:
        names = " and ".join(sorted(_TYPE_NAMES[kind] for kind in kinds - {int}))
        raise Problem.refused(Kind.INVALID, field, f"{field} holds {names} among its pixels", _PIXELS)
    if not values or len(shape) not in (2, 3) or shape[2:] not in ([], [1], [3], [4]):
        what = f"{field} has the shape {'×'.join(map(str, shape))}"
        raise Problem.refused(Kind.WRONG_SHAPE, field, what, _PIXELS)
    try:
        return np.frombuffer(bytes(values), np.uint8).reshape(shape)
    except ValueError:
        what = f"{field} has pixels from {min(values)} to {max(values)}"
        raise Problem.refused(Kind.INVALID, field, what, _PIXELS) from None
