"""Requests and replies, and the errors of requests that are refused before an application sees them."""

from dataclasses import dataclass
from http import HTTPStatus
from typing import NamedTuple

CLOSE = (b"connection", b"close")


class Reply(NamedTuple):
    """A whole HTTP reply."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes
    close: bool = False
    """whether the connection is closed after the reply"""


class Refusal(Exception):  # noqa: N818
    """A request or a connection that the server refuses by itself. The connection is always closed."""

    def __init__(self, status: int, reason: str, detail: str, accepted: str | None = None) -> None:
        super().__init__(detail)
        self.status = status
        self.reason = reason
        """label in metrics and logs, one of REASONS"""
        self.detail = detail
        self.accepted = accepted


MALFORMED = "malformed"
UNSUPPORTED = "unsupported"
URL_TOO_LONG = "url_too_long"
HEAD_TOO_LARGE = "head_too_large"
HEAD_TIMEOUT = "head_timeout"
BODY_TIMEOUT = "body_timeout"
BODY_TOO_LARGE = "body_too_large"
BODY_MEMORY = "body_memory"
SEND_TIMEOUT = "send_timeout"
TOO_MANY_CONNECTIONS = "too_many_connections"
EVICTED = "evicted"
STOPPING = "stopping"
PLAIN_HTTP = "plain_http"
TLS_HANDSHAKE = "tls_handshake"
REASONS = (
    *(MALFORMED, UNSUPPORTED, URL_TOO_LONG, HEAD_TOO_LARGE, HEAD_TIMEOUT, BODY_TIMEOUT, BODY_TOO_LARGE, BODY_MEMORY),
    *(SEND_TIMEOUT, TOO_MANY_CONNECTIONS, EVICTED, STOPPING, PLAIN_HTTP, TLS_HANDSHAKE),
)
"""why the server refuses a request or closes a connection"""


@dataclass(slots=True)
class Head:
    """The request line and the headers of a request."""

    method: str
    target: bytes
    """as it was sent, without scheme and host"""
    path: str
    """percent-decoded"""
    query: bytes
    """without the question mark"""
    version: str
    """1.0 or 1.1"""
    headers: list[tuple[bytes, bytes]]
    """in the order they were sent; names in lower case"""
    fields: dict[bytes, bytes]
    """the last value of each header"""
    keep_alive: bool
    """whether the client keeps the connection open after the reply"""
    length: int | None
    """bytes of the body; None if it is chunked"""

    @property
    def expects_continue(self) -> bool:
        """Whether the client waits for `100 Continue` before it sends the body."""
        return self.version == "1.1" and self.fields.get(b"expect", b"").lower() == b"100-continue"


STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


def status_line(status: int) -> bytes:
    """The first line of a reply."""
    return STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status


def encode_reply(reply: Reply, default_headers: bytes, version: str, *, close: bool) -> bytes:
    """The bytes of a whole reply to a request in an HTTP version, after which the connection is closed or not."""
    parts = [STATUS_LINES[reply.status], default_headers]
    for name, value in reply.headers:
        parts += (name, b": ", value, b"\r\n")
    if close:
        parts.append(b"connection: close\r\n")
    elif version == "1.0":
        parts.append(b"connection: keep-alive\r\n")
    parts += (b"\r\n", reply.body)
    return b"".join(parts)
