"""Check a graph before ONNX Runtime reads it: complete in one file, of a plausible size, and with known operators only.

ONNX Runtime reads external data from any file below the working directory, and allocates what a graph declares. The checks
read no tensor data and take time proportional to the number of nodes. They cannot bound the memory of computed tensors,
which `qualms.bundle.sessions` limits.
"""

import math
from typing import Final

from qualms.bundle.checks.graph_messages import Message, messages
from qualms.bundle.checks.protobuf import BYTES, VARINT, Field, MalformedError, read_varint
from qualms.errors import BundleError

MAX_UNPACKED_BYTES: Final = 16 * 2**20
"""Bytes of tensors and attributes stored as lists of numbers, in which one byte may become a number of eight bytes.
Exporters store weights as raw bytes."""

_MAX_DIMENSIONS = 32
_BITS: Final = {
    **dict.fromkeys((1, 6, 12), 32),  # FLOAT, INT32, UINT32
    **dict.fromkeys((2, 3, 9, 17, 18, 19, 20, 24), 8),  # UINT8, INT8, BOOL, FLOAT8…
    **dict.fromkeys((4, 5, 10, 16), 16),  # UINT16, INT16, FLOAT16, BFLOAT16
    **dict.fromkeys((7, 11, 13, 14), 64),  # INT64, DOUBLE, UINT64, COMPLEX64
    15: 128,  # COMPLEX128
    **dict.fromkeys((21, 22, 23), 4),  # UINT4, INT4, FLOAT4E2M1
    **dict.fromkeys((25, 26), 2),  # UINT2, INT2
}
"""bits of an element by TensorProto.DataType; strings are not accepted, because their length is not declared"""
_TENSOR_DIMS, _TENSOR_TYPE, _TENSOR_NAME, _TENSOR_RAW = 1, 2, 8, 9
_TENSOR_LISTS = frozenset(
    {4, 5, 6, 7, 10, 11}
)  # float_data, int32_data, string_data, int64_data, double_data, uint64_data
_TENSOR_EXTERNAL, _TENSOR_LOCATION = 13, 14
_ATTRIBUTE_LISTS = frozenset({7, 8})  # floats, ints
_NODE_OPERATOR, _NODE_DOMAIN = 4, 7

_REFUSED_PARTS: Final = {
    "model": {
        20: "training information",
        25: "local functions, whose expansion can be exponentially large",
        26: "a device configuration",
    },
    "graph": {15: "sparse initializers"},
    "node": {10: "a device configuration"},
    "attribute": {22: "sparse tensors", 23: "sparse tensors"},
    "type": {7: "opaque types"},
}
"""by kind of message and number of the field: parts of ONNX that no exported classifier needs"""
_DOMAINS = frozenset({"", "ai.onnx"})
_REFUSED_OPERATORS: Final = frozenset(
    {"NonZero", "Unique", "NonMaxSuppression", "TfIdfVectorizer"}
    | {"StringConcat", "StringNormalizer", "StringSplit", "RegexFullMatch"}
)
"""operators that ONNX Runtime computes in memory outside its allocator, which no limit bounds"""


def check_graph(graph: bytes, source: str = "The file") -> None:
    """BundleError if the graph has external data, incomplete tensors or refused parts; the message names `source`."""
    try:
        _check(graph)
    except MalformedError as error:
        raise BundleError(f"{source} has a graph that is not accepted: {error}.") from None


def _check(graph: bytes) -> None:
    unpacked = 0
    for message in messages(graph):
        _check_parts(message)
        if message.kind == "tensor":
            unpacked += _check_tensor(graph, message)
        elif message.kind == "node":
            _check_operator(graph, message)
        elif message.kind == "attribute":
            unpacked += sum(field.end - field.body for field in message.fields if field.number in _ATTRIBUTE_LISTS)
        if unpacked > MAX_UNPACKED_BYTES:
            raise MalformedError(
                f"it has more than {MAX_UNPACKED_BYTES:,} bytes of numbers that are not stored as raw data"
            )


def _check_parts(message: Message) -> None:
    refused = _REFUSED_PARTS.get(message.kind)
    if refused is None:
        return
    for field in message.fields:
        if field.number in refused:
            raise MalformedError(f"it has {refused[field.number]}")


def _check_operator(graph: bytes, node: Message) -> None:
    operator, domain = _text(graph, node, _NODE_OPERATOR), _text(graph, node, _NODE_DOMAIN)
    if domain not in _DOMAINS:
        raise MalformedError(
            f"it uses the operator {operator!r} of the domain {domain!r}, and only operators of ai.onnx are accepted"
        )
    if operator in _REFUSED_OPERATORS:
        raise MalformedError(f"it uses the operator {operator}, whose memory cannot be limited")


def _check_tensor(graph: bytes, tensor: Message) -> int:
    """Check that the data of a tensor is in the file and complete; the bytes that are stored as lists of numbers."""
    name = _text(graph, tensor, _TENSOR_NAME)
    dims: list[int] = []
    data_type, raw, listed = 0, None, 0
    for field in tensor.fields:
        if field.number == _TENSOR_EXTERNAL or (field.number == _TENSOR_LOCATION and _number(graph, field) != 0):
            raise MalformedError(f"the tensor {name!r} has external data, and only data in the file is accepted")
        if field.number == _TENSOR_DIMS:
            dims += _numbers(graph, field, _MAX_DIMENSIONS + 1 - len(dims))
        elif field.number == _TENSOR_TYPE:
            data_type = _number(graph, field)
        elif field.number == _TENSOR_RAW and field.wire_type == BYTES:
            raw = field.end - field.body
        elif field.number in _TENSOR_LISTS:
            listed += field.end - field.body
        if len(dims) > _MAX_DIMENSIONS:
            raise MalformedError(f"the tensor {name!r} has more than {_MAX_DIMENSIONS} dimensions")
    bits = _BITS.get(data_type)
    if bits is None:
        raise MalformedError(
            f"the tensor {name!r} has the data type {data_type}, and only types of numbers are accepted"
        )
    elements = math.prod(dims)
    if raw is not None:
        declared, stored = -(-elements * bits // 8), raw
    else:  # a number in a list takes at least one byte; ONNX Runtime compares the exact counts
        declared, stored = -(-elements * min(bits, 8) // 8), listed
    if declared > stored or (raw is not None and declared < stored):
        raise MalformedError(
            f"the tensor {name!r} declares {elements:,} elements of {bits} bits, but its data has {stored:,} bytes"
        )
    return listed


def _text(graph: bytes, message: Message, number: int) -> str:
    """The last field of this number as text, shortened for messages; empty without such a field."""
    for field in reversed(message.fields):
        if field.number == number and field.wire_type == BYTES:
            return graph[field.body : min(field.end, field.body + 100)].decode(errors="replace")
    return ""


def _number(graph: bytes, field: Field) -> int:
    return read_varint(graph, field.body, field.end)[0] if field.wire_type == VARINT else 0


def _numbers(graph: bytes, field: Field, limit: int) -> list[int]:
    """At most `limit` numbers of a repeated field, which is packed or not."""
    values: list[int] = []
    position = field.body
    while position < field.end and len(values) < limit and field.wire_type in (VARINT, BYTES):
        value, position = read_varint(graph, position, field.end)
        values.append(value)
    return values
