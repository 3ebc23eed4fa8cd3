"""TLS between a socket and a `Connection`: the connection's transport, and the protocol of the event loop's transport.

The handshake is part of the connection, so that all limits hold for it: it counts towards the number of connections, and the
first request must begin within the time of a head. A client that sends plain HTTP gets 400.
"""

import asyncio
import os
import ssl
from contextlib import suppress
from typing import Any, cast

from qualms.http1.connection import Connection
from qualms.http1.connections import Connections
from qualms.http1.messages import PLAIN_HTTP, TLS_HANDSHAKE, Refusal

_HANDSHAKE_RECORD = 0x16
"""the first byte that a TLS client sends"""
_RECORD_BYTES = 16 * 1024
"""data of one record, at most"""


class TlsLayer(asyncio.Protocol):
    """Encrypts and decrypts the data of one connection."""

    __slots__ = (
        "_connection",
        "_connections",
        "_context",
        "_descriptor",
        "_ended",
        "_incoming",
        "_outgoing",
        "_paused",
        "_plain",
        "_ready",
        "_ssl",
        "_transport",
        "_write_paused",
    )

    def __init__(self, connection: Connection, connections: Connections, context: ssl.SSLContext) -> None:
        self._connection, self._connections, self._context = connection, connections, context
        self._ssl: ssl.SSLObject | None = None
        """None until the client has sent something"""
        self._ready = self._plain = self._ended = self._paused = self._write_paused = False
        self._descriptor = -1

    # Called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to wait for the handshake."""
        self._transport = cast(asyncio.Transport, transport)
        opened = transport.get_extra_info("socket")
        self._descriptor = -1 if opened is None else opened.fileno()
        self._transport.set_write_buffer_limits(high=0)
        self._connection.connection_made(cast(asyncio.Transport, self))

    def data_received(self, data: bytes) -> None:
        """Go on with the handshake, or decrypt data for the connection."""
        if self._ended:
            self._connection.data_received(data)  # which only counts it
            return
        if self._ssl is None:
            if data[0] != _HANDSHAKE_RECORD:
                self._refuse_plain()
                return
            self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
            self._ssl = self._context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        parts: list[bytes] = []
        closed = False
        # In pieces: the memory of OpenSSL's buffers stays as large as it once was, for as long as the connection is open.
        for start in range(0, len(data), _RECORD_BYTES):
            self._incoming.write(data[start : start + _RECORD_BYTES])
            if self._ready or self._shake_hands():
                closed = self._decrypt(parts)
            if closed or self._ended:
                break
        if self._ready and self._outgoing.pending:
            self._flush()
        if parts:
            self._connection.data_received(parts[0] if len(parts) == 1 else b"".join(parts))
        if closed and not self._ended:
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        """Pass on the end of the connection."""
        self._ended = True
        self._descriptor = -1
        self._connection.connection_lost(error)

    def pause_writing(self) -> None:
        """The client does not read. Nothing is read from it, either, because TLS may answer what it reads."""
        self._write_paused = True
        self._update_reading()
        self._connection.pause_writing()

    def resume_writing(self) -> None:
        """The client has read."""
        self._write_paused = False
        self._update_reading()
        self._connection.resume_writing()

    # Called by the connection, whose transport this is

    def write(self, data: bytes) -> None:
        """Send data; before the end of the handshake there is no way to send any."""
        if self._plain:
            self._transport.write(data)
        elif self._ready and not self._ended and data:
            assert self._ssl is not None
            records: list[bytes] = []
            rest = memoryview(data)
            try:
                while rest:
                    rest = rest[self._ssl.write(rest[:_RECORD_BYTES]) :]
                    records.append(self._outgoing.read())
            except ssl.SSLError:  # the client has broken the protocol
                self.abort()
                return
            self._send(records[0] if len(records) == 1 else b"".join(records))

    def write_eof(self) -> None:
        """Send the end of the data, of TLS and of TCP."""
        if self._ended:
            return
        self._end()
        if self._ready or self._plain:
            self._transport.write_eof()
        else:
            self._transport.abort()

    def close(self) -> None:
        """Close the connection after what was written is sent."""
        if not self._ended:
            self._end()
        self._transport.close()

    def abort(self) -> None:
        """Reset the connection."""
        self._ended = True
        self._transport.abort()

    def is_closing(self) -> bool:
        """Whether the connection is being closed."""
        return self._transport.is_closing()

    def pause_reading(self) -> None:
        """Read no more."""
        self._paused = True
        self._update_reading()

    def resume_reading(self) -> None:
        """Read on."""
        self._paused = False
        self._update_reading()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Nothing is buffered here; the limits of the socket's transport are set when it is made."""

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Facts about the connection. There is no `socket`, because what is written to it must be encrypted."""
        if name == "socket":
            return default
        if name == "ssl_object":
            return self._ssl
        return self._transport.get_extra_info(name, default)

    # TLS

    def _shake_hands(self) -> bool:
        """Go on with the handshake; returns whether it is complete."""
        assert self._ssl is not None
        try:
            self._ssl.do_handshake()
        except ssl.SSLWantReadError:
            self._flush()
            return False
        except ssl.SSLError:
            self._flush()  # sends the alert
            self._ended = True
            self._connections.on_close(TLS_HANDSHAKE)
            self._transport.close()
            return False
        self._ready = True
        self._flush()
        return True

    def _decrypt(self, parts: list[bytes]) -> bool:
        """Add the content of all complete records to `parts`; returns whether the client has ended the connection."""
        assert self._ssl is not None
        try:
            while self._incoming.pending or self._ssl.pending():
                part = self._ssl.read(_RECORD_BYTES)
                if not part:
                    return True
                parts.append(part)
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError:
            return True
        return False

    def _end(self) -> None:
        self._ended = True
        if self._ready and self._ssl is not None:
            with suppress(ssl.SSLError):  # the client's own end has not arrived
                self._ssl.unwrap()
            self._flush()

    def _flush(self) -> None:
        """Send what OpenSSL has to send by itself."""
        self._send(self._outgoing.read())

    def _send(self, data: bytes) -> None:
        """Write to the socket directly, as the connection does without TLS; the transport gets what the socket does not take."""
        if not data or self._transport.is_closing():
            return
        if not self._write_paused and self._descriptor >= 0:
            try:
                sent = os.write(self._descriptor, data)
            except OSError:
                sent = 0
            if sent == len(data):
                return
            data = data[sent:]
        self._transport.write(data)

    def _refuse_plain(self) -> None:
        """Answer plain HTTP, or anything else that is not TLS."""
        self._plain = True
        accepted = "https://"
        detail = f"This port speaks TLS, and the request came without it; accepted: {accepted}."
        self._connection.refuse(Refusal(400, PLAIN_HTTP, detail, accepted))

    def _update_reading(self) -> None:
        if self._transport.is_closing():
            return
        if self._paused or self._write_paused:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()
