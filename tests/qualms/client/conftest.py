import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

Reply = tuple[int, dict[str, str], bytes]
"""status, headers and body"""


@pytest.fixture(scope="session")
def digits(draw_images: Callable[[int, int], NDArray[np.uint8]], encode: Callable[..., bytes]) -> list[bytes]:
    """PNG files of the shared model's size."""
    return [encode(image) for image in draw_images(5, 40)]


@pytest.fixture
def digit_file(tmp_path: Path, digits: list[bytes]) -> Path:
    path = tmp_path / "digit.png"
    path.write_bytes(digits[0])
    return path


@dataclass
class Scripted:
    """A server whose replies a test chooses: behaviour of other services and proxies, which ours does not show."""

    url: str
    answer: Callable[[str, dict[str, str], bytes], Reply] = lambda *_: (500, {}, b"")
    """path, headers with names in lower case, and body → reply"""
    requests: list[tuple[str, dict[str, str], bytes]] = field(default_factory=list)


@pytest.fixture
def scripted() -> Iterator[Scripted]:
    with ExitStack() as stack:

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _reply(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                request = (self.path, {name.lower(): value for name, value in self.headers.items()}, body)
                script.requests.append(request)
                status, headers, content = script.answer(*request)
                self.send_response(status)
                for name, value in {"content-length": str(len(content)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_POST = _reply  # noqa: N815  # the names that http.server calls

            def log_message(self, *_: Any) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        stack.callback(server.server_close)
        script = Scripted(f"http://127.0.0.1:{server.server_address[1]}")
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        stack.callback(server.shutdown)
        yield script


@pytest.fixture
def trickle() -> Iterator[str]:
    """URL of a server that sends one byte of an endless reply every 50 ms."""
    ended = threading.Event()

    def serve(connection: socket.socket) -> None:
        with connection:
            connection.recv(65536)
            try:
                connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 1000000\r\n\r\n")
                while not ended.wait(0.05):
                    connection.sendall(b" ")
            except OSError:
                return

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(connection,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        ended.set()
        listener.shutdown(socket.SHUT_RDWR)
