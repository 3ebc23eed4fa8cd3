import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qualms.bundle import container
from qualms.bundle.checks.protobuf import bytes_field
from qualms.bundle.container import MANIFEST_KEY, Container, pack, unpack
from qualms.bundle.runtime import GraphRunner
from qualms.errors import BundleError

TEXT = '{"name": "tiny", "note": "größer als 127 Bytes"}' + " " * 300


def with_metadata(model: onnx.ModelProto, entries: dict[str, str]) -> bytes:
    """A model whose metadata was written by the onnx package."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    onnx.helper.set_model_props(copy, entries)
    return bytes(copy.SerializeToString())


def metadata(data: bytes) -> dict[str, str]:
    return {entry.key: entry.value for entry in onnx.load_from_string(data).metadata_props}


# Packing


@given(text=st.text('aé€𝄞\0\n"{}', max_size=200))
def test_unpack_inverts_pack(graph: bytes, text: str) -> None:
    assert unpack(pack(Container(graph, text))) == Container(graph, text)


def test_packing_a_graph_without_manifest_returns_the_graph(graph: bytes) -> None:
    assert pack(Container(graph, None)) == graph
    assert unpack(graph) == Container(graph, None)


def test_the_onnx_package_loads_a_packed_file(model: onnx.ModelProto, graph: bytes) -> None:
    packed = pack(Container(graph, TEXT))
    loaded = onnx.load_from_string(packed)
    onnx.checker.check_model(loaded)
    assert loaded.graph == model.graph
    assert metadata(packed) == {MANIFEST_KEY: TEXT}


def test_onnx_runtime_loads_a_packed_file_with_its_manifest(graph: bytes, runner: GraphRunner) -> None:
    session = onnxruntime.InferenceSession(pack(Container(graph, TEXT)), providers=["CPUExecutionProvider"])
    assert session.get_modelmeta().custom_metadata_map == {MANIFEST_KEY: TEXT}
    image = np.full((1, 6, 5, 3), 90, np.uint8)
    (alpha,) = session.run(["alpha"], {"image": image})
    np.testing.assert_array_equal(alpha, runner(image)["alpha"])


def test_replacing_the_manifest_does_not_change_the_graph(graph: bytes) -> None:
    first = unpack(pack(Container(graph, "first")))
    second = unpack(pack(first._replace(manifest="second, and longer")))
    assert second == Container(graph, "second, and longer")


def test_other_metadata_entries_are_preserved(model: onnx.ModelProto) -> None:
    others = {"author": "somebody", "qualms.other": "", "": "no key"}
    graph = with_metadata(model, others)
    packed = pack(Container(graph, TEXT))
    assert metadata(packed) == {**others, MANIFEST_KEY: TEXT}
    assert unpack(packed) == Container(graph, TEXT)


def test_the_manifest_may_stand_between_other_metadata_entries(model: onnx.ModelProto) -> None:
    before, after = {"a": "1"}, {"z": "2"}
    unpacked = unpack(with_metadata(model, {**before, MANIFEST_KEY: TEXT, **after}))
    assert unpacked.manifest == TEXT
    assert unpacked.graph == with_metadata(model, {**before, **after})


def test_two_manifests_are_refused(graph: bytes) -> None:
    doubled = pack(Container(pack(Container(graph, "first")), "second"))
    with pytest.raises(
        BundleError, match=r"^The file is not a Qualms bundle: it has two manifests, and one is accepted\.$"
    ):
        unpack(doubled)


def test_a_manifest_that_is_too_long_is_refused(graph: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(container, "MAX_MANIFEST_BYTES", 1000)
    assert unpack(pack(Container(graph, "x" * 1000))).manifest == "x" * 1000
    with pytest.raises(BundleError, match="its manifest has 1,001 bytes, and at most 1,000 are accepted"):
        unpack(pack(Container(graph, "x" * 1001)))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"\x08\x08" * 10_001 + b"\x3a\x00", "it has more than 10,000 top-level fields"),
        (b"\x3a\x00" + bytes_field(14, b"\x08\x08" * 10_001), "a metadata entry has more than 10,000 fields"),
    ],
)
def test_a_model_of_too_many_fields_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(BundleError, match=reason):
        unpack(data)


# Bytes that are not an ONNX model


def test_a_truncated_file_is_refused_or_has_no_manifest(graph: bytes) -> None:
    packed = pack(Container(graph, TEXT))
    survivors = []
    for length in range(len(packed)):
        try:
            unpacked = unpack(packed[:length])
        except BundleError:
            continue
        survivors.append(length)
        assert unpacked == Container(packed[:length], None)
    assert len(graph) in survivors
    assert len(survivors) < 5  # a cut between two top-level fields leaves valid protobuf


@given(st.binary(max_size=200))
def test_unpacking_random_bytes_returns_a_container_or_raises_bundle_error(data: bytes) -> None:
    try:
        unpacked = unpack(data)
    except BundleError:
        return
    assert pack(unpacked) == data or unpacked.manifest is not None


@given(where=st.floats(0, 1, exclude_max=True), value=st.integers(0, 255))
def test_unpacking_a_file_with_a_changed_byte_returns_a_container_or_raises_bundle_error(
    graph: bytes, where: float, value: int
) -> None:
    packed = bytearray(pack(Container(graph, TEXT)))
    packed[int(where * len(packed))] = value
    try:
        unpacked = unpack(bytes(packed))
    except BundleError:
        return
    assert unpacked.manifest is not None or unpacked.graph == packed


TRUNCATED = "The file is not an ONNX model: it is another kind of file, or it is truncated."
NOT_PROTOBUF = "The file is not an ONNX model: its bytes are not a protobuf message."
NO_GRAPH = "The file is not an ONNX model: it has no graph."


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", NO_GRAPH),
        (b"\x08\x08", NO_GRAPH),  # only an IR version
        (b"\x38\x05", NO_GRAPH),  # field 7 with an integer value
        (b"\x3a\x05abcd", TRUNCATED),
        (b"\x3a\x80", TRUNCATED),
        (b"\x3a", TRUNCATED),
        (b"\x3a\x00\x0d\x01\x02\x03", TRUNCATED),  # four bytes expected
        (b"\x3a\x00\x09\x01\x02\x03\x04\x05\x06\x07", TRUNCATED),  # eight bytes expected
        (b"\x3b", NOT_PROTOBUF),  # a group
        (b"\x02\x00", NOT_PROTOBUF),  # field 0
        (b"\xff" * 11, NOT_PROTOBUF),  # a varint that does not end
        (b"\x3a\x00\x72\x02\x0a\x05", TRUNCATED),  # a truncated metadata entry
        (
            b"\x3a\x00\x72\x14\x0a\x0fqualms.manifest\x12\x01\xff",
            "The file is not an ONNX model: its manifest is not UTF-8 text.",
        ),
        (b"\x89PNG\r\n\x1a\n", TRUNCATED),
    ],
)
def test_bytes_that_are_not_a_model_are_refused_with_a_reason(data: bytes, message: str) -> None:
    with pytest.raises(BundleError) as caught:
        unpack(data)
    assert str(caught.value) == message


def test_the_error_names_the_source() -> None:
    with pytest.raises(BundleError, match=r"^/some/where\.onnx is not an ONNX model: it has no graph\.$"):
        unpack(b"", "/some/where.onnx")


def test_fixed_width_fields_are_skipped() -> None:
    """ModelProto has no fields of these wire types today; a later ONNX version may add one."""
    data = b"\xc1\x0c12345678" + b"\xcd\x0c1234" + b"\x3a\x00"
    assert unpack(data) == Container(data, None)
