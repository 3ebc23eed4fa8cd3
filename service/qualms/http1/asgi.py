"""Run an ASGI application for one request. It reads the body only if the application asks for it."""

import asyncio
import logging
import re
from typing import TYPE_CHECKING, Any

from qualms.http1.connections import Connections
from qualms.http1.exchange import Exchange
from qualms.http1.messages import CLOSE, Refusal, status_line

if TYPE_CHECKING:
    from qualms.http1.connection import Connection

_log = logging.getLogger("qualms.http1")
_BODYLESS = (204, 304)
_OURS = (b"connection", b"transfer-encoding")
"""headers of a reply that only the server sets"""
_HEADER = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+: [\t\x20-\x7e\x80-\xff]*\r\n")


class AsgiCycle:
    """One request and its reply as ASGI messages."""

    def __init__(
        self, connection: "Connection", exchange: Exchange, connections: Connections, app_state: dict[str, Any]
    ) -> None:
        self._connection = connection
        self._exchange = exchange
        self._connections = connections
        self._app_state = app_state
        self._woken = asyncio.Event()
        """set if the client has disconnected or has read what was sent"""
        self._body_requested = False
        self._started = self._complete = False
        self._start: bytes | None = b""
        """status line and headers, until the first part of the body is sent"""
        self._has_body = True
        self._body_left: int | None = None
        """bytes of the body that are announced by Content-Length and not sent"""
        self._chunked = False
        self._close = False

    def start(self, transport: asyncio.BaseTransport) -> None:
        """Run the application in a task."""
        if self._exchange.disconnected:
            self._complete = True
            self._connection.finish(self._exchange, close=True)
            return
        head = self._exchange.head
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": head.version,
            "server": transport.get_extra_info("sockname"),
            "client": transport.get_extra_info("peername"),
            "scheme": "http" if transport.get_extra_info("ssl_object") is None else "https",
            "method": head.method,
            "root_path": "",
            "path": head.path,
            "raw_path": head.target.partition(b"?")[0],
            "query_string": head.query,
            "headers": head.headers,
            "state": {**self._app_state, "caller": self._exchange.caller},
        }
        task = asyncio.get_running_loop().create_task(self._run(scope))
        self._connections.tasks.add(task)
        task.add_done_callback(self._ended)

    def wake(self) -> None:
        """The client has disconnected, or has read what was sent."""
        self._woken.set()

    async def _run(self, scope: dict[str, Any]) -> None:
        try:
            await self._connections.app(scope, self._receive, self._send)
            if not self._complete and not self._exchange.disconnected:
                _log.error("the application ended without a complete reply", extra={"path": scope["path"]})
        except Exception:
            _log.exception("the application failed", extra={"path": scope["path"]})

    def _ended(self, task: asyncio.Task[None]) -> None:
        """End an exchange without a complete reply. A task that is cancelled before its first step ends here, too."""
        self._connections.tasks.discard(task)
        if self._complete:
            return
        self._complete = True
        if not self._exchange.disconnected:
            if self._start is not None:  # nothing was sent
                self._connection.write(status_line(500) + b"content-length: 0\r\nconnection: close\r\n\r\n")
            else:
                self._connection.abort()
        self._connection.finish(self._exchange, close=True)

    async def _receive(self) -> dict[str, Any]:
        if not (self._body_requested or self._complete or self._exchange.disconnected):
            self._body_requested = True
            body = await self._read_body()
            if body is not None:
                return {"type": "http.request", "body": body, "more_body": False}
        while not self._exchange.disconnected and not self._complete:
            self._woken.clear()
            await self._woken.wait()
        return {"type": "http.disconnect"}

    async def _read_body(self) -> bytes | None:
        """The whole body, or None if it cannot be read; the client then gets the refusal."""
        future = asyncio.get_running_loop().create_future()

        def failed(refusal: Refusal | None) -> None:
            if not future.done():
                future.set_result(None)
            if refusal is not None and not self._started:
                self._complete = self._started = True
                self._connection.reply(self._exchange, self._connections.refuse(refusal)._replace(close=True))

        def received(body: bytes) -> None:
            if not future.done():
                future.set_result(body)

        limits = self._connections.limits
        self._exchange.read_body(limits.body_bytes, limits.body_seconds, received, failed)
        body: bytes | None = await future
        return body

    async def _send(self, message: dict[str, Any]) -> None:
        if self._exchange.disconnected or self._complete:
            return
        if message["type"] == "http.response.start":
            self._begin(message["status"], list(message.get("headers", [])))
            return
        if not self._started:
            raise RuntimeError("The application sent http.response.body before http.response.start.")
        body, more = message.get("body", b""), message.get("more_body", False)
        self._check_length(len(body), last=not more)
        data, self._start = self._start or b"", None
        if self._has_body:
            if not self._chunked:
                data += body
            else:
                data += b"%x\r\n%b\r\n" % (len(body), body) if body else b""
                data += b"" if more else b"0\r\n\r\n"
        if data:
            self._connection.write(data)
        if not more:
            self._complete = True
            self._woken.set()
            self._connection.finish(self._exchange, close=self._close)
            return
        self._connection.flush()  # before the loop goes on, so that a client that does not read stops the application
        while self._connection.write_paused and not self._exchange.disconnected:
            self._woken.clear()
            await self._woken.wait()

    def _check_length(self, size: int, *, last: bool) -> None:
        """Another number of bytes than Content-Length announces would be read as a part of the next reply."""
        if self._has_body and self._body_left is not None:
            self._body_left -= size
            if self._body_left < 0 or (self._body_left and last):
                raise RuntimeError("The application sent a body that is longer or shorter than its Content-Length.")

    def _begin(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Prepare the head of the reply, which is sent with the first part of the body."""
        if self._started:
            raise RuntimeError("The application sent http.response.start twice.")
        head = self._exchange.head
        fields = {name.lower(): value for name, value in headers}
        length = fields.get(b"content-length")
        self._body_left = None if length is None else int(length)
        self._has_body = head.method != "HEAD" and status not in _BODYLESS
        self._chunked = self._has_body and length is None and head.version == "1.1"
        wish = fields.get(b"connection", b"").lower() == b"close" or (
            self._has_body and length is None and head.version == "1.0"
        )
        self._close = self._connection.closes(self._exchange, close=wish)
        headers = [header for header in headers if header[0].lower() not in _OURS]
        if self._chunked:
            headers.append((b"transfer-encoding", b"chunked"))
        if self._close:
            headers.append(CLOSE)
        elif head.version == "1.0":
            headers.append((b"connection", b"keep-alive"))
        lines = [b"%b: %b\r\n" % header for header in headers]
        if not all(_HEADER.fullmatch(line) for line in lines):
            raise RuntimeError("The application sent a header with characters that are not allowed.")
        self._start = b"%b%b%b\r\n" % (status_line(status), self._connections.default_headers, b"".join(lines))
        self._started = True
