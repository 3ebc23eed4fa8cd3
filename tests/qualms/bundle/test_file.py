import errno
import hashlib
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest

from qualms.bundle.container import MANIFEST_KEY, Container, pack
from qualms.bundle.file import graph_digest, open_bundle, write_bundle
from qualms.bundle.manifest import Manifest
from qualms.errors import BundleError

WriteText = Callable[[str], Path]


def message(path: Path) -> str:
    with pytest.raises(BundleError) as caught:
        open_bundle(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# Valid bundles


def test_a_written_bundle_is_read_back(bundle_file: Path, graph: bytes, manifest: Manifest) -> None:
    bundle = open_bundle(bundle_file)
    assert bundle.path == bundle_file
    assert bundle.graph == graph
    assert bundle.manifest.to_json() == manifest.to_json()
    assert bundle.digest == hashlib.sha256(bundle_file.read_bytes()).hexdigest()


def test_write_bundle_returns_the_same_bundle_as_open_bundle(tmp_path: Path, graph: bytes, manifest: Manifest) -> None:
    path = tmp_path / "new" / "tiny.onnx"
    written, opened = write_bundle(path, graph, manifest), open_bundle(path)
    assert (written.path, written.graph, written.digest) == (opened.path, opened.graph, opened.digest)
    assert written.manifest.to_json() == opened.manifest.to_json()


def test_onnx_runtime_loads_the_file(bundle_file: Path, manifest: Manifest) -> None:
    session = onnxruntime.InferenceSession(bundle_file, providers=["CPUExecutionProvider"])
    assert session.get_modelmeta().custom_metadata_map == {MANIFEST_KEY: manifest.to_json()}


def test_another_manifest_changes_the_digest_and_not_the_graph(
    bundle_file: Path, graph: bytes, manifest: Manifest
) -> None:
    before = open_bundle(bundle_file)
    after = write_bundle(bundle_file, before.graph, manifest.model_copy(update={"version": "2"}))
    assert after.graph == graph
    assert after.manifest.version == "2"
    assert after.digest != before.digest


# Files that cannot be opened


def test_the_error_names_a_missing_file(tmp_path: Path) -> None:
    assert message(tmp_path / "no.onnx") == f"{tmp_path / 'no.onnx'} does not exist."


def test_the_error_names_a_folder(tmp_path: Path) -> None:
    assert message(tmp_path) == f"{tmp_path} cannot be read: Is a directory."


def test_a_pipe_is_refused_without_waiting_for_a_writer(tmp_path: Path) -> None:
    path = tmp_path / "pipe.onnx"
    os.mkfifo(path)
    expected = "it is a device, pipe or socket, and a regular file is accepted"
    assert message(path) == f"{path} cannot be read: {expected}."
    assert message(Path("/dev/zero")) == f"/dev/zero cannot be read: {expected}."


def test_a_file_that_is_too_large_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "large.onnx"
    with path.open("wb") as file:
        file.truncate(2**40)  # a sparse file, which takes no space and cannot be read into memory
    assert message(path) == f"{path} has 1,099,511,627,776 bytes, and at most 2,147,483,647 are accepted."


def test_a_graph_with_external_data_is_refused(tmp_path: Path, model: onnx.ModelProto, manifest: Manifest) -> None:
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    copy.graph.initializer[0].data_location = onnx.TensorProto.EXTERNAL
    graph, path = copy.SerializeToString(), tmp_path / "external.onnx"
    text = manifest.model_copy(update={"graph_sha256": graph_digest(graph)}).to_json()
    path.write_bytes(pack(Container(graph, text)))
    assert message(path) == (
        f"{path} has a graph that is not accepted: the tensor 'weights' has external data, and only data in the file is "
        "accepted."
    )


def test_a_plain_onnx_model_is_not_a_bundle(tmp_path: Path, graph: bytes) -> None:
    path = tmp_path / "plain.onnx"
    path.write_bytes(graph)
    assert message(path) == f"{path} is not a Qualms bundle: it has no manifest."


@pytest.mark.parametrize("data", [b"", b"PK\x03\x04", b"just text\n", bytes(1000)])
def test_a_file_of_another_kind_is_not_an_onnx_model(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "other.onnx"
    path.write_bytes(data)
    assert message(path).startswith(f"{path} is not an ONNX model: ")


def test_a_truncated_file_is_refused(bundle_file: Path, graph: bytes) -> None:
    data = bundle_file.read_bytes()
    ends = {*range(0, len(data), 301), *range(len(graph) - 3, len(graph) + 30), len(data) - 1}
    for end in sorted(ends):
        bundle_file.write_bytes(data[:end])
        assert message(bundle_file).startswith(f"{bundle_file} is not ")


def test_a_changed_byte_in_the_graph_is_detected(bundle_file: Path, graph: bytes) -> None:
    data = bundle_file.read_bytes()
    damaged_graph = f"{bundle_file} has a damaged graph: its SHA-256 differs from the one in the manifest."
    messages = []
    for position in range(0, len(graph), 11):
        bundle_file.write_bytes(data[:position] + bytes([data[position] ^ 0x10]) + data[position + 1 :])
        messages.append(message(bundle_file))
    assert all(text.startswith(str(bundle_file)) for text in messages)
    assert messages.count(damaged_graph) > 0.9 * len(messages)


def test_appended_bytes_are_detected(bundle_file: Path) -> None:
    bundle_file.write_bytes(bundle_file.read_bytes() + b"\x32\x03abc")
    assert message(bundle_file).startswith(f"{bundle_file} has a damaged graph: ")


def test_a_manifest_that_is_not_json_is_refused(write_text_as_manifest: WriteText, manifest: Manifest) -> None:
    path = write_text_as_manifest(manifest.to_json()[:-1])
    assert message(path).startswith(f"{path} has a damaged manifest: it is not JSON (")


def test_an_unknown_field_is_named(write_text_as_manifest: WriteText, document: dict[str, Any]) -> None:
    document["calibration"]["extra"] = 1
    path = write_text_as_manifest(json.dumps(document))
    assert message(path) == f"{path} has a damaged manifest: calibration.extra: this field is unknown."


def test_a_field_of_the_wrong_type_is_named(write_text_as_manifest: WriteText, document: dict[str, Any]) -> None:
    document["classes"] = "bee, crab, dove"
    path = write_text_as_manifest(json.dumps(document))
    assert message(path) == f"{path} has a damaged manifest: classes: Input should be a valid list."


def test_a_newer_schema_version_is_refused_with_advice_to_update(
    write_text_as_manifest: WriteText, document: dict[str, Any]
) -> None:
    document["schema_version"] = 99
    path = write_text_as_manifest(json.dumps(document))
    assert message(path) == (
        f"{path} has a manifest of schema version 99; this version of qualms reads up to 2: update qualms to open it."
    )


def test_a_manifest_of_another_graph_is_refused(write_text_as_manifest: WriteText, document: dict[str, Any]) -> None:
    document["graph_sha256"] = "0" * 64
    path = write_text_as_manifest(json.dumps(document))
    assert message(path) == f"{path} has a damaged graph: its SHA-256 differs from the one in the manifest."


# Failed writes do not change any file


@pytest.fixture
def unwritable(graph: bytes, manifest: Manifest) -> dict[str, tuple[bytes, Manifest, str]]:
    """By case: graph, manifest and the message of the refusal."""
    nested = pack(Container(graph, manifest.to_json()))
    return {
        "another graph": (
            graph + b"\x32\x00",
            manifest,
            "{path} cannot be written: the manifest belongs to another graph.",
        ),
        "no graph": (
            b"",
            manifest.model_copy(update={"graph_sha256": graph_digest(b"")}),
            "The new content of {path} is not an ONNX model: it has no graph.",
        ),
        "a bundle as graph": (
            nested,
            manifest.model_copy(update={"graph_sha256": graph_digest(nested)}),
            "The new content of {path} is not a Qualms bundle: it has two manifests, and one is accepted.",
        ),
        "an invalid copy of a manifest": (
            graph,
            manifest.model_copy(update={"classes": ["one"]}),
            "The new content of {path} has a damaged manifest: "
            "classes: List should have at least 2 items after validation, not 1.",
        ),
    }


@pytest.mark.parametrize("case", ["another graph", "no graph", "a bundle as graph", "an invalid copy of a manifest"])
@pytest.mark.parametrize("exists", [False, True])
def test_an_invalid_bundle_is_not_written(
    unwritable: dict[str, tuple[bytes, Manifest, str]], case: str, exists: bool, tmp_path: Path
) -> None:
    graph, manifest, expected = unwritable[case]
    path = tmp_path / "model.onnx"
    if exists:
        path.write_bytes(b"old")
    with pytest.raises(BundleError) as caught:
        write_bundle(path, graph, manifest)
    assert str(caught.value) == expected.format(path=path)
    assert [(file, file.read_bytes()) for file in tmp_path.iterdir()] == ([(path, b"old")] if exists else [])


@pytest.mark.parametrize("step", ["write_bytes", "replace"])
def test_a_full_disk_leaves_only_the_old_file(
    bundle_file: Path, graph: bytes, manifest: Manifest, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = bundle_file.read_bytes()

    def fail(path: Path, argument: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, step, fail)
        with pytest.raises(BundleError, match=re.escape(f"{bundle_file} cannot be written: No space left")):
            write_bundle(bundle_file, graph, manifest.model_copy(update={"version": "2"}))
    assert bundle_file.read_bytes() == before
    assert list(bundle_file.parent.iterdir()) == [bundle_file]


def test_a_folder_at_the_path_is_named(tmp_path: Path, graph: bytes, manifest: Manifest) -> None:
    with pytest.raises(BundleError, match=re.escape(f"{tmp_path} cannot be written: ")):
        write_bundle(tmp_path, graph, manifest)
    assert list(tmp_path.iterdir()) == []
