"""Run an ASGI application for one request. It reads the body only if the application asks for it."""

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from qualms.http1.connections import Connections
from qualms.http1.exchange import Exchange
from qualms.http1.messages import CLOSE, Refusal, status_line

if TYPE_CHECKING:
    from qualms.http1.connection import Connection

_log = logging.getLogger("qualms.http1")
_BODYLESS = (204, 304)


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
        self._chunked = False
        self._close = False

    def start(self, transport: asyncio.BaseTransport) -> None:
        """Run the application in a task."""
        head = self._exchange.head
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": head.version,
            "server": transport.get_extra_info("sockname"),
            "client": transport.get_extra_info("peername"),
            "scheme": "http",
            "method": head.method,
            "root_path": "",
            "path": head.path,
            "raw_path": head.target.partition(b"?")[0],
            "query_string": head.query,
            "headers": head.headers,
            "state": self._app_state.copy(),
        }
        task = asyncio.get_running_loop().create_task(self._run(scope))
        self._connections.tasks.add(task)
        task.add_done_callback(self._connections.tasks.discard)

    def wake(self) -> None:
        """The client has disconnected, or has read what was sent."""
        self._woken.set()

    async def _run(self, scope: dict[str, Any]) -> None:
        try:
            await self._connections.app(scope, self._receive, self._send)
            if not self._complete and not self._exchange.disconnected:
                _log.error("the application ended without a complete reply", extra={"path": scope["path"]})
        except asyncio.CancelledError:
            self._close = True
        except Exception:
            _log.exception("the application failed", extra={"path": scope["path"]})
        finally:
            if not self._complete:
                self._finish_early()

    def _finish_early(self) -> None:
        """End an exchange without a complete reply."""
        if not self._started and not self._exchange.disconnected:
            self._connection.write(status_line(500) + b"content-length: 0\r\nconnection: close\r\n\r\n")
        elif not self._exchange.disconnected:
            self._connection.abort()
        self._connection.finish(self._exchange, close=True)

    async def _receive(self) -> dict[str, Any]:
        if not self._body_requested:
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
        body, more = message.get("body", b""), message.get("more_body", False)
        data, self._start = self._start or b"", None
        if self._exchange.head.method != "HEAD":
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
        while self._connection.write_paused and not self._exchange.disconnected:
            self._woken.clear()
            await self._woken.wait()

    def _begin(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Prepare the head of the reply, which is sent with the first part of the body."""
        if self._started:
            raise RuntimeError("The application sent http.response.start twice.")
        self._started = True
        head, names = self._exchange.head, {name.lower() for name, _ in headers}
        sized = b"content-length" in names or status in _BODYLESS or head.method == "HEAD"
        self._chunked = not sized and head.version == "1.1"
        wish = (not sized and head.version == "1.0") or any(
            name.lower() == b"connection" and value == b"close" for name, value in headers
        )
        self._close = self._connection.closes(self._exchange, close=wish)
        if self._chunked:
            headers.append((b"transfer-encoding", b"chunked"))
        if self._close:
            headers = [*(header for header in headers if header[0].lower() != b"connection"), CLOSE]
        elif head.version == "1.0":
            headers.append((b"connection", b"keep-alive"))
        lines = b"".join(b"%b: %b\r\n" % header for header in headers)
        self._start = b"%b%b%b\r\n" % (status_line(status), self._connections.default_headers, lines)
