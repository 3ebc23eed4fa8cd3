"""Read and write the graph and the manifest of one ONNX file, at the level of protobuf fields.

An ONNX file is a sequence of top-level protobuf fields, and the manifest is one of them, a metadata entry. Replacing it
only cuts and joins bytes: the graph and its SHA-256 do not change, and recalibration does not need the onnx package.
"""

from typing import Final, NamedTuple

from qualms.bundle.checks.protobuf import BYTES, MalformedError, bytes_field, fields
from qualms.errors import BundleError

MANIFEST_KEY = "qualms.manifest"
MAX_MANIFEST_BYTES: Final = 256 * 2**20
"""five times the manifest of 50,000 calibration images in 48 settings, about 50 MB"""

_GRAPH_FIELD = 7  # ModelProto.graph
_METADATA_FIELD = 14  # ModelProto.metadata_props, entries of (key = 1, value = 2)
_MAX_FIELDS = 10_000
"""of the whole model and of one metadata entry; exporters write about ten"""


class Container(NamedTuple):
    """The two parts of a bundle file."""

    graph: bytes
    """the ONNX model without the manifest"""
    manifest: str | None
    """the manifest's JSON text, or None if the file has none"""


def unpack(data: bytes, source: str = "The file") -> Container:
    """Split a file's bytes into graph and manifest; the BundleError names `source` if they are not an ONNX model."""
    try:
        return _split(data)
    except MalformedError as error:
        raise BundleError(f"{source} is not an ONNX model: {error}.") from None
    except _ManifestError as error:
        raise BundleError(f"{source} is not a Qualms bundle: {error}.") from None


def pack(container: Container) -> bytes:
    """Join graph and manifest into the bytes of one file; the manifest is the last field."""
    if container.manifest is None:
        return container.graph
    entry = bytes_field(1, MANIFEST_KEY.encode()) + bytes_field(2, container.manifest.encode())
    return container.graph + bytes_field(_METADATA_FIELD, entry)


class _ManifestError(Exception):
    """The model has no manifest that is accepted; the message is the reason."""


def _split(data: bytes) -> Container:
    view = memoryview(data)
    graph_fields: list[memoryview] = []
    manifest: str | None = None
    has_graph = False
    for count, field in enumerate(fields(data)):
        if count >= _MAX_FIELDS:
            raise MalformedError(f"it has more than {_MAX_FIELDS:,} top-level fields")
        has_graph |= (field.number, field.wire_type) == (_GRAPH_FIELD, BYTES)
        if (field.number, field.wire_type) == (_METADATA_FIELD, BYTES):
            key, value = _metadata_entry(data, field.body, field.end)
            if key == MANIFEST_KEY.encode():
                if manifest is not None:
                    raise _ManifestError("it has two manifests, and one is accepted")
                manifest = _text(value)
                continue
        graph_fields.append(view[field.start : field.end])
    if not has_graph:
        raise MalformedError("it has no graph")
    return Container(b"".join(graph_fields), manifest)


def _metadata_entry(data: bytes, start: int, end: int) -> tuple[bytes, memoryview]:
    view = memoryview(data)
    parts: dict[int, memoryview] = {}
    for count, field in enumerate(fields(data, start, end)):
        if count >= _MAX_FIELDS:
            raise MalformedError(f"a metadata entry has more than {_MAX_FIELDS:,} fields")
        parts[field.number] = view[field.body : field.end]
    key = parts.get(1, memoryview(b""))
    return bytes(key[: len(MANIFEST_KEY) + 1]), parts.get(2, memoryview(b""))


def _text(value: memoryview) -> str:
    if len(value) > MAX_MANIFEST_BYTES:
        raise _ManifestError(f"its manifest has {len(value):,} bytes, and at most {MAX_MANIFEST_BYTES:,} are accepted")
    try:
        return str(value, "utf-8")
    except UnicodeDecodeError:
        raise MalformedError("its manifest is not UTF-8 text") from None
