"""Graph and manifest in one ONNX file, read and written at the level of protobuf fields.

An ONNX file is a sequence of top-level fields, and a metadata entry is one of them. Taking our entry out and
putting another in is therefore a matter of cutting bytes: the graph stays byte for byte what was verified, its
SHA-256 means something, and recalibrating a model needs neither the onnx package nor a graph rewrite.
"""

from collections.abc import Iterator
from typing import NamedTuple

from qualms.errors import BundleError

MANIFEST_KEY = "qualms.manifest"

_GRAPH_FIELD = 7  # ModelProto.graph
_METADATA_FIELD = 14  # ModelProto.metadata_props, entries of (key = 1, value = 2)
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5

_NOT_PROTOBUF = "its bytes are not a protobuf message"
_CUT_SHORT = "it is another kind of file, or was cut short"


class Container(NamedTuple):
    """The two parts of a file."""

    graph: bytes
    """the ONNX model without our metadata entry"""
    manifest: str | None
    """the JSON text of our metadata entry, if there is one"""


class _Field(NamedTuple):
    number: int
    wire: int
    """how the value is encoded"""
    start: int
    """where the tag begins"""
    body: int
    """where the value begins, behind tag and length"""
    end: int


def unpack(data: bytes, source: str = "The file") -> Container:
    """Part a file's bytes; BundleError, with `source` as its subject, if they are not an ONNX model."""
    try:
        return _parted(data)
    except _MalformedError as error:
        raise BundleError(f"{source} is not an ONNX model: {error}.") from None


def pack(container: Container) -> bytes:
    """The bytes of one file; the manifest's entry comes last, where ONNX allows it as well as anywhere."""
    if container.manifest is None:
        return container.graph
    entry = _bytes_field(1, MANIFEST_KEY.encode()) + _bytes_field(2, container.manifest.encode())
    return container.graph + _bytes_field(_METADATA_FIELD, entry)


class _MalformedError(Exception):
    """Why bytes are not an ONNX model, as the second half of a sentence."""


def _parted(data: bytes) -> Container:
    kept: list[bytes] = []
    manifest: str | None = None
    has_graph = False
    for field in _fields(data):
        has_graph |= (field.number, field.wire) == (_GRAPH_FIELD, _BYTES)
        if (field.number, field.wire) == (_METADATA_FIELD, _BYTES):
            key, value = _entry(data[field.body : field.end])
            if key == MANIFEST_KEY.encode():
                manifest = _text(value)
                continue
        kept.append(data[field.start : field.end])
    if not has_graph:
        raise _MalformedError("it holds no graph")
    return Container(b"".join(kept), manifest)


def _fields(data: bytes) -> Iterator[_Field]:
    position = 0
    while position < len(data):
        start = position
        tag, position = _varint(data, position)
        number, wire = tag >> 3, tag & 7
        body = position
        if wire == _VARINT:
            _, position = _varint(data, position)
        elif wire == _FIXED64:
            position += 8
        elif wire == _FIXED32:
            position += 4
        elif wire == _BYTES:
            length, body = _varint(data, position)
            position = body + length
        else:
            raise _MalformedError(_NOT_PROTOBUF)
        if number == 0:
            raise _MalformedError(_NOT_PROTOBUF)
        if position > len(data):
            raise _MalformedError(_CUT_SHORT)
        yield _Field(number, wire, start, body, position)


def _entry(data: bytes) -> tuple[bytes, bytes]:
    parts = {field.number: data[field.body : field.end] for field in _fields(data)}
    return parts.get(1, b""), parts.get(2, b"")


def _text(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise _MalformedError("its manifest is not UTF-8 text") from None


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if position >= len(data):
            raise _MalformedError(_CUT_SHORT)
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise _MalformedError(_NOT_PROTOBUF)


def _bytes_field(number: int, body: bytes) -> bytes:
    return _encode_varint(number << 3 | _BYTES) + _encode_varint(len(body)) + body


def _encode_varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
