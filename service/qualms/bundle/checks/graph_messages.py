"""Walk through all messages of an ONNX model at the level of protobuf fields.

The walk visits graphs in attributes of nodes, too, so that a check of one kind of message holds wherever such a message
can stand. It does not recurse, and its time and memory are bounded by MAX_FIELDS, because a protobuf library makes objects
of up to a hundred times the size of an empty message.
"""

from collections.abc import Iterator
from typing import Final, NamedTuple

from qualms.bundle.checks.protobuf import BYTES, Field, MalformedError, fields

MAX_FIELDS: Final = 500_000
"""fields of all messages of a model; a vision transformer of 2,000 nodes has about 50,000"""
MAX_DEPTH: Final = 64
"""messages within messages; protobuf libraries refuse more than 100, and a graph without subgraphs has 7"""


class Child(NamedTuple):
    """A field that holds messages of one kind."""

    kind: str
    is_repeated: bool = True


def _once(kind: str) -> Child:
    return Child(kind, is_repeated=False)


CHILDREN: Final[dict[str, dict[int, Child]]] = {
    "model": {7: _once("graph"), 8: Child("operator set"), 14: Child("entry")},
    "graph": {
        **{1: Child("node"), 5: Child("tensor"), 14: Child("annotation"), 16: Child("entry")},
        **dict.fromkeys((11, 12, 13), Child("value")),
    },
    "node": {5: Child("attribute"), 9: Child("entry")},
    "attribute": {
        **{5: _once("tensor"), 10: Child("tensor"), 6: _once("graph"), 11: Child("graph")},
        **{14: _once("type"), 15: Child("type")},
    },
    "tensor": {3: _once("segment"), 16: Child("entry")},
    "value": {2: _once("type"), 4: Child("entry")},
    "type": {
        **{1: _once("tensor type"), 8: _once("tensor type")},
        **{4: _once("element type"), 9: _once("element type"), 5: _once("map type")},
    },
    "tensor type": {2: _once("shape")},
    "element type": {1: _once("type")},
    "map type": {2: _once("type")},
    "shape": {1: Child("dimension")},
    "annotation": {2: Child("entry")},
    **{kind: {} for kind in ("operator set", "entry", "segment", "dimension")},
}
"""By kind of message: the fields that hold messages. Fields that `qualms.bundle.checks.graph_checks` refuses are not listed."""


class Message(NamedTuple):
    """One message of a model."""

    kind: str
    depth: int
    """0 for the model, 1 for its graph, 2 for the nodes of that graph"""
    start: int
    fields: list[Field]


def messages(model: bytes) -> Iterator[Message]:
    """All messages of a model, each before those in it; MalformedError if there are too many or they are too deep."""
    remaining = MAX_FIELDS
    stack = [("model", 0, 0, len(model))]
    while stack:
        kind, depth, start, end = stack.pop()
        if depth > MAX_DEPTH:
            raise MalformedError(f"its messages are nested deeper than {MAX_DEPTH} levels")
        children = CHILDREN[kind]
        content: list[Field] = []
        single: set[int] = set()
        for field in fields(model, start, end):
            content.append(field)
            if len(content) > remaining:
                raise MalformedError(f"its graph has more than {MAX_FIELDS:,} fields")
            child = children.get(field.number)
            if child is None or field.wire_type != BYTES:
                continue
            if not child.is_repeated:
                # A protobuf library would merge both, which no check of one of them notices.
                if field.number in single:
                    raise MalformedError(f"a message in its graph has two fields of the kind {child.kind}")
                single.add(field.number)
            stack.append((child.kind, depth + 1, field.body, field.end))
        remaining -= len(content)
        yield Message(kind, depth, start, content)
