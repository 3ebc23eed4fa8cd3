"""Heads of requests: accepted ones are read as h11 reads them, and everything that h11 and llhttp refuse is refused."""

import sys
from types import FrameType
from typing import Any

import h11
import httptools
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from qualms.http1.head import MAX_HEADERS, parse_head
from qualms.http1.messages import REASONS, Head, Refusal


def head(*lines: bytes, first: bytes = b"GET / HTTP/1.1", host: bytes = b"Host: x\r\n") -> bytes:
    return first + b"\r\n" + host + b"".join(line + b"\r\n" for line in lines) + b"\r\n"


def refusal(data: bytes) -> Refusal:
    with pytest.raises(Refusal) as caught:
        parse_head(data)
    return caught.value


# Accepted heads


def test_the_parts_of_a_head() -> None:
    parsed = parse_head(head(b"X-Upper: Value ", b"Content-Length: 12", first=b"POST /a%20b?c=%20 HTTP/1.1"))
    assert (parsed.method, parsed.target, parsed.path, parsed.query) == ("POST", b"/a%20b?c=%20", "/a b", b"c=%20")
    assert parsed.headers == [(b"host", b"x"), (b"x-upper", b"Value"), (b"content-length", b"12")]
    assert (parsed.version, parsed.length, parsed.keep_alive) == ("1.1", 12, True)


def test_repeated_headers_are_kept_in_order_and_the_last_value_counts() -> None:
    parsed = parse_head(head(b"A: 1", b"a: 2", b"A: 3"))
    assert parsed.headers[1:] == [(b"a", b"1"), (b"a", b"2"), (b"a", b"3")]
    assert parsed.fields[b"a"] == b"3"


@pytest.mark.parametrize(
    ("lines", "length"),
    [
        ([], 0),
        ([b"Content-Length: 0"], 0),
        ([b"Content-Length: 007"], 7),
        ([b"Content-Length:\t 7 \t"], 7),
        ([b"content-LENGTH: 999999999999999999"], 10**18 - 1),
        ([b"Transfer-Encoding: chunked"], None),
        ([b"transfer-encoding: \tCHUNKED\t "], None),
    ],
)
def test_the_length_of_the_body(lines: list[bytes], length: int | None) -> None:
    assert parse_head(head(*lines)).length == length


@pytest.mark.parametrize(
    ("version", "lines", "kept"),
    [
        (b"1.1", [], True),
        (b"1.1", [b"Connection: close"], False),
        (b"1.1", [b"Connection: a,\tClose ,b"], False),
        (b"1.1", [b"Connection: a", b"Connection: close", b"Connection: b"], False),
        (b"1.1", [b"Connection: closed"], True),
        (b"1.1", [b"Connection:"], True),
        (b"1.0", [], False),
        (b"1.0", [b"Connection: Keep-Alive"], True),
        (b"1.0", [b"Connection: keep-alive, close"], False),
        (b"1.0", [b"Connection: x"], False),
    ],
)
def test_whether_the_client_keeps_the_connection(version: bytes, lines: list[bytes], kept: bool) -> None:
    assert parse_head(head(*lines, first=b"GET / HTTP/" + version)).keep_alive == kept


@pytest.mark.parametrize(
    ("target", "path", "query"),
    [
        (b"/", "/", b""),
        (b"/?", "/", b""),
        (b"/a?b?c", "/a", b"b?c"),
        (b"/%C3%A9%ff%zz%", "/é\ufffd%zz%", b""),
        (b"//a", "//a", b""),
        (b"http://x/a?b", "/a", b"b"),
        (b"HTTPS://x:80", "/", b""),
        (b"http://x?b", "/", b"b"),
    ],
)
def test_targets_are_split_into_path_and_query(target: bytes, path: str, query: bytes) -> None:
    parsed = parse_head(head(first=b"GET " + target + b" HTTP/1.1"))
    assert (parsed.path, parsed.query) == (path, query)
    assert parsed.target.startswith(b"/")


def test_the_asterisk_is_a_target_of_options() -> None:
    assert parse_head(head(first=b"OPTIONS * HTTP/1.1")).path == "*"
    assert refusal(head(first=b"GET * HTTP/1.1")).status == 400


@pytest.mark.parametrize("value", [b"100-continue", b"100-Continue ", b"\t100-CONTINUE"])
def test_the_expectation_of_continue(value: bytes) -> None:
    assert parse_head(head(b"Expect: " + value)).expects_continue
    assert not parse_head(head(b"Expect: " + value, first=b"GET / HTTP/1.0")).expects_continue
    assert not parse_head(head()).expects_continue


def test_an_offer_of_another_protocol_is_an_ordinary_head() -> None:
    parsed = parse_head(head(b"Upgrade: h2c", b"Connection: Upgrade", b"Content-Length: 5", first=b"POST / HTTP/1.1"))
    assert (parsed.length, parsed.keep_alive) == (5, True)


# Refused heads


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (head(host=b""), 400),
        (head(b"Host: x"), 400),
        (head(b"Host: y", first=b"GET / HTTP/1.0"), 400),
        (head(b"Content-Length: 5", b"Content-Length: 5"), 400),
        (head(b"Content-Length: 5, 5"), 400),
        (head(b"Content-Length: 1000000000000000000"), 400),
        (head(b"Content-Length: \xb2"), 400),
        (head(b"Content-Length: 5", b"Transfer-Encoding: chunked"), 400),
        (head(b"Transfer-Encoding: chunked", b"Content-Length: 5"), 400),
        (head(b"Transfer-Encoding: chunked", first=b"POST / HTTP/1.0"), 400),
        (head(b"Transfer-Encoding: chunked", b"Transfer-Encoding: chunked"), 400),
        (head(b"Transfer-Encoding: chunked, chunked"), 400),
        (head(b"Transfer-Encoding: gzip, chunked"), 501),
        (head(b"Transfer-Encoding: gzip"), 501),
        (head(b"Transfer-Encoding: identity"), 501),
        (head(b"Transfer-Encoding:"), 400),
        (head(b"Transfer-Encoding: chunked\x0b"), 400),
        (head(first=b"BREW / HTTP/1.1"), 501),
        (head(first=b"get / HTTP/1.1"), 501),
        (head(first=b"GET / HTTP/1.2"), 400),
        (head(first=b"GET / HTTP/2.0"), 400),
        (head(first=b"GET  / HTTP/1.1"), 400),
        (head(first=b"GET /\x80 HTTP/1.1"), 400),
        (head(first=b"GET /#a HTTP/1.1"), 400),
        (head(first=b"GET a HTTP/1.1"), 400),
        (head(first=b"GET ftp://x/ HTTP/1.1"), 400),
        (head(first=b"GET http:///a HTTP/1.1"), 400),
        (head(first=b"GET http://?a HTTP/1.1"), 400),
        (head(first=b"GET http://user@x/a HTTP/1.1"), 400),
        (head(b"A: b\x00"), 400),
        (head(b"A : b"), 400),
        (head(b" A: b"), 400),
        (head(b"A: b\n c"), 400),
        (head(b"A: b\rc"), 400),
        (head(b"A: b\nContent-Length: 5"), 400),
        (head(b"A"), 400),
        (b"\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\n", 400),
        (head(*(MAX_HEADERS * [b"A: b"])), 431),
    ],
)
def test_heads_that_are_refused(data: bytes, status: int) -> None:
    refused = refusal(data)
    assert refused.status == status
    assert refused.reason in REASONS
    assert refused.detail.endswith(".")


def test_as_many_headers_as_allowed_are_accepted() -> None:
    assert len(parse_head(head(*((MAX_HEADERS - 1) * [b"A: b"]))).headers) == MAX_HEADERS


def test_refusals_quote_the_clients_bytes_shortened_and_without_control_characters() -> None:
    long = refusal(head(host=b"Host: " + 5000 * b"/" + b"\r\n")).detail
    assert len(long) < 150
    assert "///..." in long
    assert refusal(head(host=b"Host: a\tb\r\n")).detail == r"The Host header 'a\tb' is not a host."


def test_a_head_that_was_accepted_before_does_not_change_the_next() -> None:
    """Request lines and hosts may be remembered, but not between versions or methods."""
    for first, version, kept in ((b"GET /same HTTP/1.1", "1.1", True), (b"GET /same HTTP/1.0", "1.0", False)) * 2:
        parsed = parse_head(head(first=first))
        assert (parsed.version, parsed.keep_alive, parsed.path) == (version, kept, "/same")
    for _ in range(2):
        assert refusal(head(host=b"Host: a/b\r\n")).status == 400
        assert refusal(head(first=b"GET same HTTP/1.1")).status == 400
        assert parse_head(head()).headers == [(b"host", b"x")]
    changed, unchanged = parse_head(head(b"A: b")), parse_head(head(b"A: b"))
    changed.headers.append((b"changed", b""))
    assert unchanged.headers == [(b"host", b"x"), (b"a", b"b")]


# Other parsers


def h11_request(data: bytes) -> h11.Request | None:
    """The head as h11 reads it; None if it refuses it."""
    connection = h11.Connection(h11.SERVER, max_incomplete_event_size=2**20)
    connection.receive_data(data)
    try:
        event = connection.next_event()
    except h11.RemoteProtocolError:
        return None
    return event if isinstance(event, h11.Request) else None


class _Complete:
    complete = False

    def on_headers_complete(self) -> None:
        self.complete = True


def llhttp_accepts(data: bytes) -> bool:
    events = _Complete()
    try:
        httptools.HttpRequestParser(events).feed_data(data)
    except httptools.HttpParserUpgrade:
        return True
    except httptools.HttpParserError:
        return False
    return events.complete


def check(data: bytes) -> Head | None:
    """Parse a head and compare it with h11 and llhttp; None if it is refused."""
    reference = h11_request(data)
    try:
        parsed = parse_head(data)
    except Refusal as error:
        assert (400 <= error.status < 600) and error.reason in REASONS
        return None
    if reference is None:
        assert llhttp_accepts(data), "refused by both"
        return parsed
    assert parsed.method.encode() == reference.method
    assert parsed.version.encode() == reference.http_version
    assert reference.target in (parsed.target, reference.target if b"://" in reference.target else None)
    lengths = (b"content-length", b"transfer-encoding")  # h11 normalizes these
    assert [one for one in parsed.headers if one[0] not in lengths] == [
        one for one in reference.headers if one[0] not in lengths
    ]
    fields = dict(reference.headers)
    if b"transfer-encoding" in fields:
        assert parsed.length is None
    else:
        assert parsed.length == int(fields.get(b"content-length", b"0"))
    return parsed


NAMES = st.sampled_from([b"A", b"X-B", b"Accept", b"Content-Type", b"!#$%&'*+-.^_`|~9z", b"Cookie", b"connection"])
VALUES = st.sampled_from(
    [b"", b"b", b" b ", b"\tb\t", b"b c", b"b\tc", b"close", b"keep-alive", b"a, close", b"\xc3\xa9\xff", b":", b'"b"']
)
TARGETS = st.sampled_from([b"/", b"/a?b=c", b"/%20", b"/a//b/../c", b"http://x/y", b"/[]@:!$&'()*+,;=-._~"])
FRAMING = st.sampled_from(
    [
        [],
        [b"Content-Length: 5"],
        [b"content-length:  0005\t"],
        [b"Transfer-Encoding: Chunked "],
        [b"Expect: 100-continue"],
    ]
)


@given(
    method=st.sampled_from([b"GET", b"POST", b"HEAD", b"OPTIONS", b"PUT", b"DELETE", b"PATCH"]),
    target=TARGETS,
    headers=st.lists(st.tuples(NAMES, VALUES), max_size=6),
    framing=FRAMING,
)
def test_valid_heads_are_accepted_and_read_as_h11_reads_them(
    method: bytes, target: bytes, headers: list[tuple[bytes, bytes]], framing: list[bytes]
) -> None:
    lines = [name + b":" + value for name, value in headers]
    assert check(head(*lines, *framing, first=b"%b %b HTTP/1.1" % (method, target))) is not None


PIECES = st.sampled_from(
    [
        *(b"GET", b"POST", b"get", b" ", b"  ", b"\t", b"/", b"/a", b"*", b"http://x/", b"x:80"),
        *(b"HTTP/1.1", b"HTTP/1.0", b"HTTP/2", b"\r\n", b"\r\n", b"\r\n", b"\n", b"\r"),
        *(
            b"Host: x",
            b"Host:",
            b"Content-Length: 5",
            b"Content-Length:",
            b"Connection: close",
            b"Upgrade: h2c",
            b"A: b",
        ),
        *(
            b"Transfer-Encoding: chunked",
            b"Transfer-Encoding: gzip",
            b"chunked",
            b":",
            b",",
            b"5",
            b"0x",
            b"+",
            b"-",
            b"_",
        ),
        *(b"\0", b"\x7f", b"\x80", b"\xff", b"#", b"?", b"%", b'"', b"("),
    ]
)
LINES = st.sampled_from(
    [
        *(
            b"GET / HTTP/1.1",
            b"POST /a HTTP/1.0",
            b"Host: x",
            b"Host: x y",
            b"A: b",
            b"A: b ",
            b" c",
            b"A :b",
            b"A: b\rc",
        ),
        *(b"Content-Length: 5", b"Content-Length: +5", b"Content-Length : 5", b"content-length: 5, 5", b"A\0: b"),
        *(b"Transfer-Encoding: chunked", b"Transfer-Encoding:\x0bchunked", b"Connection: upgrade", b"Upgrade: h2c"),
        *(b"A: \xff", b"Host: x"),
    ]
)


@settings(max_examples=1000)
@given(pieces=st.lists(PIECES, max_size=15))
@example([b"GET", b" ", b"/", b" ", b"HTTP/1.1", b"\r\n", b"Host: x", b"\t", b"\r\n"])
def test_heads_of_odd_pieces_are_read_as_h11_reads_them_or_refused(pieces: list[bytes]) -> None:
    data = b"".join(pieces)
    end = data.find(b"\r\n\r\n")
    check(data[: end + 4] if end >= 0 else data + b"\r\n\r\n")


@settings(max_examples=1000)
@given(lines=st.lists(LINES, max_size=6))
def test_heads_of_odd_lines_are_read_as_h11_reads_them_or_refused(lines: list[bytes]) -> None:
    check(b"\r\n".join([b"POST / HTTP/1.1", b"Host: x", *lines]) + b"\r\n\r\n")


@given(data=st.binary(max_size=200))
def test_arbitrary_bytes_raise_nothing_else_than_refusals(data: bytes) -> None:
    check(data.replace(b"\r\n\r\n", b"") + b"\r\n\r\n")


@given(place=st.integers(0, 80), byte=st.integers(0, 255), remove=st.booleans())
def test_a_valid_head_with_one_byte_changed_is_read_as_h11_reads_it_or_refused(
    place: int, byte: int, remove: bool
) -> None:
    data = head(b"Content-Length: 5", b"X-A: b", b"Connection: close")[:-4]
    place %= len(data)
    changed = data[:place] + (b"" if remove else bytes([byte])) + data[place + 1 :]
    if b"\r\n\r\n" not in changed:
        check(changed + b"\r\n\r\n")


# Time


def calls(data: bytes) -> int:
    """Number of Python and C function calls that parsing needs."""
    count = 0

    def trace(_frame: FrameType, event: str, _arg: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(trace)
    try:
        parse_head(data)
    except Refusal:
        pass
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize(
    "line",
    [
        b"A: b",
        b"Connection: a, b, c",
        b"A: " + 200 * b" " + b"b",
        b"A : b",
        b"A: b ",
        b"A:" + 200 * b"\t",
        b"Cookie: a=b",
    ],
)
def test_work_grows_linearly_with_the_number_of_headers(line: bytes) -> None:
    small, large = (calls(head(*(count * [line]))) for count in (100, 200))
    assert large <= 2.2 * small + 20


@pytest.mark.parametrize("fill", [b" ", b"\t", b",", b"a", b"%41", b" \t", b"\xff"])
@pytest.mark.parametrize("line", [b"A: b%bc\r\nbad line", b"Transfer-Encoding: %bx", b"Connection: %bx", b"A: b%b"])
def test_the_number_of_calls_does_not_depend_on_the_length_of_a_value(line: bytes, fill: bytes) -> None:
    """Only `Connection` and `Transfer-Encoding` are lists, whose parts are counted once."""
    small, large = (calls(head(line.replace(b"%b", count * fill))) for count in (5_000, 10_000))
    assert large <= 2.2 * small
