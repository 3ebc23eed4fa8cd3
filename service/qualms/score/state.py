"""The state of a run: a hidden folder beside the output, with the list of files and the parts that are scored.

    run.json      model, options and digest of the list: a run is continued only if these are the same
    list.jsonl    one line per file to score
    parts.jsonl   one line per part, in order; a line that was cut off is scored again

The output is written from the parts at the end, so a continued run writes the same bytes as one without interruption.
"""

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from qualms.files import write_bytes
from qualms.score.items import Item, ScoreError, read_list
from qualms.score.rows import Part

VERSION = 1
"""of the files in the folder"""
_RUN, _LIST, _PARTS, _LOCK = "run.json", "list.jsonl", "parts.jsonl", "lock"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True)
class Identity:
    """The values that must be the same for a run to be continued."""

    model: str
    """digest of the bundle"""
    options: dict[str, Any]
    files: str
    """digest of the list"""

    def difference(self, other: dict[str, Any]) -> str | None:
        """The first difference from the identity in a state folder, in words; None if there is none."""
        if other.get("version") != VERSION:
            return "by another version of qualms"
        if other.get("model") != self.model:
            return "with another model"
        if other.get("files") != self.files:
            return "with another list of files, or files were changed"
        saved = other.get("options") or {}
        names = [name for name in {**self.options, **saved} if self.options.get(name) != saved.get(name)]
        if names:
            return f"with another value of {names[0]} ({saved.get(names[0])}, now {self.options.get(names[0])})"
        return None


@contextmanager
def full_disk(folder: Path) -> Iterator[None]:
    """Turn the error of a full disk or another failed write into a sentence."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise ScoreError(
                f"There is no space left to write to {folder}; free some, and run the same command again to continue."
            ) from None
        if error.filename is None or not _absolute(error.filename).is_relative_to(folder.absolute()):
            raise
        raise ScoreError(f"{folder} cannot be written to: {error.strerror}.") from None


def _absolute(name: str | bytes) -> Path:
    """`tempfile` puts absolute paths into errors, whatever the folder."""
    return Path(os.fsdecode(name)).absolute()


class State:
    """The folder of one run."""

    def __init__(self, output: Path) -> None:
        self.folder = output.parent / f".{output.name}.qualms"
        self._lock: IO[bytes] | None = None

    @property
    def list(self) -> Path:
        """The file of the list."""
        return self.folder / _LIST

    def open(self) -> None:
        """Make the folder; ScoreError if another run uses it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = (self.folder / _LOCK).open("wb")
        try:
            import fcntl  # noqa: PLC0415  # not on Windows
        except ImportError:
            return
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ScoreError(f"Another run is writing to {self.folder}; wait until it ends.") from None

    @property
    def holds_run(self) -> bool:
        """Whether the folder holds an unfinished run."""
        return (self.folder / _RUN).exists()

    def close(self) -> None:
        """Let other runs use the folder."""
        if self._lock is not None:
            self._lock.close()

    def remove(self) -> None:
        """Remove the folder, while it is locked: after that it may be that of another run."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.close()

    def abandon(self) -> None:
        """Remove the folder unless it holds an unfinished run."""
        if self.holds_run:
            self.close()
        else:
            self.remove()

    def write_list(self, items: Iterable[Item]) -> tuple[str, int]:
        """Write the list to a temporary file; returns its digest and the number of items."""
        digest, count = hashlib.sha256(), 0
        with (self.folder / f"{_LIST}.new").open("wb") as file:
            for item in items:
                line = item.to_json()
                digest.update(line)
                file.write(line)
                count += 1
        return digest.hexdigest(), count

    def begin(self, identity: Identity, *, restart: bool) -> int:
        """Start a run, or continue one; returns how many parts are there. ScoreError if the folder is of another run.

        With `restart`, another run is discarded instead.
        """
        try:
            saved = json.loads((self.folder / _RUN).read_bytes())
        except (OSError, ValueError):
            saved = None
        difference = None if saved is None else identity.difference(saved)
        if difference is not None and not restart:
            raise ScoreError(
                f"{self.folder} holds an unfinished run that was begun {difference}; repeat that command to continue it, or "
                "use --overwrite to discard it."
            )
        (self.folder / f"{_LIST}.new").replace(self.folder / _LIST)
        if saved is None or difference is not None:
            (self.folder / _PARTS).unlink(missing_ok=True)
            run = {"version": VERSION, "model": identity.model, "options": identity.options, "files": identity.files}
            write_bytes(self.folder / _RUN, json.dumps(run).encode())
            return 0
        return self._repair()

    def items(self) -> Iterator[Item]:
        """The list."""
        return read_list(self.list)

    def parts(self) -> Iterator[Part]:
        """The parts that are scored."""
        with (self.folder / _PARTS).open("rb") as lines:
            yield from map(Part.from_json, lines)

    def append(self, parts: Iterable[bytes]) -> Iterator[None]:
        """Add parts to the file, and yield when each is written."""
        with (self.folder / _PARTS).open("ab", buffering=0) as file:
            for part in parts:
                view = memoryview(part)
                while view:
                    view = view[file.write(view) :]
                yield

    def _repair(self) -> int:
        """Cut off what follows the last complete part; returns the number of parts."""
        path = self.folder / _PARTS
        count = end = 0
        path.touch()
        with path.open("rb+") as file:
            for line in file:
                try:
                    complete = line.endswith(b"\n") and Part.from_json(line).number == count
                except ValueError:
                    complete = False
                if not complete:
                    break
                count, end = count + 1, end + len(line)
            file.truncate(end)
        return count
