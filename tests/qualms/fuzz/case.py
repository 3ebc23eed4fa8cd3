"""One case of a campaign: bytes, how they are cut into pieces, and how the connection ends."""

from dataclasses import dataclass
from typing import Literal

Ending = Literal["sentinel", "half-close", "close", "reset"]
"""sentinel: a valid request follows, whose reply shows that the connection is still in sync"""


@dataclass(frozen=True)
class Case:
    """Bytes for one connection."""

    number: int
    kind: str
    data: bytes
    cuts: tuple[int, ...] = ()
    """positions at which the bytes are cut into pieces that are sent one by one"""
    pause: float = 0.0
    """seconds between the pieces"""
    ending: Ending = "sentinel"

    def pieces(self) -> list[bytes]:
        """The bytes, cut."""
        positions = [0, *self.cuts, len(self.data)]
        return [self.data[start:end] for start, end in zip(positions, positions[1:], strict=False)]


def sentinel(number: int) -> bytes:
    """The request after the case of this number."""
    return b"GET /livez HTTP/1.1\r\nHost: sentinel\r\nX-Request-ID: %b\r\n\r\n" % sentinel_id(number)


def sentinel_id(number: int) -> bytes:
    """The id of the request after the case of this number; ids repeat, so that parsed sentinels can be cached."""
    return b"sentinel-%d" % (number % 1000)
