"""The listening socket: opened with a clear error, and closed without resetting connections.

Closing a listener resets the connections that wait in its queue, and handshakes that are under way. So a socket filter drops
new SYN packets first, and handshakes that have begun get time to end, while the server still accepts connections.
"""

import ctypes
import socket
import struct
import sys
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from qualms.errors import QualmsError

BACKLOG = 2048

_SO_ATTACH_FILTER = 26
_FLAGS_OFFSET, _SYN, _SYN_ACK = 13, 0x02, 0x12
"""the byte of a TCP header that holds its flags, and two of them"""
_LOAD_BYTE, _AND, _JUMP_IF_EQUAL, _RETURN = 0x30, 0x54, 0x15, 0x06
_DROP_SYN = (
    (_LOAD_BYTE, 0, 0, _FLAGS_OFFSET),
    (_AND, 0, 0, _SYN_ACK),
    (_JUMP_IF_EQUAL, 0, 1, _SYN),
    (_RETURN, 0, 0, 0),
    (_RETURN, 0, 0, 0xFFFFFFFF),
)
"""a program of the Berkeley packet filter (opcode, jumps, operand): keep no byte of a SYN packet, and all of any other"""

_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_SYN_RECEIVED = "03"
"""state of a connection in these tables whose handshake has begun and not ended"""


class ListenError(QualmsError):
    """The service cannot listen on the address."""


def listen(host: str, port: int, prefix: str = "") -> socket.socket:
    """A listening socket, or ListenError with the reason; uvicorn would only log it.

    `prefix` is that of the settings HOST and PORT, after QUALMS_.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        reason = (str(error.strerror) or str(error)).partition(" (")[0].lower()
        raise ListenError(
            f"Port {port} of {host} cannot be used: {reason}; "
            f"set QUALMS_{prefix}HOST and QUALMS_{prefix}PORT to a free address."
        ) from None


def drop_new_connections(listener: socket.socket) -> None:
    """Drop new SYN packets; clients retry about a second later, when the socket is closed.

    Existing connections, accepted or waiting, and handshakes that have begun are not affected. If filters are not available
    (not Linux, or the kernel's memory for them is used up), the queue is made as short as possible.
    """
    try:
        _attach_filter(listener)
    except OSError:
        listener.listen(0)


def _attach_filter(listener: socket.socket) -> None:
    if sys.platform != "linux":
        raise OSError("socket filters are not available")
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *instruction) for instruction in _DROP_SYN))
    address = ctypes.addressof(program)
    listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HP", len(_DROP_SYN), address))


def handshakes_under_way(ports: Collection[int]) -> bool:
    """Whether a handshake with a listener on one of the ports has begun and not ended; False if that cannot be known.

    The kernel keeps no state of handshakes with SYN cookies, which it uses if too many are under way.
    """
    for table in _TABLES:
        with suppress(OSError), table.open() as lines:
            next(lines, None)
            for line in lines:
                _, local, _, state, *_ = line.split(None, 4)
                if state == _SYN_RECEIVED and int(local.rpartition(":")[2], 16) in ports:
                    return True
    return False


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
