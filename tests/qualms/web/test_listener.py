"""Listening with a clear error, and closing a listener without resetting connections."""

import socket
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest

from qualms.errors import QualmsError
from qualms.web.listener import ListenError, accept_pending, drop_new_connections, listen


@pytest.fixture
def socket_filters() -> None:
    """Skip the test if socket filters are not available: then the first new connection would be accepted."""
    with listen("127.0.0.1", 0) as listener:
        drop_new_connections(listener)
        with suppress(TimeoutError):
            socket.create_connection(listener.getsockname(), timeout=0.1).close()
            pytest.skip("socket filters are not available, or only for root")


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with listen("127.0.0.1", 0) as opened:
        yield opened


@pytest.mark.parametrize("host", ["192.0.2.1", "2001:db8::1"])
def test_an_address_of_another_machine_is_one_sentence(host: str) -> None:
    with pytest.raises(ListenError, match=f"^Port 8000 of {host} cannot be used: .*; set QUALMS_HOST and"):
        listen(host, 8000)
    assert issubclass(ListenError, QualmsError)


def test_pending_connections_are_accepted_in_order_and_usable(listener: socket.socket) -> None:
    clients = [socket.create_connection(listener.getsockname()) for _ in range(3)]
    taken = accept_pending(listener)
    assert [connection.getpeername() for connection in taken] == [client.getsockname() for client in clients]
    for client, connection in zip(clients, taken, strict=True):
        with client, connection:
            client.sendall(b"here")
            connection.setblocking(True)
            assert connection.recv(4) == b"here"
    assert accept_pending(listener) == []


@pytest.mark.usefixtures("socket_filters")
def test_pending_connections_remain_usable_and_new_ones_are_dropped(listener: socket.socket) -> None:
    with socket.create_connection(listener.getsockname()) as client:
        drop_new_connections(listener)
        with pytest.raises(TimeoutError):
            socket.create_connection(listener.getsockname(), timeout=0.1)
        (connection,) = accept_pending(listener)
        with connection:
            client.sendall(b"here")
            connection.setblocking(True)
            assert connection.recv(4) == b"here"


def test_without_a_socket_filter_pending_connections_are_still_accepted(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    with socket.create_connection(listener.getsockname()) as client:
        drop_new_connections(listener)
        (connection,) = accept_pending(listener)
        with connection:
            assert connection.getpeername() == client.getsockname()


class Connecting(threading.Thread):
    """Connects repeatedly until a connection is refused; counts connections that were reset."""

    def __init__(self, address: tuple[str, int]) -> None:
        super().__init__(daemon=True)
        self._address = address
        self.resets = 0

    def run(self) -> None:
        while True:
            try:
                with socket.create_connection(self._address, timeout=10) as connection:
                    self.resets += connection.recv(3) != b"bye"
            except ConnectionRefusedError:
                return
            except ConnectionResetError:
                self.resets += 1


def say_bye(connection: socket.socket) -> None:
    with connection:
        connection.sendall(b"bye")


@pytest.mark.usefixtures("socket_filters")
def test_closing_while_clients_connect_resets_no_connection() -> None:
    with listen("127.0.0.1", 0) as listener:
        listener.settimeout(10)
        clients = [Connecting(listener.getsockname()) for _ in range(4)]
        for client in clients:
            client.start()
        for _ in range(100):
            say_bye(listener.accept()[0])
        drop_new_connections(listener)
        pending = accept_pending(listener)
    for connection in pending:
        say_bye(connection)
    for client in clients:
        client.join(10)
    assert [client.is_alive() for client in clients] == [False] * len(clients)
    assert [client.resets for client in clients] == [0] * len(clients)
