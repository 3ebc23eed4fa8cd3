"""Receive the body of one request within limits on its size, its time and the memory of all bodies."""

from collections.abc import Callable

from qualms.http1.chunked import ChunkedDecoder, ChunkError
from qualms.http1.messages import BODY_MEMORY, BODY_TIMEOUT, BODY_TOO_LARGE, MALFORMED, Refusal

FREE_BYTES = 64 * 1024
"""the first bytes of each body do not count: large uploads must not block small requests"""


_SMALL_PIECE = 4096


class BodyMemory:
    """The memory that all bodies together may use, from their arrival until they are decoded."""

    def __init__(self, max_bytes: int = 256 * 2**20) -> None:
        self.max_bytes = max_bytes
        self.used = 0

    def reserve(self, size: int) -> bool:
        """Reserve memory; False if there is not enough."""
        if self.used + size > self.max_bytes:
            return False
        self.used += size
        return True

    def release(self, size: int) -> None:
        """Return memory that was reserved."""
        self.used -= size


class Reservation:
    """The share of one body in the memory of all bodies."""

    __slots__ = ("_bytes", "_memory")

    def __init__(self, memory: BodyMemory) -> None:
        self._memory = memory
        self._bytes = 0

    def grow(self, size: int) -> bool:
        """Reserve memory for a body of `size` bytes; False if there is not enough."""
        more = size - FREE_BYTES - self._bytes
        if more > 0:
            if not self._memory.reserve(more):
                return False
            self._bytes += more
        return True

    def release(self) -> None:
        """Return the memory: the body is decoded or dropped."""
        self._memory.release(self._bytes)
        self._bytes = 0


class _Pieces:
    """Collects data: large pieces are kept and joined once, small ones are joined as they arrive, because each has a cost."""

    __slots__ = ("_large", "_small", "size")

    def __init__(self) -> None:
        self._large: list[bytes] = []
        self._small = bytearray()
        self.size = 0

    def add(self, data: bytes) -> None:
        """Add a piece."""
        self.size += len(data)
        if len(data) < _SMALL_PIECE and len(self._small) < FREE_BYTES:
            self._small += data
            return
        if self._small:
            self._large.append(bytes(self._small))
            self._small.clear()
        self._large.append(data)

    def join(self) -> bytes:
        """All pieces; the collection is empty afterwards."""
        large, self._large = self._large, []
        return b"".join((*large, self._small))


class BodyReader:
    """Collects the body of one request from the pieces that a connection receives."""

    __slots__ = (
        "_decoder",
        "_length",
        "_max_bytes",
        "_pieces",
        "_reservation",
        "_seconds",
        "_then",
        "_unread",
        "deadline",
        "failed",
    )

    def __init__(
        self,
        length: int | None,
        max_bytes: int,
        deadline: float,
        seconds: float,
        reservation: Reservation,
        then: Callable[[bytes], None],
        failed: Callable[[Refusal | None], None],
    ) -> None:
        """`length` is None for a chunked body. Either `then` is called with the body, or `failed` with the reason; None
        means that the client has disconnected.
        """
        self._length = length
        self._max_bytes = max_bytes
        self._decoder = ChunkedDecoder() if length is None else None
        self._unread = b""
        """the beginning of a chunk's line"""
        self._pieces = _Pieces()
        self._reservation = reservation
        self._then = then
        self._seconds = seconds
        self.deadline = deadline
        self.failed = failed

    def feed(self, data: bytes) -> tuple[bytes, bool, Callable[[], None] | None]:
        """Take data. Returns the bytes after the body, whether to call again with no data, and a function to call if the
        body is complete; Refusal if it is not accepted.
        """
        if self._length is not None:
            return self._feed_sized(data, self._length)
        assert self._decoder is not None
        try:
            rest, again = self._decoder.feed(self._unread + data)
        except ChunkError as error:
            raise Refusal(400, MALFORMED, f"{error}.") from None
        body = self._decoder.body
        complete = self._decoder.complete
        self._check(len(body), 0 if complete else len(rest))
        if not complete:
            self._unread = rest
            return b"", again, None
        then = self._then
        return rest, False, lambda: then(bytes(body))

    def _feed_sized(self, data: bytes, length: int) -> tuple[bytes, bool, Callable[[], None] | None]:
        pieces = self._pieces
        missing = length - pieces.size
        self._check(min(length, pieces.size + len(data)))
        pieces.add(data if len(data) <= missing else data[:missing])
        if len(data) < missing:
            return b"", False, None
        then = self._then
        return data[missing:], False, lambda: then(pieces.join())

    def _check(self, size: int, undecoded: int = 0) -> None:
        if size > self._max_bytes:
            raise too_large(self._max_bytes)
        if not self._reservation.grow(size + undecoded):
            raise memory_used_up()

    def expire(self) -> None:
        """The body did not arrive in time."""
        self.failed(Refusal(408, BODY_TIMEOUT, f"The body did not arrive within the request's {self._seconds:g} s."))


def too_large(max_bytes: int) -> Refusal:
    """413 for a body, announced or received, that is longer than allowed."""
    accepted = f"at most {max_bytes:,} bytes"
    return Refusal(413, BODY_TOO_LARGE, f"The body is too large; accepted: {accepted}.", accepted)


def memory_used_up() -> Refusal:
    """429: the bodies of all requests use all memory reserved for them; the rest of this one is not read."""
    return Refusal(429, BODY_MEMORY, "Too many bodies are being sent at once; try again in 1 s.")
