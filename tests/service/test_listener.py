import socket
import sys
import threading
from collections.abc import Iterator

import pytest

from service.bundle.errors import QualmsError
from service.listener import ListenError, listen, take_waiting, turn_away

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux can filter who knocks")


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with listen("127.0.0.1", 0) as opened:
        yield opened


@pytest.mark.parametrize("host", ["192.0.2.1", "2001:db8::1"])
def test_an_address_that_is_not_this_machines_is_a_sentence(host: str) -> None:
    with pytest.raises(ListenError, match=f"^Port 8000 of {host} cannot be listened on: .*; set QUALMS_HOST and"):
        listen(host, 8000)
    assert issubclass(ListenError, QualmsError)


def test_who_waits_is_taken_in_turn_and_can_be_talked_to(listener: socket.socket) -> None:
    clients = [socket.create_connection(listener.getsockname()) for _ in range(3)]
    taken = take_waiting(listener)
    assert [connection.getpeername() for connection in taken] == [client.getsockname() for client in clients]
    for client, connection in zip(clients, taken, strict=True):
        with client, connection:
            client.sendall(b"here")
            connection.setblocking(True)
            assert connection.recv(4) == b"here"
    assert take_waiting(listener) == []


@on_linux
def test_after_turning_away_those_who_were_there_still_talk_and_nobody_new_gets_in(listener: socket.socket) -> None:
    with socket.create_connection(listener.getsockname()) as client:
        turn_away(listener)
        with pytest.raises(TimeoutError):
            socket.create_connection(listener.getsockname(), timeout=0.1)
        (connection,) = take_waiting(listener)
        with connection:
            client.sendall(b"here")
            connection.setblocking(True)
            assert connection.recv(4) == b"here"


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


@on_linux
def test_closing_while_others_knock_resets_none_of_them() -> None:
    with listen("127.0.0.1", 0) as listener:
        listener.settimeout(10)
        knocking = [Knocking(listener.getsockname()) for _ in range(4)]
        for client in knocking:
            client.start()
        for _ in range(100):
            dismiss(listener.accept()[0])
        turn_away(listener)
        waiting = take_waiting(listener)
    for connection in waiting:
        dismiss(connection)
    for client in knocking:
        client.join(10)
    assert [client.is_alive() for client in knocking] == [False] * len(knocking)
    assert [client.resets for client in knocking] == [0] * len(knocking)
