"""From the arguments to the list of files: folders, globs, list files and archives, in a fixed order and with bounded memory."""

import glob
import heapq
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path

from qualms.score.archives import is_archive, members
from qualms.score.cloud_files import cloud_items, is_uri
from qualms.score.items import Item, ScoreError, error_item, file_item

IMAGE_ENDINGS = (*(".png", ".jpg", ".jpeg", ".jpe", ".jfif", ".bmp", ".dib", ".gif", ".tif", ".tiff", ".webp"),)
"""endings of the files that are scored in folders and archives, in capital letters, too"""
LIST_ENDINGS = (".txt", ".lst")
STANDARD_INPUT = "-"
_ANY_DEPTH = "**"
_SORTED_AT_ONCE = 50_000
"""paths that are sorted in memory; longer lists are sorted in runs on disk"""


class Listing:
    """The files that the arguments name; `others` counts files in folders and archives that are not images."""

    def __init__(self, arguments: Iterable[str], scratch: Path) -> None:
        """`scratch` is a folder for temporary files."""
        self._arguments = list(arguments)
        self._scratch = scratch
        self.others = 0

    def __iter__(self) -> Iterator[Item]:
        """The items in the order of the arguments; those of a folder or a glob are sorted by path."""
        for argument in self._arguments:
            if argument == STANDARD_INPUT:
                yield from self._listed(sys.stdin.buffer)
            elif is_uri(argument):
                yield from self._path(argument)
            elif argument.lower().endswith(LIST_ENDINGS) and not os.path.isdir(argument):  # noqa: PTH112
                try:
                    with Path(argument).open("rb") as lines:
                        yield from self._listed(lines)
                except OSError as error:
                    raise ScoreError(f"The list {argument} cannot be read: {error.strerror}.") from None
            elif os.path.lexists(argument):
                yield from self._path(argument)
            elif glob.has_magic(argument):
                yield from self._glob(argument)
            else:
                raise ScoreError(
                    f"There is no file or folder {argument!r}; accepted are image files, folders, globs in quotes, lists "
                    f"({', '.join(LIST_ENDINGS)}, or - for standard input) and archives."
                )

    def _listed(self, lines: Iterable[bytes]) -> Iterator[Item]:
        """The paths of a list, one a line."""
        for line in lines:
            if path := os.fsdecode(line.rstrip(b"\r\n")):
                yield from self._path(path)

    def _path(self, path: str) -> Iterator[Item]:
        """A file whatever its ending, or all images of a folder or an archive."""
        if is_uri(path):
            if is_archive(path):
                raise ScoreError(f"{path} is an archive; archives are read from local paths only.")
            yield from cloud_items(path, self._is_image, self._sorted)
        elif os.path.isdir(path):  # noqa: PTH112
            yield from self._folder(path)
        elif is_archive(path):
            yield from members(path, self._is_image)
        else:
            yield file_item(path)

    def _glob(self, pattern: str) -> Iterator[Item]:
        errors: list[Item] = []
        last = None
        for path in self._sorted(self._matches(pattern, errors)):
            # `**` matches folders and the files in them, so the files of folders are not taken twice.
            if path != last and not (_ANY_DEPTH in pattern.split("/") and os.path.isdir(path)):  # noqa: PTH112
                yield from self._path(path)
                last = path
        if last is None:
            raise ScoreError(f"No file matches {pattern!r}.")
        yield from errors

    def _matches(self, pattern: str, errors: list[Item]) -> Iterator[str]:
        """The paths that match; `glob` itself would follow a link to a folder above it forty times."""
        before, found, after = f"/{pattern}/".partition(f"/{_ANY_DEPTH}/")
        if not found:
            yield from glob.iglob(pattern)  # noqa: PTH207  # keeps the form of the pattern
            return
        root = f"{before[1:]}/" if before or pattern.startswith("/") else ""
        for top in glob.iglob(root) if root else [""]:  # noqa: PTH207
            for path, is_folder in self._walk(top, errors):
                if is_folder:
                    yield from self._matches(f"{glob.escape(path)}{after.rstrip('/') or '*'}", errors)

    def _folder(self, folder: str) -> Iterator[Item]:
        errors: list[Item] = []
        entries = self._walk(os.path.join(folder, ""), errors)  # noqa: PTH118
        for path in self._sorted(path for path, is_folder in entries if not is_folder and self._is_image(path)):
            yield file_item(path)
        yield from errors

    def _walk(self, folder: str, errors: list[Item]) -> Iterator[tuple[str, bool]]:
        """Files, and folders with a slash at the end: those in a folder, itself and all below it.

        Each folder occurs once, whatever links there are. The empty text is the working directory.
        """
        waiting, visited = [folder], set[tuple[int, int]]()
        while waiting:
            current = waiting.pop()
            below = []
            try:
                status = os.stat(current or ".")  # noqa: PTH116
                if (status.st_dev, status.st_ino) in visited:
                    continue
                visited.add((status.st_dev, status.st_ino))
                yield current, True
                with os.scandir(current or ".") as entries:
                    for entry in entries:
                        if entry.name.startswith("."):
                            continue
                        if entry.is_dir():
                            below.append(f"{current}{entry.name}/")
                        else:
                            yield f"{current}{entry.name}", False
            except OSError as error:
                errors.append(error_item(current or ".", f"The folder cannot be read: {error.strerror}."))
            waiting += sorted(below, reverse=True)

    def _is_image(self, name: str) -> bool:
        """Whether a file in a folder or an archive is an image by its ending, and is not hidden."""
        base = name.rpartition("/")[2]
        if base.lower().endswith(IMAGE_ENDINGS) and not base.startswith("."):
            return True
        self.others += 1
        return False

    def _sorted(self, paths: Iterable[str]) -> Iterator[str]:
        """The paths in ascending order of their bytes, with a fixed amount of memory."""
        run: list[bytes] = []
        with ExitStack() as stack:
            runs: list[Iterable[bytes]] = []
            for path in paths:
                run.append(os.fsencode(path) + b"\0")
                if len(run) >= _SORTED_AT_ONCE:
                    runs.append(stack.enter_context(_stored(sorted(run), self._scratch)))
                    run = []
            for path_bytes in heapq.merge(sorted(run), *runs):
                yield os.fsdecode(path_bytes[:-1])


class _stored:  # noqa: N801  # a context manager that is used like a function
    """Sorted paths in a temporary file, read again one by one; paths may contain line breaks, but no null bytes."""

    def __init__(self, run: list[bytes], folder: Path) -> None:
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  # closed by __exit__
        for path in run:
            self._file.write(len(path).to_bytes(4, "little") + path)
        self._file.seek(0)

    def __enter__(self) -> Iterator[bytes]:
        return self._read()

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def _read(self) -> Iterator[bytes]:
        while length := self._file.read(4):
            yield self._file.read(int.from_bytes(length, "little"))
