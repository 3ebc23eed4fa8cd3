"""Image files in a multipart/form-data body.

The parser gets the body in slices: it holds the GIL while it searches and copies, and other threads run between slices.
"""

from typing import TYPE_CHECKING

from python_multipart import MultipartParser
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header

from qualms.images.preprocess import ImageInput
from qualms.web.bodies.limits import Limits, too_many_images
from qualms.web.problems import Kind, Problem, quoted

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

SLICE_BYTES = 2**18
MAX_CONTENT_TYPE = 1024
"""bytes of the Content-Type header, which holds the boundary; splitting it takes time for every semicolon"""
MAX_PART_HEADERS = 8
MAX_PART_HEADER_BYTES = 4096 + 128
MAX_OPTIONS = 64
"""semicolons in a Content-Disposition; splitting it takes time for each"""


def parse_multipart(
    content_type: bytes, body: bytes, limits: Limits, slice_bytes: int = SLICE_BYTES
) -> list[ImageInput]:
    """The files of a form, in order; `content_type` is the header's value, which names the boundary."""
    if len(content_type) > MAX_CONTENT_TYPE:
        accepted = f"at most {MAX_CONTENT_TYPE:,} bytes"
        raise Problem.refused(Kind.MALFORMED, "Content-Type", "The Content-Type is too long", accepted)
    boundary = parse_options_header(content_type)[1].get(b"boundary")
    if not boundary:
        raise Problem(Kind.MALFORMED, "The Content-Type multipart/form-data names no boundary.", field="Content-Type")
    parts = _Parts()
    try:
        parser = MultipartParser(
            boundary, parts.callbacks(), max_header_count=MAX_PART_HEADERS, max_header_size=MAX_PART_HEADER_BYTES
        )
        _check_count(body, b"\r\n--" + boundary, limits, slice_bytes)
        start = (
            max(body.find(b"-"), 0) if body[0] in b"\r\n" else 0
        )  # the parser skips such a preamble in one slice only
        for position in range(start, len(body), slice_bytes):
            parser.write(body[position : position + slice_bytes])
            if parts.complete:
                break
    except FormParserError as error:
        raise Problem(Kind.MALFORMED, f"The body is not multipart/form-data: {error}.") from None
    if not parts.complete:
        raise Problem(Kind.MALFORMED, "The multipart body is cut short: its closing boundary is missing.")
    if not parts.files:
        raise Problem.refused(Kind.INVALID, "images", "The form has no file", "one file per image")
    if len(parts.files) > limits.images:
        raise too_many_images(limits)
    return parts.files


def _check_count(body: bytes, delimiter: bytes, limits: Limits, slice_bytes: int) -> None:
    """Bound the number of parts before parsing: the delimiter cannot occur within a part."""
    count = 0
    for start in range(0, len(body), slice_bytes):
        count += body.count(delimiter, start, start + slice_bytes + len(delimiter) - 1)
        if count > limits.images + 1:
            raise too_many_images(limits)


class _Parts:
    """Collects the file parts of a multipart body from the parser's callbacks."""

    def __init__(self) -> None:
        self.files: list[ImageInput] = []
        self.complete = False
        self._disposition = b""
        self._header: list[bytes] = []
        self._value: list[bytes] = []
        self._data: list[bytes] = []

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
        self._disposition = b""
        self._data = []

    def _header_begin(self) -> None:
        self._header = []
        self._value = []

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._header.append(data[start:end])

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._value.append(data[start:end])

    def _header_end(self) -> None:
        if b"".join(self._header).lower() == b"content-disposition":
            self._disposition = b"".join(self._value)

    def _headers_finished(self) -> None:
        if self._disposition.count(b";") > MAX_OPTIONS:
            accepted = f"at most {MAX_OPTIONS} semicolons"
            raise Problem.refused(Kind.MALFORMED, None, "The Content-Disposition of a part is too long", accepted)
        _, options = parse_options_header(self._disposition)
        if b"filename" not in options:
            name = options.get(b"name", b"").decode("utf-8", "replace")
            what = f"The form field {quoted(name)} is not a file"
            raise Problem.refused(Kind.INVALID, name, what, "parts with a filename, one per image")

    def _part_data(self, data: bytes, start: int, end: int) -> None:
        self._data.append(data[start:end])

    def _part_end(self) -> None:
        self.files.append(b"".join(self._data))  # joining more than 1 MB releases the GIL

    def _end(self) -> None:
        self.complete = True
