"""The listening socket: opened with a clear error, and closed without resetting connections.

Closing a listener resets the connections that wait in its queue. Accepting them first is not enough, because others arrive
before the close. So a socket filter drops new connections first.
"""

import ctypes
import socket
import struct
import sys
from contextlib import suppress

from qualms.errors import QualmsError

BACKLOG = 2048

_SO_ATTACH_FILTER = 26
_RETURN = 0x06
"""the BPF instruction that returns how many bytes of a packet to keep"""


class ListenError(QualmsError):
    """The service cannot listen on the address."""


def listen(host: str, port: int) -> socket.socket:
    """A listening socket, or ListenError with the reason; uvicorn would only log it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        reason = (str(error.strerror) or str(error)).partition(" (")[0].lower()
        raise ListenError(
            f"Port {port} of {host} cannot be used: {reason}; set QUALMS_HOST and QUALMS_PORT to a free address."
        ) from None


def drop_new_connections(listener: socket.socket) -> None:
    """Drop new SYN packets; clients retry about a second later, when the socket is closed.

    Existing connections, accepted or waiting, are not affected. If filters are not available (not Linux, or the kernel's
    memory for them is used up), the queue is made as short as possible.
    """
    try:
        _drop_all(listener)
    except OSError:
        listener.listen(0)


def _drop_all(listener: socket.socket) -> None:
    if sys.platform != "linux":
        raise OSError("socket filters are not available")
    program = ctypes.create_string_buffer(struct.pack("HBBI", _RETURN, 0, 0, 0))
    listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HP", 1, ctypes.addressof(program)))


def accept_pending(listener: socket.socket) -> list[socket.socket]:
    """The connections that wait to be accepted."""
    listener.setblocking(False)
    pending = []
    with suppress(OSError):  # none is left
        while True:
            pending.append(listener.accept()[0])
    for connection in pending:
        connection.setblocking(False)
    return pending
