"""Read and write the graph and the manifest of one ONNX file, at the level of protobuf fields.

An ONNX file is a sequence of top-level protobuf fields, and the manifest is one of them, a metadata entry. Replacing it
only cuts and joins bytes: the graph and its SHA-256 do not change, and recalibration does not need the onnx package.

A signed file ends with one more metadata entry, the signature. It covers every byte before it, so it has to be the last field,
and in the one encoding that `pack` writes.
"""

from typing import Final, NamedTuple

from qualms.bundle.checks.protobuf import BYTES, MalformedError, bytes_field, fields
from qualms.errors import BundleError

MANIFEST_KEY = "qualms.manifest"
SIGNATURE_KEY = "qualms.signature"
MAX_MANIFEST_BYTES: Final = 256 * 2**20
"""five times the manifest of 50,000 calibration images in 48 settings, about 50 MB"""

_GRAPH_FIELD = 7  # ModelProto.graph
_METADATA_FIELD = 14  # ModelProto.metadata_props, entries of (key = 1, value = 2)
_KEY_BYTES = max(len(MANIFEST_KEY), len(SIGNATURE_KEY)) + 1
"""enough of a metadata entry's key to tell whether it is one of ours"""
_MAX_SIGNATURE_BYTES = 1024
"""a signature has 141 bytes"""
_MAX_FIELDS = 10_000
"""of the whole model and of one metadata entry; exporters write about ten"""


class Container(NamedTuple):
    """The parts of a bundle file."""

    graph: bytes
    """the ONNX model without manifest and signature"""
    manifest: str | None
    """the manifest's JSON text, or None if the file has none"""
    signature: str | None = None
    """the signature's text, or None if the file is not signed"""


def unpack(data: bytes, source: str = "The file") -> Container:
    """Split a file's bytes into graph and manifest; the BundleError names `source` if they are not an ONNX model."""
    try:
        return _split(data)
    except MalformedError as error:
        raise BundleError(f"{source} is not an ONNX model: {error}.") from None
    except _ManifestError as error:
        raise BundleError(f"{source} is not a Qualms bundle: {error}.") from None


def pack(container: Container) -> bytes:
    """Join graph, manifest and signature into the bytes of one file, in this order."""
    parts = [container.graph]
    if container.manifest is not None:
        parts.append(_entry(MANIFEST_KEY, container.manifest))
    if container.signature is not None:
        parts.append(_entry(SIGNATURE_KEY, container.signature))
    return b"".join(parts)


def signed_part(data: bytes, signature: str | None) -> memoryview:
    """The bytes of a file that its signature covers: all before it; the whole file if it is None."""
    return memoryview(data)[: len(data) - len(_entry(SIGNATURE_KEY, signature) if signature is not None else b"")]


def with_signature(unsigned: bytes | memoryview, signature: str) -> bytes:
    """The bytes of a file without a signature, followed by this one."""
    return b"".join([unsigned, _entry(SIGNATURE_KEY, signature)])


def _entry(key: str, value: str) -> bytes:
    return bytes_field(_METADATA_FIELD, bytes_field(1, key.encode()) + bytes_field(2, value.encode()))


class _ManifestError(Exception):
    """The model has no manifest that is accepted; the message is the reason."""


def _split(data: bytes) -> Container:
    view = memoryview(data)
    graph_fields: list[memoryview] = []
    manifest: str | None = None
    signature: str | None = None
    has_graph = False
    for count, field in enumerate(fields(data)):
        if count >= _MAX_FIELDS:
            raise MalformedError(f"it has more than {_MAX_FIELDS:,} top-level fields")
        if signature is not None:
            raise _ManifestError("it has fields after its signature, which is the last one of a signed file")
        has_graph |= (field.number, field.wire_type) == (_GRAPH_FIELD, BYTES)
        if (field.number, field.wire_type) == (_METADATA_FIELD, BYTES):
            key, value = _metadata_entry(data, field.body, field.end)
            if key == MANIFEST_KEY.encode():
                if manifest is not None:
                    raise _ManifestError("it has two manifests, and one is accepted")
                manifest = _text(value)
                continue
            if key == SIGNATURE_KEY.encode():
                signature = _signature_text(value)
                if view[field.start : field.end] != _entry(SIGNATURE_KEY, signature):
                    raise _ManifestError("its signature has another encoding than the one that is accepted")
                continue
        graph_fields.append(view[field.start : field.end])
    if not has_graph:
        raise MalformedError("it has no graph")
    return Container(b"".join(graph_fields), manifest, signature)


def _metadata_entry(data: bytes, start: int, end: int) -> tuple[bytes, memoryview]:
    view = memoryview(data)
    parts: dict[int, memoryview] = {}
    for count, field in enumerate(fields(data, start, end)):
        if count >= _MAX_FIELDS:
            raise MalformedError(f"a metadata entry has more than {_MAX_FIELDS:,} fields")
        parts[field.number] = view[field.body : field.end]
    key = parts.get(1, memoryview(b""))
    return bytes(key[:_KEY_BYTES]), parts.get(2, memoryview(b""))


def _text(value: memoryview) -> str:
    if len(value) > MAX_MANIFEST_BYTES:
        raise _ManifestError(f"its manifest has {len(value):,} bytes, and at most {MAX_MANIFEST_BYTES:,} are accepted")
    try:
        return str(value, "utf-8")
    except UnicodeDecodeError:
        raise MalformedError("its manifest is not UTF-8 text") from None


def _signature_text(value: memoryview) -> str:
    if len(value) > _MAX_SIGNATURE_BYTES:
        raise _ManifestError(
            f"its signature has {len(value):,} bytes, and at most {_MAX_SIGNATURE_BYTES:,} are accepted"
        )
    try:
        return str(value, "ascii")
    except UnicodeDecodeError:
        raise _ManifestError("its signature is not ASCII text") from None
