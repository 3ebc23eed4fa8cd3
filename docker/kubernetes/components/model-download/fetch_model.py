"""Fetch a model file and keep it only if its SHA-256 is the expected one. Runs in an init container, with Python alone.

    MODEL_URL=https://… MODEL_SHA256=… python3 fetch_model.py /models/model.onnx

The file appears under its name only when it is complete and correct. MODEL_MAX_BYTES limits its size. A correct file that is there
already is kept, as init containers may run again: a second copy beside it could exceed the size limit of the volume.
"""

import hashlib
import os
import re
import sys
import urllib.request
from http.client import HTTPException
from pathlib import Path

MAX_BYTES = 2 * 2**30
TIMEOUT_SECONDS = 30.0
_CHUNK = 2**20


class FetchError(Exception):
    """The file cannot be fetched, or is not the expected one."""


def fetch(url: str, digest: str, path: Path, max_bytes: int) -> None:
    """Write the file at `url` to `path` if `digest` is its SHA-256 in hexadecimal digits."""
    if not url.startswith(("https://", "http://")):
        raise FetchError(f"MODEL_URL is {url!r}; it should begin with https:// or http://.")
    if not re.fullmatch("[0-9a-f]{64}", digest):
        raise FetchError(f"MODEL_SHA256 is {digest!r}; it should be 64 hexadecimal digits in lower case.")
    if path.exists() and _digest(path) == digest:
        return
    partial = path.with_name(path.name + ".part")
    try:
        received = _download(url, partial, max_bytes)
        if received != digest:
            raise FetchError(f"The SHA-256 of {url} is {received}; MODEL_SHA256 is {digest}.")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _download(url: str, path: Path, max_bytes: int) -> str:
    """Write the file at `url` to `path`; return its SHA-256."""
    hasher, size = hashlib.sha256(), 0
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_SECONDS) as reply, path.open("wb") as file:
            expected = reply.headers.get("Content-Length")
            while chunk := reply.read(_CHUNK):
                size += len(chunk)
                if size > max_bytes:
                    raise FetchError(f"{url} is larger than MODEL_MAX_BYTES, {max_bytes}.")
                hasher.update(chunk)
                file.write(chunk)
    except (OSError, HTTPException, ValueError) as error:  # ValueError: the URL, for example its port, is malformed
        raise FetchError(f"{url} cannot be fetched: {error}.") from None
    if expected is not None and expected.isdecimal() and size != int(expected):
        raise FetchError(f"{url} ended after {size} of {expected} bytes.")
    return hasher.hexdigest()


def main() -> int:
    """Fetch the file that the environment names to the path in the only argument."""
    url, digest = os.environ.get("MODEL_URL", ""), os.environ.get("MODEL_SHA256", "")
    limit = os.environ.get("MODEL_MAX_BYTES") or str(MAX_BYTES)
    try:
        if not limit.isdecimal():
            raise FetchError(f"MODEL_MAX_BYTES is {limit!r}; it should be a number of bytes.")  # noqa: TRY301
        fetch(url, digest, Path(sys.argv[1]), int(limit))
    except FetchError as error:
        print(f"fetch_model: {error}", file=sys.stderr)
        return 1
    print(f"fetch_model: {sys.argv[1]} from {url} has the expected SHA-256 {digest}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
