"""Chunked bodies: valid ones decode as in llhttp and h11, everything that both refuse is refused, in linear time."""

from contextlib import suppress

import h11
import httptools
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qualms.http1.chunked import CHUNKS_PER_CALL, MAX_LINE, MAX_OVERHEAD, MAX_TRAILERS, ChunkedDecoder, ChunkError

HEAD = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
NEXT = b"GET /next HTTP/1.1\r\nHost: x\r\n\r\n"


def decode(*pieces: bytes) -> tuple[ChunkedDecoder, bytes]:
    """Decode pieces; the decoder and the bytes that it has not decoded."""
    decoder, rest, again = ChunkedDecoder(), b"", False
    for piece in pieces:
        rest, again = decoder.feed(rest + piece)
        while again:
            rest, again = decoder.feed(rest)
    return decoder, rest


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({min(cut, len(data)) for cut in cuts} | {0, len(data)})
    return [data[begin:end] for begin, end in zip(places[:-1], places[1:], strict=True)]


class LlhttpBody:
    """The chunked body that llhttp reads."""

    def __init__(self, data: bytes) -> None:
        self.body, self.complete, self.valid = b"", False, True
        try:
            httptools.HttpRequestParser(self).feed_data(HEAD + data)
        except httptools.HttpParserError:
            self.valid = self.complete  # an error after the body belongs to the next request

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.complete = True


def h11_body(data: bytes) -> tuple[bool, bytes, bool]:
    """Whether h11 accepts the body, the content so far, and whether it is complete."""
    connection = h11.Connection(h11.SERVER, max_incomplete_event_size=2**20)
    connection.receive_data(HEAD + data)
    body = b""
    try:
        while True:
            event = connection.next_event()
            if isinstance(event, h11.Data):
                body += bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                return True, body, True
            elif event is h11.NEED_DATA:
                return True, body, False
    except h11.RemoteProtocolError:
        return False, body, False


TOKEN = st.text("abcXYZ019!#$%&'*+-.^_`|~", min_size=1, max_size=8)
CHUNKS = st.lists(st.binary(min_size=1, max_size=40), max_size=8)


@st.composite
def chunked_bodies(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """A valid chunked body, and its content."""
    parts = []
    content = draw(CHUNKS)
    for chunk in content:
        size = draw(st.sampled_from(["{:x}", "{:X}", "{:04x}"])).format(len(chunk))
        names = draw(st.lists(TOKEN, max_size=2))
        extensions = "".join(f";{name}={name}" for name in names)
        parts.append(f"{size}{extensions}\r\n".encode() + chunk + b"\r\n")
    trailers = "".join(f"X-{name}: {name}\r\n" for name in draw(st.lists(TOKEN, max_size=2)))
    last = draw(st.sampled_from(["0", "000"]))
    return b"".join(parts) + f"{last}\r\n{trailers}\r\n".encode(), b"".join(content)


@given(case=chunked_bodies(), cuts=st.lists(st.integers(0, 400), max_size=20), rest=st.sampled_from([b"", NEXT, b"\0"]))
def test_a_body_split_anywhere_decodes_as_in_llhttp_and_h11(
    case: tuple[bytes, bytes], cuts: list[int], rest: bytes
) -> None:
    data, content = case
    decoder, undecoded = decode(*split(data + rest, cuts))
    assert (decoder.complete, bytes(decoder.body), undecoded) == (True, content, rest)
    llhttp = LlhttpBody(data)
    assert (llhttp.valid, llhttp.complete, llhttp.body) == (True, True, content)
    assert h11_body(data) == (True, content, True)


FRAGMENTS = st.sampled_from(
    [
        *(
            b"0",
            b"1",
            b"a",
            b"F",
            b"5",
            b"00",
            b"g",
            b"-",
            b"+",
            b"_",
            b",",
            b"x",
            b"hello",
            b"X-A",
            b":",
            b";",
            b"=",
            b'"',
        ),
        *(b"\r\n", b"\r", b"\n", b" ", b"\t", b"\0", b"\x7f", b"\xff"),
        *(b"0\r\n\r\n", b"5\r\nhello\r\n", b"1\r\nx\r\n"),
    ]
)


@settings(max_examples=1000)
@given(fragments=st.lists(FRAGMENTS, max_size=14), cuts=st.lists(st.integers(0, 60), max_size=8))
def test_what_llhttp_and_h11_refuse_is_refused_and_nothing_else_is_raised(
    fragments: list[bytes], cuts: list[int]
) -> None:
    data = b"".join(fragments)
    llhttp, (h11_valid, h11_content, _) = LlhttpBody(data), h11_body(data)
    try:
        decoder, _ = decode(*split(data, cuts))
    except ChunkError as error:
        assert str(error)
        return
    if decoder.complete:
        assert llhttp.valid or h11_valid
        if llhttp.valid and llhttp.complete:
            assert llhttp.body == decoder.body
        if h11_valid:
            assert h11_content == decoder.body


@given(data=st.binary(max_size=100))
def test_arbitrary_bytes_raise_nothing_else_than_chunk_errors(data: bytes) -> None:
    with suppress(ChunkError):
        decode(data)


@pytest.mark.parametrize(
    "data",
    [
        b"\r\n",
        b"5\nhello\r\n",
        b"5\r\nhello\n0",
        b"5\r\nhelloX\r",
        b"-5\r\n",
        b"+5\r\n",
        b" 5\r\n",
        b"5 \r\n",
        b"5 ;a\r\n",
        b"0x5\r\n",
        b"5_0\r\n",
        b"5;a\0\r\n",
        b"5;a\rb\r\n",
        b"\xb25\r\n",
        b"1234567890abcdef\r\n",
        b"0\n\r\n",
        b"0\r\n\n",
        b"0\r\nX-A\r\n",
        b"0\r\nX-A : b\r\n",
        b"0\r\n X-A: b\r\n",
        b"0\r\nX-A: \0\r\n",
        b"0\r\n: b\r\n",
    ],
)
def test_malformed_chunks_are_refused_also_byte_by_byte(data: bytes) -> None:
    with pytest.raises(ChunkError):
        decode(data)
    with pytest.raises(ChunkError):
        decode(*split(data, list(range(len(data)))))


@pytest.mark.parametrize("step", [1, 100, 10**6])
@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"5;" + MAX_LINE * b"a", "A line of the chunked body is too long"),
        (b"0\r\nX-A: " + MAX_LINE * b"a", "A line of the chunked body is too long"),
        (b"0\r\n" + (MAX_TRAILERS // 1000 + 1) * (b"X-A: " + 1000 * b"b" + b"\r\n"), "The trailers are malformed"),
        ((MAX_OVERHEAD // 4 + 1) * b"1\r\nx\r\n", "more bytes for sizes and extensions than for its content"),
        (MAX_OVERHEAD // 1000 * (b"1;" + 1100 * b"a" + b"\r\nx\r\n"), "more bytes for sizes and extensions than"),
    ],
)
def test_the_parts_of_a_body_that_are_not_content_are_limited(step: int, data: bytes, message: str) -> None:
    with pytest.raises(ChunkError, match=message):
        decode(*(data[begin : begin + step] for begin in range(0, len(data), step)))


def test_a_chunk_longer_than_what_has_arrived_is_content_so_far() -> None:
    decoder, rest = decode(b"7fffffff\r\nhello")
    assert (bytes(decoder.body), decoder.complete, rest) == (b"hello", False, b"")


def test_a_call_decodes_a_limited_number_of_chunks() -> None:
    decoder = ChunkedDecoder()
    data = 2 * CHUNKS_PER_CALL * (b"10\r\n" + bytes(16) + b"\r\n") + b"0\r\n\r\n"
    rest, again = decoder.feed(data)
    assert (len(decoder.body), again) == (16 * CHUNKS_PER_CALL, True)
    rest, again = decoder.feed(rest)
    rest, again = decoder.feed(rest)
    assert (len(decoder.body), decoder.complete, rest, again) == (32 * CHUNKS_PER_CALL, True, b"", False)


class CountingDecoder(ChunkedDecoder):
    """Counts the bytes that it is given."""

    __slots__ = ("given",)

    def __init__(self) -> None:
        super().__init__()
        self.given = 0

    def feed(self, data: bytes) -> tuple[bytes, bool]:
        self.given += len(data)
        return super().feed(data)


@pytest.mark.parametrize("piece", [1, 7, 4096])
def test_undecoded_bytes_are_looked_at_a_limited_number_of_times(piece: int) -> None:
    """Content is taken when it arrives; only an incomplete line is passed again."""

    def work(size: int) -> int:
        decoder, rest = CountingDecoder(), b""
        data = (size // 64) * (b"40\r\n" + bytes(64) + b"\r\n") + b"0\r\n\r\n"
        for begin in range(0, len(data), piece):
            rest, again = decoder.feed(rest + data[begin : begin + piece])
            while again:
                rest, again = decoder.feed(rest)
        assert decoder.complete
        return decoder.given

    assert work(128 * 1024) < 2.2 * work(64 * 1024)
