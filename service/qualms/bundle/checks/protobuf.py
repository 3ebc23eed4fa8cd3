"""Read protobuf messages field by field, without a schema and without copying."""

from collections.abc import Iterator
from typing import Final, NamedTuple

VARINT: Final = 0
FIXED64: Final = 1
BYTES: Final = 2
FIXED32: Final = 5

_NOT_PROTOBUF = "its bytes are not a protobuf message"
_TRUNCATED = "it is another kind of file, or it is truncated"


class MalformedError(Exception):
    """The bytes are not a protobuf message; the message is the reason."""


class Field(NamedTuple):
    """One field of a message, as offsets into the bytes."""

    number: int
    wire_type: int
    start: int
    """offset of the tag"""
    body: int
    """offset of the value, after tag and length"""
    end: int


def fields(data: bytes, start: int = 0, end: int | None = None) -> Iterator[Field]:
    """The fields of the message in data[start:end], in order; MalformedError where the bytes are not protobuf.

    Groups are refused: ONNX does not use them, and they nest without a length.
    """
    end = len(data) if end is None else end
    position = start
    while position < end:
        start = position
        # Most tags and lengths are one byte, which is read here without a call.
        tag, position = data[position], position + 1
        if tag >= 0x80:
            tag, position = read_varint(data, start, end)
        number, wire_type = tag >> 3, tag & 7
        body = position
        if wire_type == BYTES:
            if position < end and data[position] < 0x80:
                body = position + 1
                position = body + data[position]
            else:
                length, body = read_varint(data, position, end)
                position = body + length
        elif wire_type == VARINT:
            _, position = read_varint(data, position, end)
        elif wire_type == FIXED64:
            position += 8
        elif wire_type == FIXED32:
            position += 4
        else:
            raise MalformedError(_NOT_PROTOBUF)
        if number == 0:
            raise MalformedError(_NOT_PROTOBUF)
        if position > end:
            raise MalformedError(_TRUNCATED)
        yield Field(number, wire_type, start, body, position)


def read_varint(data: bytes, position: int, end: int) -> tuple[int, int]:
    """The unsigned integer at `position`, and the offset after it."""
    value = 0
    for shift in range(0, 70, 7):
        if position >= end:
            raise MalformedError(_TRUNCATED)
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise MalformedError(_NOT_PROTOBUF)


def bytes_field(number: int, body: bytes) -> bytes:
    """A field with a length and these bytes."""
    return _encode_varint(number << 3 | BYTES) + _encode_varint(len(body)) + body


def _encode_varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
