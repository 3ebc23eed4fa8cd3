"""Replies of the service, parsed by h11 as a client, and the form that every error reply must have."""

import json
from dataclasses import dataclass, field

import h11

_MAX_EVENT = 2**22
PROBLEM = b"application/problem+json"


@dataclass
class Reply:
    """One reply; the statuses of informational replies before it are in `before`."""

    status: int
    headers: dict[bytes, bytes]
    body: bytes
    before: list[int] = field(default_factory=list)

    @property
    def closes(self) -> bool:
        """Whether the reply announces that the connection is closed."""
        return b"close" in self.headers.get(b"connection", b"").lower()

    @property
    def request_id(self) -> bytes:
        """X-Request-ID."""
        return self.headers.get(b"x-request-id", b"")


class ReplyReader:
    """Reads one reply to a request with a given method; `rest` holds the bytes after it."""

    def __init__(self, method: bytes) -> None:
        self._connection = h11.Connection(h11.CLIENT, max_incomplete_event_size=_MAX_EVENT)
        self._connection.send(_REQUESTS[method == b"HEAD"])
        self._connection.send(_END)
        self._before: list[int] = []
        self._reply: Reply | None = None
        self._body: list[bytes] = []
        self.rest = b""

    def feed(self, data: bytes) -> Reply | None:
        """Parse more bytes, or the end of the connection (b""); the reply if it is complete.

        Raises h11.RemoteProtocolError if the bytes are not a reply.
        """
        if not data and self._before and self._reply is None:
            return None  # h11 refuses a close after 100 Continue, which a request that is never completed may get
        self._connection.receive_data(data)
        while True:
            event = self._connection.next_event()
            if isinstance(event, h11.InformationalResponse):
                self._before.append(event.status_code)
            elif isinstance(event, h11.Response):
                self._reply = Reply(event.status_code, dict(event.headers), b"", self._before)
            elif isinstance(event, h11.Data):
                self._body.append(bytes(event.data))
            elif isinstance(event, h11.EndOfMessage):
                assert self._reply is not None
                self._reply.body = b"".join(self._body)
                self.rest = self._connection.trailing_data[0]
                return self._reply
            else:
                return None


_REQUESTS = [h11.Request(method=method, target="/", headers=[("host", "x")]) for method in ("GET", "HEAD")]
_END = h11.EndOfMessage()


def problem_with_error(reply: Reply, *, has_body: bool = True) -> str | None:
    """How an error reply differs from problem details with status, type, detail and request id; None if it does not."""
    if reply.headers.get(b"content-type") != PROBLEM:
        return f"the content type of a {reply.status} is {reply.headers.get(b'content-type')!r}"
    if not has_body:
        return None
    try:
        problem = json.loads(reply.body)
        given = {name: problem[name] for name in ("status", "type", "title", "detail", "request_id")}
    except (ValueError, TypeError, LookupError):
        return f"the body of a {reply.status} is not a problem with all members"
    if given["status"] != reply.status or given["request_id"].encode() != reply.request_id:
        return f"the body of a {reply.status} has another status or request id than the head"
    return None if all(given.values()) else f"the body of a {reply.status} has an empty member"
