"""The listening socket: opened with an error a person can act on, and closed without resetting anybody.

Closing a socket resets the connections that the kernel has accepted and nobody has taken yet. Taking them first is
not enough: others arrive between the last look and the close. So new ones are turned away by a filter beforehand.
"""

import ctypes
import socket
import struct
import sys

from qualms.errors import QualmsError

BACKLOG = 2048

_SO_ATTACH_FILTER = 26
_RETURN = 0x06
"""BPF's instruction that ends a filter; what it returns is how many bytes of a packet are kept"""


class ListenError(QualmsError):
    """The address cannot be listened on."""


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens; ListenError says why there is none, where uvicorn would only log it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        reason = (str(error.strerror) or str(error)).partition(" (")[0].lower()
        raise ListenError(
            f"Port {port} of {host} cannot be listened on: {reason}; set QUALMS_HOST and QUALMS_PORT to a free address."
        ) from None


def turn_away(listener: socket.socket) -> None:
    """Have the kernel ignore who knocks from now on; they knock again a second later, when the socket is closed.

    Connections that exist, taken or waiting, are not affected. Where there are no filters, or not for everybody (a kernel
    whose memory for them is used up gives them to the privileged alone), the queue is made as short as can be.
    """
    try:
        _drop_all(listener)
    except OSError:
        listener.listen(0)


def _drop_all(listener: socket.socket) -> None:
    if sys.platform != "linux":
        raise OSError("there are no socket filters")
    program = ctypes.create_string_buffer(struct.pack("HBBI", _RETURN, 0, 0, 0))
    listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HP", 1, ctypes.addressof(program)))


def take_waiting(listener: socket.socket) -> list[socket.socket]:
    """The connections that the kernel has accepted and nobody has taken yet."""
    listener.setblocking(False)
    waiting = []
    while (found := _accept(listener)) is not None:
        waiting.append(found)
    return waiting


def _accept(listener: socket.socket) -> socket.socket | None:
    try:
        connection, _ = listener.accept()
    except OSError:
        return None
    connection.setblocking(False)
    return connection
