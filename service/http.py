"""uvicorn's HTTP protocol, with replies sent together: head and body in one system call, and a batch's in one burst.

uvicorn writes the head and the body of a reply one after the other, and uvloop sends each write at once. A system call
for each is dear, and between two replies the client's core falls asleep, so that each write also has to wake it.
"""

import asyncio
from typing import Any, cast
from weakref import WeakKeyDictionary

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


class JoiningProtocol(HttpToolsProtocol):
    """httptools as uvicorn runs it, on a transport that joins writes."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A connection begins."""
        joining = JoiningTransport(transport, Outbox.of(self.loop), self.tasks)
        super().connection_made(cast(asyncio.Transport, joining))


class Outbox:
    """What one pass of an event loop writes, sent in the next one."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._call_soon = loop.call_soon
        self._holding: list[JoiningTransport] = []

    @classmethod
    def of(cls, loop: asyncio.AbstractEventLoop) -> "Outbox":
        """The only one of a loop."""
        return _outboxes.setdefault(loop, cls(loop))

    def add(self, transport: "JoiningTransport") -> None:
        """Have a transport flushed."""
        if not self._holding:
            self._call_soon(self._flush)
        self._holding.append(transport)

    def _flush(self) -> None:
        holding, self._holding = self._holding, []
        for transport in holding:
            transport.flush()


_outboxes: "WeakKeyDictionary[asyncio.AbstractEventLoop, Outbox]" = WeakKeyDictionary()


class JoiningTransport:
    """Holds writes back until the end of the loop's pass, or only until the second one if no other reply is due."""

    def __init__(self, transport: asyncio.Transport, outbox: Outbox, tasks: set[Any]) -> None:
        self._transport = transport
        self._outbox = outbox
        self._tasks = tasks
        """the requests that the server is about to answer"""
        self._held = b""

    def write(self, data: bytes) -> None:
        """Send soon, after what was written before."""
        if not self._held:
            self._held = data
            self._outbox.add(self)
            return
        self._held += data
        if len(self._tasks) <= 1:
            self.flush()

    def flush(self) -> None:
        """Send what was held back."""
        if self._held:
            held, self._held = self._held, b""
            self._transport.write(held)

    def close(self) -> None:
        """Close once all is sent."""
        self.flush()
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)
