"""Every odd request has the expected status, and afterwards the connection is closed or in sync."""

import socket
from collections.abc import Iterator

import pytest
from tests.qualms.fuzz.case import sentinel, sentinel_id
from tests.qualms.fuzz.oracle import read_requests
from tests.qualms.fuzz.replies import Reply, ReplyReader, problem_with_error
from tests.qualms.fuzz.service import HOST, Service, running_service
from tests.qualms.http1.odd_requests import ODD_REQUESTS, OddRequest

from qualms.bundle.file import Bundle

TIMEOUT = 5.0
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def service(bundle: Bundle) -> Iterator[Service]:
    with running_service(bundle.path) as process:
        yield process


def read_replies(connection: socket.socket, methods: list[bytes], last: bytes) -> tuple[list[Reply], bool]:
    """Replies up to the one with the id `last` or the end of the connection, and whether the connection has ended."""
    replies: list[Reply] = []
    rest = b""
    while True:
        method = methods[len(replies)] if len(replies) < len(methods) else b"GET"
        reader, reply = ReplyReader(method), None
        if rest:
            reply = reader.feed(rest)
        while reply is None:
            try:
                data = connection.recv(65536)
            except ConnectionResetError:
                data = b""
            if not data:
                return replies, True
            reply = reader.feed(data)
        replies.append(reply)
        rest = reader.rest
        if reply.request_id == last:
            assert not rest
            return replies, False


@pytest.mark.parametrize("odd", ODD_REQUESTS, ids=lambda odd: odd.name)
def test_an_odd_request_is_answered_as_expected_and_the_connection_is_closed_or_in_sync(
    service: Service, odd: OddRequest
) -> None:
    methods = [message.method for message in read_requests(odd.data).messages]
    with socket.create_connection((HOST, service.port), TIMEOUT) as connection:
        try:
            connection.sendall(odd.data + sentinel(0))
        except ConnectionError:
            assert odd.closes
        replies, ended = read_replies(connection, methods, sentinel_id(0))
    assert replies, "closed without a reply"
    first = replies[0]
    assert first.status in odd.statuses, first
    if first.status >= 400:
        assert problem_with_error(first, has_body=b"HEAD" not in methods[:1]) is None
    if odd.closes:
        assert ended
        assert first.closes
        assert len(replies) == 1
    else:
        assert not ended
        assert (replies[-1].status, replies[-1].request_id) == (200, sentinel_id(0))


def test_a_body_that_arrives_after_its_pipelined_head_is_read(service: Service) -> None:
    """Reading is paused while the first request is in progress, and must go on for the body of the second."""
    post = (
        b"POST /predict HTTP/1.1\r\nHost: x\r\nX-Request-ID: %b\r\nContent-Type: image/png\r\nContent-Length: 5\r\n\r\n"
    )
    with socket.create_connection((HOST, service.port), TIMEOUT) as connection:
        connection.sendall(b"GET /models/none HTTP/1.1\r\nHost: x\r\nX-Request-ID: first\r\n\r\n" + post % b"second")
        first, _ = read_replies(connection, [b"GET"], b"first")
        connection.sendall(b"hello")
        second, _ = read_replies(connection, [b"POST"], b"second")
    assert [reply.status for reply in (*first, *second)] == [404, 415]


def test_names_are_unique() -> None:
    names = [odd.name for odd in ODD_REQUESTS]
    assert len(names) == len(set(names)) >= 150


@pytest.mark.parametrize("odd", [odd for odd in ODD_REQUESTS if not odd.closes], ids=lambda odd: odd.name)
def test_h11_accepts_the_odd_requests_that_are_served(odd: OddRequest) -> None:
    """A request that another careful parser refuses should not be served."""
    stream = read_requests(odd.data)
    assert (stream.end, stream.error) == ("idle", "")
