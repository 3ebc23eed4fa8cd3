"""Members of zip and tar archives, listed without extracting anything and with bounded memory.

The directory of a zip is read entry by entry: `zipfile` would hold all entries in memory. Tar files are read by `tarfile` through
a stream that refuses long headers. Hostile archives are bounded by the limits below.
"""

import bz2
import lzma
import os
import stat
import struct
import tarfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Protocol

from qualms.errors import first_line
from qualms.score.items import MAX_IMAGE_BYTES, Item, ScoreError, error_item, too_large

MAX_MEMBERS = 10_000_000
"""members of one archive"""
MAX_RATIO = 200
"""bytes of an archive's members for each byte of the archive; image files are compressed already"""
FREE_BYTES = 64 * 2**20
"""bytes that an archive may expand to whatever its size"""
MAX_FREE_MEMBER = 2**20
"""bytes that one member may expand to whatever its compressed size"""
MAX_HEADER = 2**20
"""bytes of one header of a tar file, such as a long name"""
MAX_XZ_MEMORY = 256 * 2**20
_PIECE = 256 * 1024
_MAX_COMMENT = 2**16
_ENCRYPTED, _UTF8 = 0x1, 0x800
_METHODS = (0, 8)
_ZIP64 = 0xFFFFFFFF

ARCHIVE_ENDINGS = (".zip", ".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz")
OTHER_ARCHIVES = (".tar.zst", ".tzst", ".7z", ".rar", ".tar.lz4")
"""endings of archives that are not accepted"""


class ArchiveError(Exception):
    """The archive is damaged or expands too much; the message is the rest of a sentence."""


class Decompressor(Protocol):
    """The interface that the decompressors of the standard library share."""

    @property
    def eof(self) -> bool: ...  # noqa: D102
    @property
    def needs_input(self) -> bool: ...  # noqa: D102
    @property
    def unused_data(self) -> bytes: ...  # noqa: D102
    def decompress(self, data: bytes, max_length: int = -1) -> bytes: ...  # noqa: D102


class _Gzip:
    """zlib's decompressor with the interface of those for bz2 and xz."""

    def __init__(self) -> None:
        self._inner = zlib.decompressobj(16 + zlib.MAX_WBITS)

    @property
    def eof(self) -> bool:
        return self._inner.eof

    @property
    def needs_input(self) -> bool:
        return not self._inner.unconsumed_tail

    @property
    def unused_data(self) -> bytes:
        return self._inner.unused_data

    def decompress(self, data: bytes, max_length: int = -1) -> bytes:
        return self._inner.decompress(self._inner.unconsumed_tail + data, max_length)


_DECOMPRESSORS: dict[str, Callable[[], Decompressor]] = {
    "gz": _Gzip,
    "bz2": bz2.BZ2Decompressor,
    "xz": lambda: lzma.LZMADecompressor(memlimit=MAX_XZ_MEMORY),
}


class TarStream:
    """The decompressed bytes of a tar file, read forward only, at most MAX_HEADER or one image at a time."""

    def __init__(self, file: IO[bytes], compression: str | None) -> None:
        self._file = file
        self._make = None if compression is None else _DECOMPRESSORS[compression]
        self._decompressor = None if self._make is None else self._make()
        self._buffer = b""
        self._position = self._read = self._written = 0

    def tell(self) -> int:
        """The position in the decompressed bytes."""
        return self._position

    def seek(self, position: int) -> int:
        """Skip forward to a position."""
        if self._make is None:
            self._file.seek(position)
            self._position = position
        while self._position < position:
            if not self.read(min(_PIECE, position - self._position)):
                break
        if self._position > position:
            raise ArchiveError("its headers overlap")
        return self._position

    def read(self, size: int) -> bytes:
        """Up to `size` bytes, fewer only at the end."""
        if size > max(MAX_HEADER, MAX_IMAGE_BYTES):
            raise ArchiveError(f"it has a header of {size:,} bytes, and at most {MAX_HEADER:,} are accepted")
        pieces, missing = [], size
        while missing > 0 and (piece := self._next(missing)):
            pieces.append(piece)
            missing -= len(piece)
        data = b"".join(pieces)
        self._position += len(data)
        return data

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _next(self, size: int) -> bytes:
        if self._decompressor is None:
            return self._file.read(min(size, _PIECE))
        while not self._buffer:
            if self._decompressor.eof:  # several compressed streams may follow each other
                rest = self._decompressor.unused_data.lstrip(b"\0") or self._input().lstrip(b"\0")
                if not rest:
                    return b""
                assert self._make is not None
                self._decompressor = self._make()
            else:
                rest = self._input() if self._decompressor.needs_input else b""
                if not rest and self._decompressor.needs_input:
                    raise ArchiveError("it ends early")
            self._buffer = self._decompressor.decompress(rest, _PIECE)
            self._written += len(self._buffer)
            if self._written > FREE_BYTES + MAX_RATIO * self._read:
                raise ArchiveError(_BOMB)
        piece, self._buffer = self._buffer[:size], self._buffer[size:]
        return piece

    def _input(self) -> bytes:
        data = self._file.read(_PIECE)
        self._read += len(data)
        return data


_NO_FILE = "The member of the archive is a link or another special file; accepted are regular files."
_BOMB = f"it expands to more than {MAX_RATIO} times its size"
_HEADER = struct.Struct("<4s6H3I5H2I")


def is_archive(path: str) -> bool:
    """Whether the file is an archive by its ending; ScoreError for archives that are not accepted."""
    name = path.lower()
    if name.endswith(OTHER_ARCHIVES):
        raise ScoreError(f"{path} is an archive of another kind; accepted are {', '.join(ARCHIVE_ENDINGS)}.")
    return name.endswith(ARCHIVE_ENDINGS)


def open_stream(path: str) -> TarStream:
    """The bytes of a tar file."""
    return TarStream(Path(path).open("rb"), _compression(path))


def members(path: str, is_image: Callable[[str], bool]) -> Iterator[Item]:
    """The image files in an archive, in its order; a damaged or hostile archive ends with an item that is its error."""
    count = 0
    try:
        status = os.stat(path)  # noqa: PTH116
        if not stat.S_ISREG(status.st_mode):
            yield error_item(path, "The path is not a regular file.")
            return
        listed = _zip_members(path, status) if path.lower().endswith(".zip") else _tar_members(path, status)
        for number, item in enumerate(listed):
            if number >= MAX_MEMBERS:
                raise ArchiveError(f"it has more than {MAX_MEMBERS:,} members")  # noqa: TRY301  # one place for all errors
            if _is_visible(item.name[len(path) + 1 :]) and is_image(item.name):
                count += 1
                yield item
    except OSError as error:
        yield error_item(path, f"The archive cannot be read: {error.strerror or first_line(error)}.")
    except ArchiveError as error:
        yield error_item(path, f"The archive is not read after {count:,} images: {error}.")
    except Exception as error:  # tarfile and the decompressors raise many kinds of errors on hostile bytes
        yield error_item(path, f"The archive is damaged after {count:,} images: {first_line(error)}.")


def _is_visible(inner: str) -> bool:
    """Whether neither a member nor one of its folders is hidden, that is, has a name that begins with a dot."""
    return not any(name.startswith(".") and name not in (".", "..") for name in inner.split("/"))


def _compression(path: str) -> str | None:
    name = path.lower()
    endings = {"gz": (".gz", ".tgz"), "bz2": (".bz2", ".tbz2"), "xz": (".xz", ".txz")}
    return next((kind for kind, ends in endings.items() if name.endswith(ends)), None)


def _tar_members(path: str, status: os.stat_result) -> Iterator[Item]:
    kind = "range" if _compression(path) is None else "stream"
    stream = open_stream(path)
    try:
        # Only the methods that TarStream has are used while reading.
        headers = _Headers(stream)
        with tarfile.TarFile(fileobj=headers) as tar:  # type: ignore[arg-type]
            while (member := tar.next()) is not None:
                tar.members.clear()  # type: ignore[attr-defined]  # tarfile would keep all of them
                if member.isdir():
                    continue
                name = f"{path}/{member.name}"
                if not member.isreg() or member.issparse():
                    yield error_item(name, _NO_FILE)
                elif member.size > MAX_IMAGE_BYTES:
                    yield error_item(name, too_large(member.size))
                else:
                    yield Item(name, path, kind, member.size, status.st_mtime_ns, member.offset_data)  # type: ignore[arg-type]
        headers.check_end()
    finally:
        stream.close()


class _Headers:
    """A stream of which tarfile reads headers only."""

    name, mode = "", "rb"

    def __init__(self, stream: TarStream) -> None:
        self._stream = stream
        self._last = b""
        self.tell, self.seek = stream.tell, stream.seek

    def read(self, size: int) -> bytes:
        if size > MAX_HEADER:
            raise ArchiveError(f"it has a header of {size:,} bytes, and at most {MAX_HEADER:,} are accepted")
        self._last = self._stream.read(size)
        return self._last

    def check_end(self) -> None:
        """ArchiveError unless the archive ended with an empty block: tarfile also ends where a header is damaged or cut off."""
        if len(self._last) < tarfile.BLOCKSIZE:
            raise ArchiveError("it ends early")
        if self._last.strip(b"\0"):
            raise ArchiveError("one of its headers is damaged")


def _zip_members(path: str, status: os.stat_result) -> Iterator[Item]:
    total = 0
    with Path(path).open("rb") as file:
        start, end, shift = _zip_directory(file, status.st_size)
        file.seek(start)
        while file.tell() < end:
            header = file.read(_HEADER.size)
            if len(header) < _HEADER.size or header[:4] != b"PK\x01\x02":
                raise ArchiveError("its directory is damaged")
            fields = _HEADER.unpack(header)
            flags, method, checksum, stored, size = fields[3], fields[4], *fields[7:10]
            raw, extra = file.read(fields[10]), file.read(fields[11])
            file.seek(fields[12], os.SEEK_CUR)
            size, stored, offset = _zip64(extra, size, stored, fields[16])
            inner = raw.decode("utf-8" if flags & _UTF8 else "cp437", "replace")
            if inner.endswith("/"):
                continue
            total += size
            if total > FREE_BYTES + MAX_RATIO * status.st_size:
                raise ArchiveError(_BOMB)
            name = f"{path}/{inner}"
            problem = _zip_problem(flags, method, stored, size)
            if problem is not None:
                yield error_item(name, problem)
            else:
                yield Item(name, path, "zip", size, status.st_mtime_ns, offset + shift, stored, method, checksum)


def _zip_problem(flags: int, method: int, stored: int, size: int) -> str | None:
    """Why a member is not accepted; None if it is."""
    if flags & _ENCRYPTED:
        return "The member of the archive is encrypted; accepted are members without a password."
    if method not in _METHODS:
        return f"The member of the archive is compressed by method {method}; accepted are 0 (stored) and 8 (deflated)."
    if max(size, stored) > MAX_IMAGE_BYTES:
        return too_large(max(size, stored))
    if size > MAX_FREE_MEMBER and size > MAX_RATIO * stored:
        return f"The member of the archive expands to more than {MAX_RATIO} times its size."
    return None


def _zip_directory(file: IO[bytes], size: int) -> tuple[int, int, int]:
    """Start and end of the directory, and bytes before the archive, as of self-extracting ones.

    The number of entries is not used: without zip64 it has 16 bits, and some programs write more entries than these can count.
    """
    start = max(0, size - _MAX_COMMENT - 22)
    file.seek(start)
    tail = file.read(_MAX_COMMENT + 22)
    found = tail.rfind(b"PK\x05\x06")
    if found < 0 or found + 22 > len(tail):
        raise ArchiveError("it is not a complete zip file")
    end = start + found
    length, offset = struct.unpack_from("<II", tail, found + 12)
    locator = found - 20
    if locator >= 0 and tail[locator : locator + 4] == b"PK\x06\x07":
        position = end - 20 - 56
        if position >= start and tail[position - start : position - start + 4] == b"PK\x06\x06":
            length, offset = struct.unpack_from("<QQ", tail, position - start + 40)
            end = position
    shift = end - length - offset
    if shift < 0:
        raise ArchiveError("its directory is damaged")
    return offset + shift, end, shift


def _zip64(extra: bytes, size: int, stored: int, offset: int) -> tuple[int, int, int]:
    """The three numbers, from the zip64 field where they do not fit into 32 bits."""
    position = 0
    while position + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, position)
        if kind == 1:
            values = iter(struct.unpack_from(f"<{length // 8}Q", extra, position + 4))
            numbers = [next(values, number) if number == _ZIP64 else number for number in (size, stored, offset)]
            return numbers[0], numbers[1], numbers[2]
        position += 4 + length
    return size, stored, offset
