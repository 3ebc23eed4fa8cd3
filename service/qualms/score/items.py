"""The files to score: each is one line of the list, with the way in which its bytes are read."""

import errno
import json
import os
import stat
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import orjson

from qualms.errors import ImageError, QualmsError

MAX_IMAGE_BYTES = 64 * 2**20
"""size of the largest image file, in a folder or in an archive"""
_ZIP_HEADER = 30
_DEFLATED = 8
_ERROR = "The file cannot be read: {}."


class ScoreError(QualmsError):
    """Files cannot be scored as requested: an input, an option or the output is not accepted."""


class Item(NamedTuple):
    """One file to score: one row of the output."""

    name: str
    """the path of the row; members of archives have the path of the archive before theirs"""
    source: str
    """the path of the file or of its archive"""
    kind: Literal["file", "range", "zip", "stream", "cloud", "error"]
    """a file; bytes of an archive as they are; a member of a zip; a member of a compressed tar; a URI; nothing that can be read"""
    size: int = 0
    """bytes of the image file"""
    stamp: int = 0
    """time of the last change of the source, in nanoseconds"""
    offset: int = 0
    """of the bytes in the archive; for a compressed tar, in the decompressed bytes; for a zip, of the member's header"""
    stored: int = 0
    """bytes of the compressed member of a zip"""
    method: int = 0
    """of compression, as in zip files"""
    checksum: int = 0
    """CRC-32 of a member of a zip"""
    error: str = ""

    def to_json(self) -> bytes:
        """One line; names that are not valid text are escaped."""
        try:
            return orjson.dumps(tuple(self), option=orjson.OPT_APPEND_NEWLINE)
        except TypeError:  # bytes of a name that are not UTF-8
            return json.dumps(self, separators=(",", ":")).encode() + b"\n"

    @classmethod
    def from_json(cls, line: bytes) -> "Item":
        """The item of a line."""
        try:
            return cls(*orjson.loads(line))
        except orjson.JSONDecodeError:
            return cls(*json.loads(line))

    @property
    def path(self) -> str:
        """The name as text that can be encoded; bytes that are not UTF-8 are escaped."""
        if self.name.isascii():
            return self.name
        return self.name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def read_list(path: Path) -> Iterator[Item]:
    """The items of a list, one per line."""
    with path.open("rb") as lines:
        yield from map(Item.from_json, lines)


def error_item(name: str, error: str) -> Item:
    """A row with only an error."""
    return Item(name, name, "error", error=error)


def file_item(path: str) -> Item:
    """A file of its own; one that does not exist becomes an error when it is read."""
    try:
        status = os.stat(path)  # noqa: PTH116  # three times as fast as pathlib
    except (OSError, ValueError):
        return Item(path, path, "file")
    return Item(path, path, "file", status.st_size, status.st_mtime_ns)


def read_item(item: Item) -> bytes:
    """The bytes of an image file; ImageError if they cannot be read. Not for members of compressed tar files."""
    if item.kind == "error":
        raise ImageError(item.error)
    if item.kind == "cloud":
        from qualms.score.cloud_files import read_cloud_file  # noqa: PLC0415  # an extra

        return read_cloud_file(item.source)
    try:
        # Without O_NONBLOCK, opening a named pipe would wait for a writer.
        descriptor = os.open(item.source, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
    except OSError as error:
        raise ImageError(_ERROR.format(error.strerror)) from None
    except ValueError:  # a null character in the name
        raise ImageError(_ERROR.format("its name is not valid")) from None
    try:
        return _read(descriptor, item)
    except OSError as error:
        raise ImageError(_ERROR.format(error.strerror)) from None
    finally:
        os.close(descriptor)


def too_large(size: int) -> str:
    """The error of a file with so many bytes."""
    return f"The file has {size:,} bytes; at most {MAX_IMAGE_BYTES:,} are accepted."


def _read(descriptor: int, item: Item) -> bytes:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise ImageError("The path is not a regular file.")
    if item.kind == "zip":
        return _read_zip_member(descriptor, item)
    size, offset = (status.st_size, 0) if item.kind == "file" else (item.size, item.offset)
    if size > MAX_IMAGE_BYTES:
        raise ImageError(too_large(size), reason="too_large")
    return _read_range(descriptor, offset, size)


def _read_range(descriptor: int, offset: int, size: int) -> bytes:
    if offset + size > 2**63 - 1:
        raise OSError(errno.EINVAL, "it ends early")
    data = os.pread(descriptor, size, offset)
    while len(data) < size:
        more = os.pread(descriptor, size - len(data), offset + len(data))
        if not more:
            raise OSError(errno.EIO, "it ends early")
        data += more
    return data


def _read_zip_member(descriptor: int, item: Item) -> bytes:
    """The decompressed bytes; never more than the size in the directory of the zip, which was checked."""
    header = _read_range(descriptor, item.offset, _ZIP_HEADER)
    if header[:4] != b"PK\x03\x04":
        raise ImageError("The member of the archive is damaged: its header is missing.")
    skipped = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    data = _read_range(descriptor, item.offset + _ZIP_HEADER + skipped, item.stored)
    if item.method == _DEFLATED:
        try:
            data = zlib.decompressobj(-zlib.MAX_WBITS).decompress(data, item.size + 1)
        except zlib.error:
            raise ImageError("The member of the archive is damaged: it cannot be decompressed.") from None
    if len(data) != item.size or zlib.crc32(data) != item.checksum:
        raise ImageError("The member of the archive is damaged: its bytes do not have the stated size and checksum.")
    return data
