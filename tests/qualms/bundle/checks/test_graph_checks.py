"""Graphs that are refused before ONNX Runtime reads them."""

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from qualms.bundle import embedded
from qualms.bundle.checks import graph_checks, graph_messages
from qualms.bundle.checks.graph_checks import check_graph
from qualms.bundle.checks.graph_messages import CHILDREN, MAX_DEPTH
from qualms.bundle.checks.protobuf import bytes_field
from qualms.bundle.container import unpack
from qualms.errors import BundleError

EXTERNAL = TensorProto(name="far", data_type=TensorProto.FLOAT, dims=[1], data_location=TensorProto.EXTERNAL)
EXTERNAL.external_data.add(key="location", value="secret.bin")
SPARSE = helper.make_sparse_tensor(
    numpy_helper.from_array(np.ones(1, np.float32), "v"), numpy_helper.from_array(np.zeros(1, np.int64)), [10**12]
)


def reason(graph: bytes) -> str:
    with pytest.raises(BundleError) as caught:
        check_graph(graph, "bad.onnx")
    prefix, text = "bad.onnx has a graph that is not accepted: ", str(caught.value)
    assert text.startswith(prefix)
    assert text.endswith(".")
    assert "\n" not in text
    return text.removeprefix(prefix)


@pytest.fixture
def changed(model: onnx.ModelProto) -> Callable[[Callable[[Any], object]], bytes]:
    """change → bytes of the changed model."""

    def apply(change: Callable[[Any], object]) -> bytes:
        copy = onnx.ModelProto()
        copy.CopyFrom(model)
        change(copy)
        return bytes(copy.SerializeToString())

    return apply


Changed = Callable[[Callable[[Any], object]], bytes]


def constant(**attributes: Any) -> onnx.NodeProto:
    return helper.make_node("Constant", [], ["c"], **attributes)


def subgraph(*nodes: onnx.NodeProto, tensors: list[TensorProto] | None = None) -> onnx.GraphProto:
    return helper.make_graph(nodes, "inner", [], [], tensors or [])


def nested(levels: int) -> onnx.GraphProto:
    graph = subgraph()
    for _ in range(levels):
        graph = subgraph(helper.make_node("If", ["condition"], [], then_branch=graph))
    return graph


@pytest.mark.parametrize("name", embedded.available())
def test_embedded_models_are_accepted(name: str) -> None:
    check_graph(unpack(embedded.resolve_model(name).read_bytes()).graph)


def test_every_message_of_onnx_is_visited_or_refused() -> None:
    """A field that holds messages and is unknown to the walk would not be checked."""
    kinds: dict[str, Any] = {
        "model": onnx.ModelProto,
        "graph": onnx.GraphProto,
        "node": onnx.NodeProto,
        "value": onnx.ValueInfoProto,
    }
    kinds |= {"attribute": onnx.AttributeProto, "tensor": TensorProto, "type": onnx.TypeProto}
    kinds |= {"shape": onnx.TensorShapeProto, "tensor type": onnx.TypeProto.Tensor, "map type": onnx.TypeProto.Map}
    kinds |= {"element type": onnx.TypeProto.Sequence, "entry": onnx.StringStringEntryProto}
    refused = {kind: set(fields) for kind, fields in graph_checks._REFUSED_PARTS.items()}
    refused["tensor"] = {13}  # external data
    for kind, message in kinds.items():
        numbers = {field.number for field in message.DESCRIPTOR.fields if field.message_type is not None}
        assert numbers == set(CHILDREN[kind]) | refused.get(kind, set()), kind


# External data


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.graph.initializer.append(EXTERNAL),
        lambda model: model.graph.node.append(constant(value=EXTERNAL)),
        lambda model: model.graph.node.append(helper.make_node("Odd", [], ["c"], several=[EXTERNAL])),
        lambda model: model.graph.node.append(
            helper.make_node("If", ["c"], ["d"], then_branch=subgraph(tensors=[EXTERNAL]))
        ),
        lambda model: model.graph.node.append(
            helper.make_node(
                "Loop", [], [], body=subgraph(helper.make_node("Scan", [], [], body=subgraph(constant(value=EXTERNAL))))
            )
        ),
        lambda model: model.graph.node.append(helper.make_node("Odd", [], [], several=[subgraph(tensors=[EXTERNAL])])),
    ],
    ids=["initializer", "attribute", "tensors", "If", "Loop and Scan", "graphs"],
)
def test_external_data_is_refused_wherever_a_tensor_can_stand(
    changed: Changed, change: Callable[[Any], object]
) -> None:
    assert reason(changed(change)) == "the tensor 'far' has external data, and only data in the file is accepted."


def test_a_location_without_data_location_is_refused(changed: Changed) -> None:
    def locate(model: Any) -> None:
        model.graph.initializer[0].external_data.add(key="location", value="/etc/hostname")

    assert "has external data" in reason(changed(locate))


# Tensors


def tensor(data_type: int = TensorProto.FLOAT, **fields: Any) -> TensorProto:
    return TensorProto(name="big", data_type=data_type, **fields)


@pytest.mark.parametrize(
    ("bad", "expected"),
    [
        (
            tensor(dims=[22_000, 24_000], raw_data=bytes(4)),
            "declares 528,000,000 elements of 32 bits, but its data has 4 bytes",
        ),
        (tensor(dims=[1], raw_data=bytes(8)), "declares 1 elements of 32 bits, but its data has 8 bytes"),
        (tensor(dims=[10**12]), "declares 1,000,000,000,000 elements of 32 bits, but its data has 0 bytes"),
        (tensor(dims=[]), "declares 1 elements of 32 bits, but its data has 0 bytes"),
        (tensor(dims=[100], float_data=[1.0]), "declares 100 elements of 32 bits, but its data has 4 bytes"),
        (
            tensor(TensorProto.INT64, dims=[9], int64_data=[1] * 8),
            "declares 9 elements of 64 bits, but its data has 8 bytes",
        ),
        (
            tensor(TensorProto.UINT4, dims=[17], int32_data=[1] * 8),
            "declares 17 elements of 4 bits, but its data has 8 bytes",
        ),
        (tensor(dims=[-1], raw_data=bytes(4)), "elements of 32 bits, but its data has 4 bytes"),
        (tensor(dims=[1] * 33, raw_data=bytes(4)), "has more than 32 dimensions"),
        (tensor(TensorProto.STRING, dims=[1], string_data=[b"a"]), "has the data type 8, and only types of numbers"),
        (tensor(99, dims=[1], raw_data=bytes(4)), "has the data type 99, and only types of numbers are accepted"),
    ],
)
def test_a_tensor_whose_data_is_not_what_it_declares_is_refused(
    changed: Changed, bad: TensorProto, expected: str
) -> None:
    text = reason(changed(lambda model: model.graph.initializer.append(bad)))
    assert text.startswith("the tensor 'big' ")
    assert expected in text


@pytest.mark.parametrize(
    "good",
    [
        tensor(dims=[0, 10**6]),
        tensor(dims=[2, 3], raw_data=bytes(24)),
        tensor(dims=[2], float_data=[1.0, 2.0]),
        tensor(TensorProto.INT64, dims=[9], int64_data=[1] * 9),
        tensor(TensorProto.UINT4, dims=[3], raw_data=bytes(2)),
        tensor(TensorProto.BFLOAT16, dims=[3], raw_data=bytes(6)),
    ],
)
def test_a_complete_tensor_is_accepted(changed: Changed, good: TensorProto) -> None:
    check_graph(changed(lambda model: model.graph.initializer.append(good)))


def test_dimensions_may_be_packed(graph: bytes) -> None:
    packed = bytes_field(1, b"\x80\x80\x80\x80\x10") + b"\x10\x01" + bytes_field(9, bytes(4))
    assert "4,294,967,296 elements" in reason(bytes_field(7, bytes_field(5, packed)))


def test_fields_that_protobuf_would_merge_are_refused(changed: Changed, graph: bytes) -> None:
    """Each of two tensors is complete, but their merged dimensions are not."""
    one = tensor(dims=[1000], raw_data=bytes(4000)).SerializeToString()
    attribute = bytes_field(1, b"value") + bytes_field(5, one) + bytes_field(5, one)
    node = bytes_field(7, bytes_field(1, bytes_field(4, b"Constant") + bytes_field(5, attribute)))
    assert reason(node) == "a message in its graph has two fields of the kind tensor."
    assert reason(graph + bytes_field(7, b"")) == "a message in its graph has two fields of the kind graph."


def test_too_many_numbers_that_are_not_raw_data_are_refused(changed: Changed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_checks, "MAX_UNPACKED_BYTES", 1000)
    lists = [tensor(TensorProto.INT64, dims=[400], int64_data=[1] * 400)] * 3
    assert "1,000 bytes of numbers" in reason(changed(lambda model: model.graph.initializer.extend(lists)))
    assert "1,000 bytes of numbers" in reason(
        changed(lambda model: model.graph.node.append(constant(value_ints=[1] * 1001)))
    )


# Operators and parts


@pytest.mark.parametrize("operator", ["NonZero", "Unique", "StringConcat"])
def test_operators_that_allocate_outside_the_arena_are_refused(changed: Changed, operator: str) -> None:
    bad = changed(lambda model: model.graph.node.append(helper.make_node(operator, ["image"], ["c"])))
    assert reason(bad) == f"it uses the operator {operator}, whose memory cannot be limited."


def test_operators_of_other_domains_are_refused(changed: Changed) -> None:
    node = helper.make_node("Tokenizer", ["image"], ["c"], domain="com.microsoft")
    assert reason(changed(lambda model: model.graph.node.append(node))) == (
        "it uses the operator 'Tokenizer' of the domain 'com.microsoft', and only operators of ai.onnx are accepted."
    )


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda model: model.training_info.add(), "training information"),
        (lambda model: model.functions.add(), "local functions"),
        (lambda model: model.graph.sparse_initializer.append(SPARSE), "sparse initializers"),
        (lambda model: model.graph.node.append(constant(sparse_value=SPARSE)), "sparse tensors"),
    ],
)
def test_parts_of_onnx_that_no_classifier_needs_are_refused(
    changed: Changed, change: Callable[[Any], object], part: str
) -> None:
    assert reason(changed(change)).startswith(f"it has {part}")


# Sizes of the structure


def test_deeply_nested_messages_are_refused(changed: Changed) -> None:
    check_graph(changed(lambda model: model.graph.node.extend(nested(15).node)))
    graph = b""
    for _ in range(100_000 // 3):
        graph = bytes_field(1, bytes_field(5, bytes_field(6, graph)))
        if len(graph) > 10_000:
            break
    assert reason(bytes_field(7, graph)) == f"its messages are nested deeper than {MAX_DEPTH} levels."


@pytest.mark.parametrize("number", [1, 5, 11, 14, 16, 99])
def test_too_many_small_messages_are_refused(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime would make an object of each, a hundred times as large."""
    monkeypatch.setattr(graph_messages, "MAX_FIELDS", 1000)
    assert reason(bytes_field(7, bytes_field(number, b"") * 1001)) == "its graph has more than 1,000 fields."


def test_the_limit_of_fields_holds_for_all_messages_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_messages, "MAX_FIELDS", 1000)
    node = bytes_field(1, bytes_field(1, b"x") * 100)
    check_graph(bytes_field(7, node * 9))
    assert reason(bytes_field(7, node * 10)) == "its graph has more than 1,000 fields."
