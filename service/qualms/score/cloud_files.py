"""Files in object stores and other file systems that pyarrow reads, by URI: s3://, gs://, hdfs://, file:// and others."""

import errno
import re
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from qualms.errors import ExtraMissingError, ImageError, first_line
from qualms.score.items import MAX_IMAGE_BYTES, Item, ScoreError, too_large

_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
_REASONS = (
    ("ACCESS_DENIED", "permission denied"),
    ("HTTP status 403", "permission denied"),
    ("Permission denied", "permission denied"),
    ("NO_SUCH_BUCKET", "there is no such bucket"),
    ("NO_SUCH_KEY", "there is no such file"),
    ("HTTP status 404", "there is no such file"),
    ("NETWORK_CONNECTION", "the server cannot be reached"),
)
"""parts of the long messages of pyarrow, and what they mean"""


def is_uri(path: str) -> bool:
    """Whether an input is a URI."""
    return _URI.match(path) is not None


def cloud_items(
    uri: str, is_image: Callable[[str], bool], in_order: Callable[[Iterable[str]], Iterator[str]]
) -> Iterator[Item]:
    """A file, or all images of a folder and of those below it, sorted by path; ScoreError if it cannot be listed.

    `in_order` sorts texts by their bytes, with a fixed amount of memory.
    """
    system, path = _open(uri)
    from pyarrow import ArrowException, fs  # noqa: PLC0415  # an extra

    try:
        (info,) = system.get_file_info([path])
        if info.type == fs.FileType.NotFound:
            raise ScoreError(f"There is no file or folder {_shown(uri)}.")
        if info.type != fs.FileType.Directory:
            yield _item(uri, path, path, info.size, info.mtime_ns)
            return
        # Size and time follow the path, so that they are sorted with it; no path contains a null character.
        found = (f"{one.path}\0{one.size}\0{one.mtime_ns or 0}" for one in _walk(fs, system, path, is_image))
        for line in in_order(found):
            name, size, stamp = line.split("\0")
            yield _item(uri, path, name, int(size), int(stamp))
    except (OSError, ArrowException) as error:
        raise ScoreError(f"{_shown(uri)} cannot be listed: {_reason(error)}.") from None


def read_cloud_file(uri: str) -> bytes:
    """The bytes of a file; ImageError if it cannot be read or is too large."""
    try:
        system, path = _open(uri)
    except ScoreError as error:
        raise ImageError(str(error)) from None
    from pyarrow import ArrowException  # noqa: PLC0415  # an extra

    try:
        with system.open_input_file(path) as file:
            size = file.size()
            if size > MAX_IMAGE_BYTES:
                raise ImageError(too_large(size), reason="too_large")
            data: bytes = file.read()
    except (OSError, ArrowException) as error:
        raise ImageError(f"The file cannot be read: {_reason(error)}.") from None
    return data


def _walk(fs: Any, system: Any, folder: str, is_image: Callable[[str], bool]) -> Iterator[Any]:
    """The images in a folder and in those below it, with one folder at a time in memory."""
    waiting = [folder]
    while waiting:
        for one in system.get_file_info(fs.FileSelector(waiting.pop())):
            if one.base_name.startswith("."):
                continue
            if one.type == fs.FileType.Directory:
                waiting.append(one.path)
            elif is_image(one.path):
                yield one


def _item(uri: str, root: str, path: str, size: int | None, stamp: int | None) -> Item:
    """The file at a path at or below `root`, the path of `uri`. Its name has no credentials, which a URI may contain."""
    parts = urlsplit(uri)
    below = quote(path.removeprefix(root)) if path != root else ""
    source = parts._replace(path=parts.path.rstrip("/") + below if below else parts.path).geturl()
    return Item(f"{parts.scheme}://{path}", source, "cloud", size or 0, stamp or 0)


def _shown(uri: str) -> str:
    """A URI for messages: without the password that it may contain."""
    parts = urlsplit(uri)
    return uri if parts.password is None else parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def _open(uri: str) -> tuple[Any, str]:
    """The file system and the path in it."""
    parts = urlsplit(uri)
    try:
        system, root = _system(parts._replace(path="/", fragment="").geturl())
    except ImportError:
        raise ExtraMissingError(f"{parts.scheme}:// needs pyarrow: run pip install 'qualms[parquet]'.") from None
    except (OSError, ValueError, NotImplementedError) as error:
        raise ScoreError(f"{_shown(uri)} cannot be opened: {_reason(error)}.") from None
    return system, (root.rstrip("/") + unquote(parts.path)).rstrip("/") or "/"


@lru_cache(maxsize=16)
def _system(uri: str) -> tuple[Any, str]:
    """Kept, because opening one may ask a server for credentials."""
    from pyarrow import fs  # noqa: PLC0415  # an extra

    system, root = fs.FileSystem.from_uri(uri)
    return system, root


def _reason(error: Exception) -> str:
    """The meaning of the message of pyarrow, or its first line."""
    if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EPERM):
        return "permission denied"
    text = str(error)
    return next((meaning for part, meaning in _REASONS if part in text), None) or first_line(error)
