"""What an attack is: a script of steps that each of its connections runs, again and again until the time is over."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum

CHUNK = 2**16
"""bytes that endless scripts send at a time"""


class Wait(Enum):
    """Steps that wait for the service."""

    REPLY = "until the next reply is complete"
    CLOSE = "until the service closes the connection"


Step = bytes | memoryview | float | Wait
"""bytes to send, seconds to sleep, or what to wait for"""
Script = Iterator[Step]


@dataclass(frozen=True)
class Attack:
    """One attack; `script` gets the bytes that `payload` makes once, before the attack starts."""

    name: str
    description: str
    script: Callable[[bytes], Script]
    payload: Callable[[], bytes]
    connections: int
    reads: bool
    """whether replies are read; if not, the receive buffer is as small as possible"""
    resets: bool
    """whether the client ends connections with RST instead of FIN"""
    pause: float
    """seconds from the end of a connection until it is opened again"""


ATTACKS: dict[str, Attack] = {}
"""all attacks by name; filled when the modules that define them are imported"""


def attack(
    name: str,
    description: str,
    *,
    payload: Callable[[], bytes] = bytes,
    connections: int = 1,
    reads: bool = True,
    resets: bool = False,
    pause: float = 0.01,
) -> Callable[[Callable[[bytes], Script]], Callable[[bytes], Script]]:
    """Register a script as an attack."""

    def register(script: Callable[[bytes], Script]) -> Callable[[bytes], Script]:
        assert name not in ATTACKS
        ATTACKS[name] = Attack(name, description, script, payload, connections, reads, resets, pause)
        return script

    return register


def head(start: str, **headers: object) -> bytes:
    """The head of a request, for example `head("GET /livez")`; `_` in the names of headers stands for `-`."""
    lines = [
        f"{start} HTTP/1.1",
        "Host: 127.0.0.1",
        *(f"{name.replace('_', '-')}: {headers[name]}" for name in headers),
    ]
    return "\r\n".join((*lines, "", "")).encode()


def post(body: bytes, content_type: str = "image/png") -> bytes:
    """A complete request that posts a body to /predict."""
    return head("POST /predict", Content_Type=content_type, Content_Length=len(body)) + body
