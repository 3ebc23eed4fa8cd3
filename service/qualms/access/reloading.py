"""Read files again when they change, once a second and in a thread. If the new content is not accepted, the old one stays."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from qualms.errors import QualmsError

T = TypeVar("T")
SECONDS = 1.0
SETTLE_SECONDS = 0.1
"""a file that has changed is read if it stays the same for this time"""
_log = logging.getLogger("qualms.access")

Signature = tuple[tuple[int, ...] | None, ...]


class Reloadable(Protocol):
    """Files that `watch` checks."""

    async def check(self) -> None:
        """Read the files if they have changed."""


class ReloadedFiles(Generic[T]):
    """Some files that are read together, and what is done with their content. The first content is read by `load`."""

    def __init__(
        self,
        what: str,
        paths: Sequence[Path],
        read: Callable[[], T],
        apply: Callable[[T], None],
        on_read: Callable[[bool], None] = lambda _: None,
        pause: Callable[[], None] = lambda: time.sleep(SETTLE_SECONDS),
    ) -> None:
        """`what` names the content in logs. `on_read` is called with whether changed files were accepted, `pause` before they
        are read.
        """
        self._what, self._paths, self._read, self._apply, self._on_read = what, paths, read, apply, on_read
        self._pause = pause
        self._seen: Signature = ()

    def load(self) -> T:
        """Read the files for the first time; raises the error if they are not accepted."""
        self._seen = self._signature()
        return self._read()

    async def check(self) -> None:
        """Read the files in a thread if they have changed, and apply their content on the event loop."""
        try:
            content = await asyncio.to_thread(self._changed)
            if content is None:
                return
            self._apply(content[0])
        except QualmsError as error:
            self._on_read(False)
            _log.error("%s cannot be reloaded; the old content stays in use", self._what, extra={"reason": str(error)})
        else:
            self._on_read(True)
            _log.info("%s reloaded", self._what)

    def _changed(self) -> tuple[T] | None:
        """The new content; None if no file has changed, or if one is still being written.

        A file that is written in place is empty at first, and a line of it may be cut off before the options that restrict a key.
        """
        signature = self._signature()
        if signature == self._seen:
            return None
        self._pause()
        if signature != self._signature():
            return None
        self._seen = signature  # before reading, so that a change while they are read is noticed next time
        return (self._read(),)

    def _signature(self) -> Signature:
        return tuple(_stat(path) for path in self._paths)


def _stat(path: Path) -> tuple[int, ...] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


async def watch(files: Iterable[Reloadable], seconds: float = SECONDS) -> None:
    """Check files again and again, until cancelled."""
    watched = list(files)
    while watched:
        await asyncio.sleep(seconds)
        for one in watched:
            try:
                await one.check()
            except Exception:
                _log.exception("files cannot be checked")
