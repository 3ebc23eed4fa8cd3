"""Open ONNX Runtime sessions whose memory is bounded.

Memory that a graph claims is allocated in three ways: initializers in the file are checked by `qualms.bundle.checks.graph_checks`,
constants that are computed while the graph is loaded are limited by FOLDING_BYTES, and everything that a run computes comes
from an arena, which can be limited.
"""

from contextlib import suppress
from threading import Lock
from typing import Any, Final

from qualms.bundle.checks.graph_messages import Message, messages
from qualms.bundle.checks.protobuf import BYTES, MalformedError, fields
from qualms.errors import first_line

FOLDING_BYTES: Final = 512 * 2**20
"""Bytes of all constants that are computed at load, from ONNX Runtime 1.27 on. Larger ones are computed in every run."""

_ARENA_ERROR = "bfc_arena"  # the source file that ONNX Runtime names if its arena is exhausted
_BYTES_ATTRIBUTE = "_model_bytes"  # private to ONNX Runtime; without it, only memory is wasted
_registration = Lock()


def open_session(ort: Any, graph: bytes, options: Any, providers: list[Any], *, max_memory: int | None = None) -> Any:
    """A session of `graph` with SessionOptions `options`.

    `max_memory` is the number of bytes that all tensors of a run may take on the CPU. A run that needs more fails with an
    error that `is_out_of_memory` recognises. Weights are not included, because the size of the file bounds them, and the
    memory of a GPU is not limited.
    """
    # Without this, bytes that are also a valid file of ONNX Runtime's own format would be read as such, unchecked.
    options.add_session_config_entry("session.load_model_format", "ONNX")
    limit = FOLDING_BYTES // max(1, _count_constant_nodes(graph))
    options.add_session_config_entry("optimization.constant_folding_max_output_size_in_bytes", str(max(1, limit)))
    if max_memory is None:
        return _without_bytes(ort.InferenceSession(graph, options, providers=providers))
    options.log_severity_level = 4  # exceptions report all errors, and an exhausted arena is not unexpected
    options.add_session_config_entry("session.use_env_allocators", "1")
    memory = ort.OrtMemoryInfo("Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT)
    # A session keeps the allocator that is registered when it is opened, so each session has an arena of its own.
    with _registration:
        with suppress(Exception):  # ONNX Runtime that accepts one registration only: the first limit holds for all
            ort.create_and_register_allocator(memory, ort.OrtArenaCfg({"max_mem": max_memory}))
        return _without_bytes(ort.InferenceSession(graph, options, providers=providers))


def shrinking_run(ort: Any) -> Any:
    """RunOptions of a run after which the CPU arena frees what it does not use.

    If every run did so, its memory would have to be allocated again each time, which takes up to half as long as the run.
    """
    options = ort.RunOptions()
    options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
    return options


def _without_bytes(session: Any) -> Any:
    """The session without its reference to the graph's bytes, which it needs only to be loaded again with other providers."""
    if getattr(session, _BYTES_ATTRIBUTE, None) is not None:
        setattr(session, _BYTES_ATTRIBUTE, None)
    return session


def is_out_of_memory(error: Exception) -> bool:
    """Whether the error, or the one that caused it, is that a session needs more than its `max_memory`."""
    return any(_ARENA_ERROR in str(one) for one in (error, error.__cause__))


def failure(error: Exception, max_memory: int | None) -> str:
    """The reason of an error of ONNX Runtime, as the end of a sentence without its full stop."""
    if max_memory is not None and is_out_of_memory(error):
        return f"it needs more than the {max_memory:,} bytes of memory that it may take"
    return first_line(error)


def _count_constant_nodes(graph: bytes) -> int:
    """An upper bound on the nodes whose outputs do not depend on the graph's input.

    Shapes count as constant, and so do all nodes of subgraphs. A node that stands before the nodes whose outputs it uses is
    counted, too.
    """
    try:
        content = list(messages(graph))
    except MalformedError:  # ONNX Runtime reports the reason
        return 1
    nested = sum(message.kind == "node" and message.depth > 2 for message in content)
    nodes = sorted((m for m in content if m.kind == "node" and m.depth == 2), key=lambda node: node.start)
    initializers = {_name(graph, m, 8) for m in content if m.kind == "tensor" and m.depth == 2}
    variable = _inputs(graph, content) - initializers
    constant = 0
    for node in nodes:
        is_shape = _name(graph, node, 4) in (b"Shape", b"Size")
        if not is_shape and not variable.isdisjoint(_names(graph, node, 1)):
            variable.update(_names(graph, node, 2))
        else:
            constant += 1
    return constant + nested


def _inputs(graph: bytes, content: list[Message]) -> set[bytes]:
    """Names of the inputs of the main graph."""
    spans = [(f.body, f.end) for m in content if m.depth == 1 and m.kind == "graph" for f in m.fields if f.number == 11]
    return {graph[f.body : f.end] for start, end in spans for f in fields(graph, start, end) if f.number == 1}


def _names(graph: bytes, message: Message, number: int) -> list[bytes]:
    return [graph[f.body : f.end] for f in message.fields if f.number == number and f.wire_type == BYTES]


def _name(graph: bytes, message: Message, number: int) -> bytes:
    names = _names(graph, message, number)
    return names[-1] if names else b""
