"""Graph and manifest in one ONNX file, read and written at the level of protobuf fields.

An ONNX file is a sequence of top-level fields, and a metadata entry is one of them. Taking our entry out and
putting another in is therefore a matter of cutting bytes: the graph stays byte for byte what was verified, its
SHA-256 means something, and recalibrating a model needs neither the onnx package nor a graph rewrite.
"""

from collections.abc import Iterator
from typing import NamedTuple

from service.bundle.errors import BundleError

MANIFEST_KEY = "qualms.manifest"

_GRAPH_FIELD = 7  # ModelProto.graph
_METADATA_FIELD = 14  # ModelProto.metadata_props, entries of (key = 1, value = 2)
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


class Container(NamedTuple):
    """The two parts of a file."""

    graph: bytes
    """the ONNX model without our metadata entry"""
    manifest: str | None
    """the JSON text of our metadata entry, if there is one"""


class _Field(NamedTuple):
    number: int
    start: int
    """where the tag begins"""
    body: int
    """where the value begins, behind tag and length"""
    end: int


def unpack(data: bytes) -> Container:
    """Part a file's bytes; BundleError if they are not an ONNX model."""
    kept: list[bytes] = []
    manifest: str | None = None
    has_graph = False
    for field in _fields(data):
        has_graph |= field.number == _GRAPH_FIELD
        if field.number == _METADATA_FIELD:
            entry = _entry(data[field.body : field.end])
            if entry is not None and entry[0] == MANIFEST_KEY:
                manifest = entry[1]
                continue
        kept.append(data[field.start : field.end])
    if not has_graph:
        raise BundleError("the file is not an ONNX model: it holds no graph")
    return Container(b"".join(kept), manifest)


def pack(container: Container) -> bytes:
    """The bytes of one file; the manifest's entry comes last, where ONNX allows it as well as anywhere."""
    if container.manifest is None:
        return container.graph
    entry = _bytes_field(1, MANIFEST_KEY.encode()) + _bytes_field(2, container.manifest.encode())
    return container.graph + _bytes_field(_METADATA_FIELD, entry)


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
            raise BundleError("the file is not an ONNX model: its bytes are not a protobuf message")
        if number == 0 or position > len(data):
            raise BundleError("the file is not an ONNX model, or it was cut short")
        yield _Field(number, start, body, position)


def _entry(data: bytes) -> tuple[str, str] | None:
    parts = {field.number: data[field.body : field.end] for field in _fields(data)}
    try:
        return parts[1].decode(), parts.get(2, b"").decode()
    except (KeyError, UnicodeDecodeError):
        return None


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if position >= len(data):
            break
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise BundleError("the file is not an ONNX model, or it was cut short")


def _bytes_field(number: int, body: bytes) -> bytes:
    return _encode_varint(number << 3 | _BYTES) + _encode_varint(len(body)) + body


def _encode_varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
