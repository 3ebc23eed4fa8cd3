"""Open and verify a bundle, or write one: the only door between a file and the rest of the program."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from qualms.bundle.container import Container, pack, unpack
from qualms.bundle.manifest import Manifest
from qualms.errors import BundleError
from qualms.files import write_bytes


@dataclass(frozen=True)
class Bundle:
    """A verified bundle in memory."""

    path: Path
    manifest: Manifest
    graph: bytes
    """the ONNX model without the manifest, exactly the bytes `manifest.graph_sha256` is of"""
    digest: str
    """SHA-256 of the whole file: the model's identity"""


def open_bundle(path: Path) -> Bundle:
    """Read `path`, check that it is a bundle of a version we know and that its graph is undamaged."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise BundleError(f"{path} does not exist.") from None
    except OSError as error:
        raise BundleError(f"{path} cannot be read: {error.strerror}.") from None
    return _verified(path, data, str(path))


def write_bundle(path: Path, graph: bytes, manifest: Manifest) -> Bundle:
    """Write graph and manifest as one file under its final name, all or nothing, and return what was written.

    It is verified before it is written, so that what cannot be opened never takes the place of a good file.
    """
    if manifest.graph_sha256 != graph_digest(graph):
        raise BundleError(f"{path} cannot be written: the manifest was made for another graph.")
    data = pack(Container(graph, manifest.to_json()))
    bundle = _verified(path, data, f"What was to be written to {path}")
    try:
        write_bytes(path, data)
    except OSError as error:
        raise BundleError(f"{path} cannot be written: {error.strerror}.") from None
    return bundle


def graph_digest(graph: bytes) -> str:
    """SHA-256 of a graph without manifest, in hex."""
    return hashlib.sha256(graph).hexdigest()


def _verified(path: Path, data: bytes, source: str) -> Bundle:
    graph, text = unpack(data, source)
    if text is None:
        raise BundleError(f"{source} is not a Qualms bundle: it carries no manifest.")
    manifest = Manifest.from_json(text, source)
    if graph_digest(graph) != manifest.graph_sha256:
        raise BundleError(f"{source} has a damaged graph: its SHA-256 is not the one in the manifest.")
    return Bundle(path, manifest, graph, hashlib.sha256(data).hexdigest())
