"""Open and verify a bundle, or write one: the only door between a file and the rest of the program."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from service.bundle.atomic import write_bytes
from service.bundle.container import Container, pack, unpack
from service.bundle.errors import BundleError
from service.bundle.manifest import Manifest


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
        raise BundleError(f"{path}: there is no such file") from None
    except OSError as error:
        raise BundleError(f"{path}: the file cannot be read ({error.strerror})") from None
    try:
        return _verified(path, data)
    except BundleError as error:
        raise BundleError(f"{path}: {error}") from None


def write_bundle(path: Path, graph: bytes, manifest: Manifest) -> Bundle:
    """Write graph and manifest as one file under its final name, all or nothing, and return it reopened."""
    if manifest.graph_sha256 != graph_digest(graph):
        raise BundleError(f"{path}: the manifest was made for another graph")
    write_bytes(path, pack(Container(graph, manifest.to_json())))
    return open_bundle(path)


def graph_digest(graph: bytes) -> str:
    """SHA-256 of a graph without manifest, in hex."""
    return hashlib.sha256(graph).hexdigest()


def _verified(path: Path, data: bytes) -> Bundle:
    graph, text = unpack(data)
    if text is None:
        raise BundleError("this ONNX model is not a Qualms bundle: it carries no manifest")
    manifest = Manifest.from_json(text)
    if graph_digest(graph) != manifest.graph_sha256:
        raise BundleError("the graph is damaged: its SHA-256 is not the one in the manifest")
    return Bundle(path, manifest, graph, hashlib.sha256(data).hexdigest())
