"""Listening with a clear error, and closing a listener without resetting connections."""

import multiprocessing
import os
import random
import select
import socket
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress

import pytest
from tests.qualms.http1.narrow_link import CLIENT, SERVER, LinkSettings, narrow_link, unavailable

from qualms.errors import QualmsError
from qualms.http1.listener import ListenError, accept_pending, drop_new_connections, handshakes_under_way, listen

TIMEOUT = 10.0
FIN, SYN, RST, PSH, ACK, ECE, CWR = (1 << bit for bit in (0, 1, 2, 3, 4, 6, 7))
"""flags of TCP headers"""


@pytest.fixture(scope="module")
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


def tcp_header(flags: int, ports: tuple[int, int] = (1, 2), sequence: int = 0, acknowledged: int = 0) -> bytes:
    return struct.pack("!HHIIBBHHH", *ports, sequence, acknowledged, 5 << 4, flags, 65535, 0, 0)


@pytest.mark.usefixtures("socket_filters")
@pytest.mark.parametrize(
    ("flags", "passes"),
    [
        (SYN, False),
        (SYN | ECE | CWR, False),
        (ACK, True),
        (ACK | PSH, True),
        (ACK | FIN, True),
        (ACK | SYN, True),
        (RST, True),
    ],
)
def test_the_filter_drops_only_packets_that_begin_a_handshake(flags: int, passes: bool) -> None:
    """A filter sees the packets of a Unix socket from their first byte, as it sees TCP segments."""
    sender, receiver = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with sender, receiver:
        drop_new_connections(receiver)
        packet = tcp_header(flags) + b"data"
        sender.send(packet)
        sender.send(tcp_header(ACK))
        assert receiver.recv(100) == (packet if passes else tcp_header(ACK))


class Peer:
    """The other end of a TUN device: sends TCP packets of its own making to a port behind the device."""

    def __init__(self, device: int, port: int) -> None:
        self._device, self._port = device, port

    def send(self, source: int, flags: int, sequence: int, acknowledged: int = 0, data: bytes = b"") -> None:
        segment = tcp_header(flags, (source, self._port), sequence, acknowledged) + data
        addresses = socket.inet_aton(SERVER) + socket.inet_aton(CLIENT)
        pseudo_header = addresses + struct.pack("!HH", socket.IPPROTO_TCP, len(segment))
        segment = segment[:16] + checksum(pseudo_header + segment) + segment[18:]
        head = struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(segment), 0, 0, 64, socket.IPPROTO_TCP, 0) + addresses
        os.write(self._device, head[:10] + checksum(head) + head[12:] + segment)

    def receive(self) -> tuple[int, int, int]:
        """Destination port, flags and sequence number of the next TCP packet."""
        while select.select([self._device], [], [], TIMEOUT)[0]:
            packet = os.read(self._device, 2000)
            if packet[0] == 0x45 and packet[9] == socket.IPPROTO_TCP:
                _, port, sequence, _, _, flags = struct.unpack_from("!HHIIBB", packet, 20)
                return port, flags, sequence
        raise TimeoutError


def checksum(data: bytes) -> bytes:
    words = sum(struct.unpack(f"!{(len(data) + 1) // 2}H", data + b"\0" * (len(data) % 2)))
    while words > 0xFFFF:
        words = (words & 0xFFFF) + (words >> 16)
    return struct.pack("!H", words ^ 0xFFFF)


def begin_two_handshakes() -> tuple[list[bool], list[int], bytes]:
    """Attach the filter between the SYN packets of two clients, then end the handshake of the first with data.

    Returns whether a handshake was under way before, during and after it, the ports that got a packet, and the data.
    """
    settings = LinkSettings(delay=0, jitter=0, rate=1e9, queue=1)
    with narrow_link(settings, random.Random(0)) as link, listen(CLIENT, 0) as listener:
        listener.settimeout(TIMEOUT)
        port = listener.getsockname()[1]
        peer = Peer(link.devices[1], port)
        under_way = [handshakes_under_way({port})]
        peer.send(1001, SYN, 7000)
        first, flags, sequence = peer.receive()
        assert flags == SYN | ACK
        under_way.append(handshakes_under_way({port}))
        drop_new_connections(listener)
        peer.send(1002, SYN, 8000)
        peer.send(1001, ACK | PSH, 7001, sequence + 1, b"here")
        connection = listener.accept()[0]
        under_way.append(handshakes_under_way({port}))
        with connection:
            return under_way, [first, peer.receive()[0]], connection.recv(100)


@pytest.mark.slow
@pytest.mark.skipif(unavailable() is not None, reason=unavailable() or "")
def test_a_handshake_that_has_begun_ends_while_new_ones_are_dropped() -> None:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        under_way, ports, data = process.submit(begin_two_handshakes).result()
    assert under_way == [False, True, False]
    assert ports == [1001, 1001]
    assert data == b"here"


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_connections_that_are_established_or_closed_are_no_handshakes(address: str) -> None:
    try:
        listener = listen(address, 0)
    except ListenError:
        pytest.skip(f"{address} is not available")
    port = listener.getsockname()[1]
    with listener, socket.create_connection((address, port)), listener.accept()[0]:
        assert not handshakes_under_way({port})
    assert not handshakes_under_way({port})


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
