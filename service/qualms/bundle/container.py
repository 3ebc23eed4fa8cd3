"""Read and write the graph and the manifest of one ONNX file, at the level of protobuf fields.

An ONNX file is a sequence of top-level protobuf fields, and the manifest is one of them, a metadata entry. Replacing it
only cuts and joins bytes: the graph and its SHA-256 do not change, and recalibration does not need the onnx package.
"""

from collections.abc import Iterator
from typing import NamedTuple

from qualms.errors import BundleError

MANIFEST_KEY = "qualms.manifest"

_GRAPH_FIELD = 7  # ModelProto.graph
_METADATA_FIELD = 14  # ModelProto.metadata_props, entries of (key = 1, value = 2)
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5

_NOT_PROTOBUF = "its bytes are not a protobuf message"
_TRUNCATED = "it is another kind of file, or it is truncated"


class Container(NamedTuple):
    """The two parts of a bundle file."""

    graph: bytes
    """the ONNX model without the manifest"""
    manifest: str | None
    """the manifest's JSON text, or None if the file has none"""


class _Field(NamedTuple):
    number: int
    wire_type: int
    start: int
    """offset of the tag"""
    body: int
    """offset of the value, after tag and length"""
    end: int


def unpack(data: bytes, source: str = "The file") -> Container:
    """Split a file's bytes into graph and manifest; the BundleError names `source` if they are not an ONNX model."""
    try:
        return _split(data)
    except _MalformedError as error:
        raise BundleError(f"{source} is not an ONNX model: {error}.") from None


def pack(container: Container) -> bytes:
    """Join graph and manifest into the bytes of one file; the manifest is the last field."""
    if container.manifest is None:
        return container.graph
    entry = _bytes_field(1, MANIFEST_KEY.encode()) + _bytes_field(2, container.manifest.encode())
    return container.graph + _bytes_field(_METADATA_FIELD, entry)


class _MalformedError(Exception):
    """The bytes are not an ONNX model; the message is the reason."""


def _split(data: bytes) -> Container:
    graph_fields: list[bytes] = []
    manifest: str | None = None
    has_graph = False
    for field in _fields(data):
        has_graph |= (field.number, field.wire_type) == (_GRAPH_FIELD, _BYTES)
        if (field.number, field.wire_type) == (_METADATA_FIELD, _BYTES):
            key, value = _metadata_entry(data[field.body : field.end])
            if key == MANIFEST_KEY.encode():
                manifest = _text(value)
                continue
        graph_fields.append(data[field.start : field.end])
    if not has_graph:
        raise _MalformedError("it has no graph")
    return Container(b"".join(graph_fields), manifest)


def _fields(data: bytes) -> Iterator[_Field]:
    position = 0
    while position < len(data):
        start = position
        tag, position = _read_varint(data, position)
        number, wire_type = tag >> 3, tag & 7
        body = position
        if wire_type == _VARINT:
            _, position = _read_varint(data, position)
        elif wire_type == _FIXED64:
            position += 8
        elif wire_type == _FIXED32:
            position += 4
        elif wire_type == _BYTES:
            length, body = _read_varint(data, position)
            position = body + length
        else:
            raise _MalformedError(_NOT_PROTOBUF)
        if number == 0:
            raise _MalformedError(_NOT_PROTOBUF)
        if position > len(data):
            raise _MalformedError(_TRUNCATED)
        yield _Field(number, wire_type, start, body, position)


def _metadata_entry(data: bytes) -> tuple[bytes, bytes]:
    parts = {field.number: data[field.body : field.end] for field in _fields(data)}
    return parts.get(1, b""), parts.get(2, b"")


def _text(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise _MalformedError("its manifest is not UTF-8 text") from None


def _read_varint(data: bytes, position: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if position >= len(data):
            raise _MalformedError(_TRUNCATED)
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
