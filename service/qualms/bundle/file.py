"""Open, verify and write bundle files."""

import errno
import hashlib
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from qualms.bundle.checks.graph_checks import check_graph
from qualms.bundle.container import Container, pack, signed_part, unpack, with_signature
from qualms.bundle.manifest import Manifest
from qualms.bundle.signature import Signature, Verify, signed_message
from qualms.errors import BundleError
from qualms.files import write_bytes

MAX_BYTES: Final = 2**31 - 1
"""the largest protobuf message, and therefore the largest model that ONNX Runtime reads from memory"""


@dataclass(frozen=True)
class Bundle:
    """A verified bundle in memory."""

    path: Path
    manifest: Manifest
    graph: bytes
    """the ONNX model without the manifest; `manifest.graph_sha256` is its digest"""
    digest: str
    """SHA-256 of the whole file, which identifies the model"""
    signature: Signature | None = None
    """verified only if `open_bundle` was given a function that verifies it"""


def open_bundle(path: Path, verify_signature: Verify | None = None) -> Bundle:
    """Read a bundle and verify its manifest, schema version, graph digest and graph.

    `verify_signature` is called before anything but the top-level fields is parsed, and raises BundleError to refuse the file.
    """
    return _verify(path, _read_bundle(path), str(path), verify_signature)


def bundle_from_bytes(data: bytes, source: str) -> Bundle:
    """Verify the bytes of a bundle that came from elsewhere; `source` names them in errors."""
    return _verify(Path(source), data, source)


def write_bundle(path: Path, graph: bytes, manifest: Manifest) -> Bundle:
    """Write graph and manifest atomically as one file and return the bundle.

    The bytes are verified first, so an invalid bundle never replaces a valid file.
    """
    if manifest.graph_sha256 != graph_digest(graph):
        raise BundleError(f"{path} cannot be written: the manifest belongs to another graph.")
    data = pack(Container(graph, manifest.to_json()))
    bundle = _verify(path, data, f"The new content of {path}")
    try:
        write_bytes(path, data)
    except OSError as error:
        raise BundleError(f"{path} cannot be written: {error.strerror}.") from None
    return bundle


def sign_bundle(path: Path, out: Path, sign: Callable[[bytes], Signature]) -> Bundle:
    """Write a copy of a bundle with a signature to `out`, which may be the same path; an earlier signature is replaced."""
    data = _read_bundle(path)
    unsigned = signed_part(data, unpack(data, str(path)).signature)
    signed = with_signature(unsigned, sign(signed_message(unsigned)).to_text())
    if len(signed) > MAX_BYTES:
        raise BundleError(
            f"{path} has {len(unsigned):,} bytes, and no room for a signature: {MAX_BYTES:,} are accepted."
        )
    bundle = _verify(out, signed, str(path))
    try:
        write_bytes(out, signed)
    except OSError as error:
        raise BundleError(f"{out} cannot be written: {error.strerror}.") from None
    return bundle


def graph_digest(graph: bytes) -> str:
    """SHA-256 of a graph without manifest, in hex."""
    return hashlib.sha256(graph).hexdigest()


def _read_bundle(path: Path) -> bytes:
    try:
        return _read(path)
    except FileNotFoundError:
        raise BundleError(f"{path} does not exist.") from None
    except OSError as error:
        raise BundleError(f"{path} cannot be read: {error.strerror}.") from None


def _read(path: Path) -> bytes:
    """The bytes of a regular file of an accepted size."""
    mode = path.stat().st_mode  # before the file is opened: a pipe without a writer would block
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(mode):
        raise BundleError(f"{path} cannot be read: it is a device, pipe or socket, and a regular file is accepted.")
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > MAX_BYTES:
            raise BundleError(f"{path} has {size:,} bytes, and at most {MAX_BYTES:,} are accepted.")
        return file.read(size)


def _verify(path: Path, data: bytes, source: str, verify_signature: Verify | None = None) -> Bundle:
    graph, text, signature_text = unpack(data, source)
    signature = None if signature_text is None else Signature.from_text(signature_text, source)
    if verify_signature is not None:
        verify_signature(signature, signed_message(signed_part(data, signature_text)), source)
    if text is None:
        raise BundleError(f"{source} is not a Qualms bundle: it has no manifest.")
    manifest = Manifest.from_json(text, source)
    if graph_digest(graph) != manifest.graph_sha256:
        raise BundleError(f"{source} has a damaged graph: its SHA-256 differs from the one in the manifest.")
    check_graph(graph, source)
    return Bundle(path, manifest, graph, hashlib.sha256(data).hexdigest(), signature)
