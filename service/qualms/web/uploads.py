"""Bodies that are on their way: how many there are, and how much memory they may take together."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from qualms.web.problems import Problem


class Uploads:
    """Those whose requests were begun and whose bodies are not whole yet."""

    def __init__(self) -> None:
        self.count = 0
        self.bytes = 0

    @contextmanager
    def one(self, max_bytes: int) -> Iterator[Callable[[int], None]]:
        """Count a body while it is read. The reader tells of every piece by its size; a Problem if all exceed `max_bytes`."""
        held = 0

        def take(size: int) -> None:
            nonlocal held
            if self.bytes + size > max_bytes:
                raise Problem.too_many_uploads()
            self.bytes += size
            held += size

        self.count += 1
        try:
            yield take
        finally:
            self.count -= 1
            self.bytes -= held
