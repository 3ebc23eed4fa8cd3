"""Ordinary requests get the same reply from our server and from uvicorn's own protocol, on real sockets."""

import asyncio
import socket
from typing import Any

import h11
import pytest
import uvicorn

from qualms.http1.connections import Connections
from qualms.http1.messages import Refusal, Reply
from qualms.http1.server import protocol

HOST = b"Host: a\r\n"


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Replies in the way that the path names, with what it has received."""
    assert scope["type"] == "http"
    body, more = b"", True
    while more and scope["path"] != "/unread":
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    seen = {name: scope[name] for name in ("method", "path", "raw_path", "query_string", "http_version", "root_path")}
    text = repr((seen, [header for header in scope["headers"] if header[0] != b"host"], body)).encode()
    headers = [(b"content-type", b"text/plain"), (b"x-two", b"1"), (b"x-two", b"2")]
    if scope["path"] == "/close":
        headers.append((b"connection", b"close"))
    if scope["path"] not in ("/stream", "/empty"):
        headers.append((b"content-length", b"%d" % len(text)))
    status = 204 if scope["path"] == "/empty" else 200
    await send({"type": "http.response.start", "status": status, "headers": headers})
    if scope["path"] == "/stream":
        for start in range(0, len(text), 50):
            await send({"type": "http.response.body", "body": text[start : start + 50], "more_body": True})
        await send({"type": "http.response.body"})
    elif status == 204:
        await send({"type": "http.response.body"})
    else:
        await send({"type": "http.response.body", "body": text})


def ours() -> Any:
    def refuse(refusal: Refusal) -> Reply:
        return Reply(refusal.status, [(b"content-length", b"0")], b"", close=True)

    def create(**options: Any) -> Any:
        connections = Connections(app, refuse)  # one connection per server here
        connections.start()
        return protocol(connections)(**options)

    return create


async def _replies(http: Any, stream: bytes) -> bytes:
    config = uvicorn.Config(
        app, http=http, ws="none", lifespan="off", log_config=None, date_header=False, server_header=False
    )
    config.load()
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server.lifespan = config.lifespan_class(config)
        await server.startup(sockets=[listener])
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        writer.write(stream + b"GET /last HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        received = await asyncio.wait_for(reader.read(), 20)
        writer.close()
        for one in server.servers:
            one.close()
    return received


def replies(http: Any, stream: bytes, methods: list[bytes]) -> list[tuple[int, list[tuple[bytes, bytes]], bytes, bool]]:
    """Status, headers, body and whether the connection is closed, of each reply, as h11 reads them."""
    client = h11.Connection(h11.CLIENT)
    client.receive_data(asyncio.run(_replies(http, stream)))
    client.receive_data(b"")
    result = []
    for method in [*methods, b"GET"]:
        client.send(h11.Request(method=method, target="/", headers=[("host", "a")]))
        client.send(h11.EndOfMessage())
        body, close = b"", False
        while not isinstance(event := client.next_event(), h11.EndOfMessage):
            if isinstance(event, h11.Data):
                body += bytes(event.data)
            elif isinstance(event, h11.Response):
                close = (b"connection", b"close") in event.headers
                head = event.status_code, sorted(header for header in event.headers if header[0] != b"connection")
            else:
                assert isinstance(event, h11.InformationalResponse), event
        result.append((*head, body, close))
        if close:
            return result
        client.start_next_cycle()
    return result


@pytest.mark.parametrize(
    ("stream", "methods"),
    [
        (b"GET / HTTP/1.1\r\n" + HOST + b"\r\n", [b"GET"]),
        (b"GET /a%20b/%C3%A9?c=%20&d HTTP/1.1\r\n" + HOST + b"\r\n", [b"GET"]),
        (b"GET http://a/b?c HTTP/1.1\r\n" + HOST + b"\r\n", [b"GET"]),
        (b"GET / HTTP/1.1\r\n" + HOST + b"A: 1\r\na: 2\r\nB:\r\nC:  3\r\n\r\n", [b"GET"]),
        (b"HEAD / HTTP/1.1\r\n" + HOST + b"\r\n", [b"HEAD"]),
        (b"POST / HTTP/1.1\r\n" + HOST + b"Content-Length: 5\r\n\r\nhello", [b"POST"]),
        (b"POST / HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\n2;x=y\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n", [b"POST"]),
        (b"POST / HTTP/1.1\r\n" + HOST + b"Content-Length: 0\r\n\r\n", [b"POST"]),
        (b"POST / HTTP/1.1\r\n" + HOST + b"Content-Length: 100000\r\n\r\n" + bytes(100_000), [b"POST"]),
        (b"GET /stream HTTP/1.1\r\n" + HOST + b"\r\n", [b"GET"]),
        (b"GET /empty HTTP/1.1\r\n" + HOST + b"\r\n", [b"GET"]),
        (b"GET /close HTTP/1.1\r\n" + HOST + b"\r\n", [b"GET"]),
        (b"GET / HTTP/1.1\r\n" + HOST + b"Connection: close\r\n\r\n", [b"GET"]),
        (b"GET /one HTTP/1.1\r\n" + HOST + b"\r\nGET /two HTTP/1.1\r\n" + HOST + b"\r\n", [b"GET", b"GET"]),
        (b"OPTIONS / HTTP/1.1\r\n" + HOST + b"\r\n", [b"OPTIONS"]),
        (b"DELETE /x HTTP/1.1\r\n" + HOST + b"\r\n", [b"DELETE"]),
    ],
)  # fmt: skip
def test_the_reply_equals_that_of_uvicorn(stream: bytes, methods: list[bytes]) -> None:
    expected = replies("httptools", stream, methods)
    assert replies(ours(), stream, methods) == expected


@pytest.mark.parametrize("http", ["httptools", "h11"])
def test_the_comparison_sees_a_reply_of_uvicorn(http: str) -> None:
    (first, last) = replies(http, b"GET /a HTTP/1.1\r\n" + HOST + b"\r\n", [b"GET"])
    assert (first[0], first[3], last[3]) == (200, False, True)
    assert b"'/a'" in first[2]
