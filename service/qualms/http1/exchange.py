"""One request and its reply, as an application sees them."""

from collections.abc import Callable
from typing import Protocol

from qualms.http1.body import BodyMemory, Reservation
from qualms.http1.messages import Head, Refusal, Reply

Failed = Callable[[Refusal | None], None]
"""called with the reason why a body cannot be read; None if the client has disconnected"""


class Caller(Protocol):
    """The client that sent a request, if it is known by name."""

    name: str

    def count(self, status: int) -> None:
        """Count a reply."""

    def release(self) -> None:
        """The request is over."""


class Channel(Protocol):
    """The part of a connection that an exchange uses."""

    @property
    def peer(self) -> str:
        """The address at the other end."""

    def read_body(
        self, exchange: "Exchange", max_bytes: int, seconds: float, then: Callable[[bytes], None], failed: Failed
    ) -> None:
        """Read the body."""

    def reply(self, exchange: "Exchange", reply: Reply | None) -> None:
        """Send the reply."""


class Exchange:
    """One request and its reply. If the reply is sent before the body was read, the connection is closed."""

    __slots__ = ("_channel", "_replied", "_reservation", "body_unread", "caller", "disconnected", "head", "on_cancel")

    def __init__(self, channel: Channel, head: Head) -> None:
        self._channel = channel
        self._reservation: Reservation | None = None
        self._replied = False
        self.head = head
        self.body_unread = head.length != 0
        self.disconnected = False
        """whether the client has disconnected"""
        self.on_cancel: Callable[[], None] = _nothing
        """called when the server's grace period is over"""
        self.caller: Caller | None = None
        """set by the application; released when the exchange ends"""

    @property
    def peer(self) -> str:
        """The address at the other end of the connection."""
        return self._channel.peer

    def read_body(self, max_bytes: int, seconds: float, then: Callable[[bytes], None], failed: Failed) -> None:
        """Call `then` with the body, at once if it has arrived, or `failed` if it is refused or takes too long."""
        self._channel.read_body(self, max_bytes, seconds, then, failed)

    def reservation(self, memory: BodyMemory) -> Reservation:
        """The body's share in the memory of all bodies."""
        if self._reservation is None:
            self._reservation = Reservation(memory)
        return self._reservation

    def release_body(self) -> None:
        """Call this when the body is decoded: its memory is free for others. A reply does it, too."""
        if self._reservation is not None:
            self._reservation.release()

    def end(self) -> None:
        """Called by the connection when the reply was sent."""
        self.release_body()
        self.on_cancel = _nothing  # breaks a reference cycle
        if self.caller is not None:
            self.caller.release()

    def reply(self, reply: Reply | None) -> None:
        """Send the whole reply; None if there is none, because the client has disconnected. A second reply is ignored."""
        if not self._replied:
            self._replied = True
            self._channel.reply(self, reply)


def _nothing() -> None:
    pass
