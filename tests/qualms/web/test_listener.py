import socket
import threading
from collections.abc import Iterator

import pytest

from qualms.errors import QualmsError
from qualms.web.listener import ListenError, _drop_all, accept_pending, drop_new_connections, listen


def can_filter() -> bool:
    try:
        with listen("127.0.0.1", 0) as opened:
            _drop_all(opened)
    except OSError:
        return False
    return True


needs_filters = pytest.mark.skipif(not can_filter(), reason="this kernel filters nobody who knocks, or only for root")


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with listen("127.0.0.1", 0) as opened:
        yield opened


@pytest.mark.parametrize("host", ["192.0.2.1", "2001:db8::1"])
def test_an_address_that_is_not_this_machines_is_a_sentence(host: str) -> None:
    with pytest.raises(ListenError, match=f"^Port 8000 of {host} cannot be used: .*; set QUALMS_HOST and"):
        listen(host, 8000)
    assert issubclass(ListenError, QualmsError)


def test_who_waits_is_taken_in_turn_and_can_be_talked_to(listener: socket.socket) -> None:
    clients = [socket.create_connection(listener.getsockname()) for _ in range(3)]
    taken = accept_pending(listener)
    assert [connection.getpeername() for connection in taken] == [client.getsockname() for client in clients]
    for client, connection in zip(clients, taken, strict=True):
        with client, connection:
            client.sendall(b"here")
            connection.setblocking(True)
            assert connection.recv(4) == b"here"
    assert accept_pending(listener) == []


@needs_filters
def test_after_turning_away_those_who_were_there_still_talk_and_nobody_new_gets_in(listener: socket.socket) -> None:
    with socket.create_connection(listener.getsockname()) as client:
        drop_new_connections(listener)
        with pytest.raises(TimeoutError):
            socket.create_connection(listener.getsockname(), timeout=0.1)
        (connection,) = accept_pending(listener)
        with connection:
            client.sendall(b"here")
            connection.setblocking(True)
            assert connection.recv(4) == b"here"


def test_without_a_filter_those_who_wait_are_still_taken(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: socket.socket) -> None:
        raise PermissionError

    monkeypatch.setattr("qualms.web.listener._drop_all", refuse)
    with socket.create_connection(listener.getsockname()) as client:
        drop_new_connections(listener)
        (connection,) = accept_pending(listener)
        with connection:
            assert connection.getpeername() == client.getsockname()


class Knocking(threading.Thread):
    """Connects again and again until it is refused; counts the connections that were reset."""

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


def dismiss(connection: socket.socket) -> None:
    with connection:
        connection.sendall(b"bye")


@needs_filters
def test_closing_while_others_knock_resets_none_of_them() -> None:
    with listen("127.0.0.1", 0) as listener:
        listener.settimeout(10)
        knocking = [Knocking(listener.getsockname()) for _ in range(4)]
        for client in knocking:
            client.start()
        for _ in range(100):
            dismiss(listener.accept()[0])
        drop_new_connections(listener)
        waiting = accept_pending(listener)
    for connection in waiting:
        dismiss(connection)
    for client in knocking:
        client.join(10)
    assert [client.is_alive() for client in knocking] == [False] * len(knocking)
    assert [client.resets for client in knocking] == [0] * len(knocking)
