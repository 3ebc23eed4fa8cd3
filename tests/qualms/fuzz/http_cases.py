"""Raw HTTP for the fuzz campaign: valid requests, requests from a grammar with odd parts, damaged requests, and random bytes.

Every case follows from the campaign's seed and its number alone.
"""

import io
import random
from collections.abc import Callable, Sequence

from PIL import Image
from tests.qualms.fuzz.case import Case, Ending

Random = random.Random
Header = tuple[bytes, bytes]
CRLF = b"\r\n"


def http_case(seed: int, number: int) -> Case:
    """The case of a number."""
    rng = Random(f"{seed}/{number}")
    kind = rng.choices(_KINDS, _WEIGHTS)[0]
    data = MAKERS[kind](rng)
    ending: Ending = rng.choices(("sentinel", "half-close", "close", "reset"), (90, 5, 2, 3))[0]
    return Case(number, kind, data, random_cuts(rng, data), random_pause(rng), ending)


def random_cuts(rng: Random, data: bytes) -> tuple[int, ...]:
    """No cuts, one after a head, a few anywhere, or one after each of the first bytes."""
    size, shape = len(data), rng.random()
    if size < 2 or shape < 0.6:
        return ()
    if shape < 0.7:
        return tuple(end for end in (data.rfind(b"\r\n\r\n") + 4, data.rfind(b"\n") + 1) if 4 < end < size)[:1]
    if shape < 0.72:
        return tuple(range(1, min(size, 40)))
    return tuple(sorted(rng.sample(range(1, size), min(size - 1, rng.randint(1, 4)))))


def random_pause(rng: Random) -> float:
    """Mostly none: the pieces are sent in successive iterations of the event loop."""
    return 0.005 if rng.random() < 0.1 else 0.0


# Parts of requests. The first of two lists is valid; the other is odd, whether or not it is accepted.

PATHS = (
    b"/livez",
    b"/livez",
    b"/livez",
    b"/readyz",
    b"/models",
    b"/nothing",
    b"/predict",
    b"/models/none",
    b"/healthz",
)
RARE_PATHS = (b"/metrics", b"/openapi.json", b"/docs")
"""their replies are large, and a scrape is slow"""
TARGETS = (
    b"http://host/livez", b"HTTP://host:80/livez?a=b", b"https://host/livez", b"http://host", b"http://", b"http:///livez",
    b"http://user@host/livez", b"http://[::1]:8000/livez", b"*", b"host:80", b"livez", b"", b"//", b"//livez", b"///",
    b"/./livez", b"/../livez", b"/livez/", b"/livez//", b"/livez?", b"/livez?a=b&c", b"/livez#fragment", b"/%6Civez",
    b"/%6civez%3Fa", b"/%2Flivez", b"/livez%00", b"/livez%0d%0aX:y", b"/%zz", b"/%", b"/%4", b"/\\livez", b"/livez;a=b",
    b'/"', b"/<x>", b"/{x}", b"/|", b"/^", b"/`", b"/~", b"/caf\xc3\xa9", b"/\xff", b"/a b", b"/a\tb", b"/\x7f", b"/\0",
    b"/livez HTTP/1.1 HTTP/1.1", b"/?" + b"a" * 300, b"ftp://host/livez", b"/models/%2e%2e", b"/models/%E2%82%AC",
    b"/docs/none.js", b"/docs/../livez", b"/predict/", b"/PREDICT", b"?a=b", b"#", b"/[", b"/]", b"/:80",
)  # fmt: skip
METHODS = (b"GET", b"GET", b"GET", b"HEAD", b"POST", b"PUT", b"DELETE", b"OPTIONS", b"PATCH", b"TRACE")
ODD_METHODS = (
    b"get", b"Get", b"CONNECT", b"PRI", b"M-SEARCH", b"BREW", b"G" * 40, b"G" * 3000, b"", b"GE T", b"GET\t", b"G\0T",
    b"G\x80T", b"G(T", b"G:T", b"{GET}", b"-", b"!", b"\xef\xbb\xbfGET", b" GET", b"HTTP/1.1", b"PURGE", b"QUERY",
)  # fmt: skip
VERSIONS = (b"HTTP/1.1",) * 9 + (b"HTTP/1.0",)
ODD_VERSIONS = (
    b"HTTP/0.9", b"HTTP/1.2", b"HTTP/1.9", b"HTTP/2.0", b"HTTP/2", b"HTTP/3.0", b"HTTP/1.10", b"HTTP/1.", b"HTTP/.1",
    b"HTTP/11", b"HTTP/1.1.1", b"HTTP/01.1", b"HTTP/1,1", b"http/1.1", b"Http/1.1", b"HTTPS/1.1", b"HTTP 1.1", b"HTTP/",
    b"HTTP", b"", b"HTTP/1.1 ", b"HTTP/1.1\t", b"HTTP/-1.1", b"HTTP/+1.1", b"HTTP/1.\xb2", b"RTSP/1.0", b"ICE/1.0",
    b"HTTP/1.1\0", b"HTTP/9.9", b"HTTP/0.0", b"HTTP/ 1.1", b"HTTP/1.0x",
)  # fmt: skip
HOSTS = (b"host", b"host:80", b"127.0.0.1:8000", b"[::1]:8000", b"a.b-c.example")
ODD_HOSTS = (
    b"", b" ", b"host host", b"host,other", b"host/path", b"user@host", b"host:", b"host:abc", b"host:-1", b"host:80:80",
    b"[::1", b"::1", b"[]", b"[v1.a]", b"h\xc3\xb6st", b"host\0", b"host\x7f", b"http://host", b"*", b"%41", b"%zz", b"ho_st",
    b"host:99999", b"host#", b"host?a", b"<host>", b'"host"', b"host\t", b"\x0bhost", b"x" * 300,
)  # fmt: skip
LENGTHS = (
    b"+5", b"-5", b"-0", b"5 5", b"5, 5", b"5,5", b"5,6", b",5", b"5,", b"0x5", b"5.0", b"5e0", b"05", b"0005", b"00",
    b"five", b"", b" 5 ", b"5\t", b"\x0b5", b"5\0", b"5;a", b"'5'", b'"5"', b"18446744073709551616", b"9223372036854775808",
    b"4294967301", b"99999999999999999999", b"9" * 40, b"1" * 5000, b"\xb25", b"5_0", b"1e9", b"2000000", b"6", b"4", b"0",
    b"5\r\n 5", b"0" * 30 + b"5", b"\xef\xbc\x95",
)  # fmt: skip
CODINGS = (
    b"Chunked", b"CHUNKED", b"chunked ", b"\tchunked", b"chunked\t", b"xchunked", b"chunkedx", b"x chunked", b"chunked, chunked",
    b"gzip", b"gzip, chunked", b"chunked, gzip", b"identity", b"chunked, identity", b"identity, chunked", b"", b",",
    b"chunked,", b", chunked", b"chunked;a=b", b"chunked; q=1", b'"chunked"', b"'chunked'", b"\x0bchunked", b"\x0cchunked",
    b"chunked\x0b", b"chunked\0", b"chun\0ked", b"\x00chunked", b"chunk\xc3\xa9d", b"chunked\r\n ", b"\r\n chunked",
    b"deflate", b"compress", b"trailers", b"br", b"[chunked]", b"chunked\x7f", b"\xa0chunked", b"cow", b"nothing, chunked",
)  # fmt: skip
CONNECTIONS = (
    b"close", b"keep-alive", b"Close", b"CLOSE", b"close, keep-alive", b"keep-alive, close", b"", b",", b", close", b"closed",
    b"close;a", b"upgrade", b"Upgrade, HTTP2-Settings", b"content-length", b"transfer-encoding", b"host", b"te, trailers",
    b"keep-alive, upgrade", b"\x0bclose", b"close\t", b"clo se", b'"close"', b"x" * 1000,
)  # fmt: skip
UPGRADES = (b"h2c", b"websocket", b"HTTP/2.0", b"TLS/1.2", b"h2c, websocket", b"", b",", b"\xff", b"x" * 500)
EXPECTS = (
    b"100-continue",
    b"100-Continue",
    b"100-continue, 100-continue",
    b"200-ok",
    b"",
    b"100",
    b"100-continue;a",
    b"x",
)
FIELDS: tuple[Header, ...] = (
    (b"Accept", b"*/*"), (b"Accept", b"application/openmetrics-text"), (b"User-Agent", b"fuzz"), (b"Range", b"bytes=0-1"),
    (b"Trailer", b"X-Sum"), (b"TE", b"trailers"), (b"X-Request-Timeout", b"5"), (b"X-Empty", b""), (b"X-Long", b"v" * 2000),
    (b"X-Tab", b"a\tb"), (b"X-Obs", b"caf\xc3\xa9"), (b"X-Quote", b'"a, b"'), (b"Cookie", b"a=b; c=d"), (b"Via", b"1.1 proxy"),
    (b"Content-Encoding", b"gzip"), (b"If-Modified-Since", b"x"), (b"Max-Forwards", b"0"), (b"Keep-Alive", b"timeout=5"),
    (b"HTTP2-Settings", b"AAMAAABkAARAAAAAAAIAAAAA"), (b"Proxy-Connection", b"close"), (b"X-Forwarded-For", b"1.2.3.4"),
)  # fmt: skip
ODD_LINES = (
    b"", b" ", b":", b": value", b" : value", b"name", b"name value", b"Na me: value", b"Name : value", b"Name\t: value",
    b" Name: value", b"\tName: value", b"N\0me: value", b"N\x80me: value", b"N(me: value", b"N@me: value", b"Name\x0b: value",
    b"Name: val\0ue", b"Name: val\x01ue", b"Name: val\x7fue", b"Name: val\x0bue", b"Name: val\rue", b"Name: val\nue",
    b"Name: val\r\n folded", b"Name: val\r\n\tfolded", b"Name: val\n folded", b"Name:\r\n value", b"Name: value\r",
    b"Name:: value", b"Name;a: value", b'"Name": value', b"\xef\xbb\xbfName: value", b"GET /livez HTTP/1.1",
    b"Content-Length", b"Content-Length : 5", b"Content-Length\t: 5", b" Content-Length: 5", b"Content_Length: 5",
    b"Content-Length\0: 5", b"Content-Length:5", b"content-length: 0", b"X: y\r\nContent-Length: 5", b"X: y\nContent-Length: 5",
    b"X: y\rContent-Length: 5", b"Transfer-Encoding : chunked", b"Transfer-Encoding\t: chunked", b" Transfer-Encoding: chunked",
    b"Transfer-Encoding:chunked", b"Transfer_Encoding: chunked", b"Transfer-Encoding\0: chunked", b"Transfer-Encoding",
    b"X: y\nTransfer-Encoding: chunked", b"X: y\rTransfer-Encoding: chunked", b"TRANSFER-ENCODING: chunked",
    b"transfer-encoding: chunked", b"Transfer-Encoding\xa0: chunked", b"Tr\xc3\xa0nsfer-Encoding: chunked",
    b"Host: other", b"host: host", b"Host : other", b"Host", b"Host:", b" Host: other", b"X" * 300 + b": y", b"1: 2", b"!: y",
)  # fmt: skip
CHUNK_SIZES = (
    b"+5", b"-5", b"0x5", b" 5", b"5 ", b"5\t", b"", b"5;", b"5;a", b"5;a=b", b'5;a="b;c"', b"5 ;a=b", b"5; a=b", b"5;a=b;c",
    b"5;=b", b"5;a\0b", b"5;a\nb", b"5;a\rb", b'5;a="', b"05", b"0000000005", b"0" * 15 + b"5", b"0" * 30 + b"5", b"5,5", b"5.",
    b"g", b"5g", b"\xb25", b"5_", b"fffffffffffffffb", b"ffffffffffffffff5", b"10000000000000005", b"-1", b"7fffffffffffffff",
    b"80000000", b"5;" + b"x" * 300, b"5;" + b"x" * 20000, b"4", b"6", b"a", b"A", b"1e", b"'5'", b"0b101", b"5\0", b"\x0b5",
)  # fmt: skip
TRAILERS = (
    b"X-Sum: 1", b"X-Sum: 1\r\nX-More: 2", b"Content-Length: 5", b"Transfer-Encoding: chunked", b"Host: other", b"name",
    b" folded: x", b"X : y", b"X: \0", b"X: \x01", b"X: y\nZ: w", b"GET /livez HTTP/1.1\r\nHost: x", b": y", b"X: " + b"y" * 3000,
)  # fmt: skip
ENDS = (b"\n", b"\r", b"\r\r\n", b"\n\r", b" \r\n", b"\r\n ", b"", b"\x0b\r\n", b"\r\n\r\n", b"\0\r\n", b"\x85")


def small_png() -> bytes:
    with io.BytesIO() as stream:
        Image.new("RGB", (9, 7), (10, 200, 90)).save(stream, "PNG")
        return stream.getvalue()


BODIES: tuple[Header, ...] = (
    (b"image/png", small_png()),
    (b"application/json", b'{"images":[[[0,255],[128,3]]]}'),
    (b"multipart/form-data; boundary=edge", b'--edge\r\nContent-Disposition: form-data; name="i"; filename="a"\r\n\r\n'
     + small_png() + b"\r\n--edge--\r\n"),
    (b"text/plain", b"hello"),
    (b"image/png", b""),
)  # fmt: skip
"""content type and body"""


def odd(rng: Random, usual: Sequence[bytes], unusual: Sequence[bytes], probability: float = 0.1) -> bytes:
    """One of the unusual values with a probability, else a usual one."""
    return rng.choice(unusual if rng.random() < probability else usual)


def head(
    method: bytes, target: bytes, headers: Sequence[Header], version: bytes = b"HTTP/1.1", lines: Sequence[bytes] = ()
) -> bytes:
    """A request's head; `lines` follow the headers as they are."""
    fields = [b"%b: %b" % header for header in headers]
    return CRLF.join([b" ".join((method, target, version)), *fields, *lines, b"", b""])


def request_id(rng: Random) -> Header:
    return b"X-Request-ID", b"%08x" % rng.getrandbits(32)


def path(rng: Random) -> bytes:
    return odd(rng, PATHS, RARE_PATHS, 0.01)


def chunked(rng: Random, body: bytes, oddness: float = 0.0) -> bytes:
    """A body in chunks, each of whose parts is odd with a probability."""
    parts = []
    for start in range(0, len(body), step := max(1, len(body) // rng.randint(1, 4))):
        piece = body[start : start + step]
        size = rng.choice((b"%x", b"%X", b"%04x")) % len(piece)
        if rng.random() < 0.1:
            size += rng.choice((b";a=b", b";a", b';a="b"'))
        if rng.random() < oddness:
            size = rng.choice(CHUNK_SIZES)
        parts += [size, line_end(rng, oddness / 3), piece, line_end(rng, oddness / 3)]
    if rng.random() >= oddness / 4:
        parts += [rng.choice((b"0", b"0", b"00", b"0;a=b")), line_end(rng, oddness / 3)]
    if rng.random() < 0.1 + oddness:
        parts += [rng.choice(TRAILERS) if rng.random() < oddness else TRAILERS[0], CRLF]
    return b"".join([*parts, line_end(rng, oddness / 3)])


def line_end(rng: Random, oddness: float) -> bytes:
    return rng.choice(ENDS) if rng.random() < oddness else CRLF


# Whole requests


def valid(rng: Random) -> bytes:
    """A valid request of any kind."""
    headers = [(b"Host", rng.choice(HOSTS)), request_id(rng)]
    if rng.random() < 0.3:
        headers += rng.sample(FIELDS, rng.randint(1, 3))
    rng.shuffle(headers)
    form = rng.random()
    if form < 0.6:
        return head(rng.choice((b"GET", b"GET", b"HEAD")), path(rng), headers)
    kind, body = rng.choice(BODIES)
    headers.append((b"Content-Type", kind))
    if rng.random() < 0.1:
        headers.append((b"Expect", b"100-continue"))
    target = rng.choice((b"/predict", b"/predict", b"/predict?explain=false", b"/livez", b"/nothing"))
    if form < 0.85:
        return head(b"POST", target, [*headers, (b"Content-Length", b"%d" % len(body))]) + body
    return head(b"POST", target, [*headers, (b"Transfer-Encoding", b"chunked")]) + chunked(rng, body)


def request_lines(rng: Random) -> bytes:
    method, version = odd(rng, METHODS, ODD_METHODS), odd(rng, VERSIONS, ODD_VERSIONS, 0.15)
    target = odd(rng, PATHS, TARGETS, 0.7)
    data = head(method, target, [(b"Host", b"host"), request_id(rng)], version)
    if rng.random() < 0.1:
        line, rest = data.split(CRLF, 1)
        data = line.replace(b" ", rng.choice((b"  ", b"\t", b"", b" \t", b"\x0b", b"\0", b"\r", b"\xa0"))) + CRLF + rest
    return data


def fields(rng: Random) -> bytes:
    """Unusual and odd header fields in any order."""
    headers = [(b"Host", odd(rng, HOSTS, ODD_HOSTS, 0.3)), request_id(rng), *rng.sample(FIELDS, rng.randint(0, 4))]
    if rng.random() < 0.1:
        headers.append((b"Host", rng.choice(HOSTS)))
    if rng.random() < 0.05:
        headers = headers[1:]
    rng.shuffle(headers)
    lines = [rng.choice(ODD_LINES)] if rng.random() < 0.5 else []
    return head(odd(rng, (b"GET",), METHODS), path(rng), headers, rng.choice(VERSIONS), lines)


def framing(rng: Random) -> bytes:
    """Content-Length and Transfer-Encoding in all combinations, with a body of five bytes or of chunks."""
    headers = [(b"Host", b"host"), request_id(rng)]
    shape = rng.random()
    if shape < 0.7:
        headers.append((b"Content-Length", odd(rng, (b"5",), LENGTHS, 0.6)))
    if shape > 0.4:
        headers.append((b"Transfer-Encoding", odd(rng, (b"chunked",), CODINGS, 0.6)))
    if rng.random() < 0.15:
        name = rng.choice((b"Content-Length", b"Transfer-Encoding"))
        headers.append((name, odd(rng, (b"5", b"chunked"), (*LENGTHS, *CODINGS), 0.5)))
    rng.shuffle(headers)
    lines = [rng.choice(ODD_LINES)] if rng.random() < 0.1 else []
    body = rng.choice((b"hello", b"5\r\nhello\r\n0\r\n\r\n", b"0\r\n\r\n", b"", b"5\r\nhello\r\n0\r\n\r\nG"))
    target = rng.choice((b"/predict", b"/livez", b"/nothing"))
    return (
        head(odd(rng, (b"POST", b"GET"), METHODS), target, headers, odd(rng, VERSIONS, ODD_VERSIONS, 0.02), lines)
        + body
    )


def chunks(rng: Random) -> bytes:
    headers = [
        (b"Host", b"host"),
        request_id(rng),
        (b"Transfer-Encoding", b"chunked"),
        (b"Content-Type", b"text/plain"),
    ]
    body = rng.choice((b"hello", rng.choice(BODIES)[1], b"x" * rng.randint(1, 3000)))
    target = rng.choice((b"/predict", b"/predict", b"/livez", b"/nothing"))
    return head(b"POST", target, headers) + chunked(rng, body, rng.choice((0.0, 0.1, 0.5)))


def options(rng: Random) -> bytes:
    """Connection, Upgrade and Expect."""
    headers = [(b"Host", b"host"), request_id(rng)]
    for name, values, probability in (
        (b"Connection", CONNECTIONS, 0.6), (b"Connection", CONNECTIONS, 0.1), (b"Upgrade", UPGRADES, 0.5), (b"Expect", EXPECTS, 0.3)
    ):  # fmt: skip
        if rng.random() < probability:
            headers.append((name, rng.choice(values)))
    kind, body = rng.choice(BODIES)
    if rng.random() < 0.5:
        return head(rng.choice((b"GET", b"HEAD", b"OPTIONS")), path(rng), headers, rng.choice(VERSIONS))
    headers += [(b"Content-Type", kind)]
    if rng.random() < 0.5:
        data = (
            head(b"POST", b"/predict", [*headers, (b"Content-Length", b"%d" % len(body))], rng.choice(VERSIONS)) + body
        )
    else:
        data = head(b"POST", b"/predict", [*headers, (b"Transfer-Encoding", b"chunked")]) + chunked(rng, body)
    return data


def pipelines(rng: Random) -> bytes:
    """Several requests at once, possibly with one that is odd."""
    requests = [valid(rng) for _ in range(rng.randint(2, 6))]
    if rng.random() < 0.4:
        maker = rng.choice((request_lines, fields, framing, chunks, options, flipped, cut))
        requests.insert(rng.randint(0, len(requests)), maker(rng))
    return b"".join(requests)


def empty_lines(rng: Random) -> bytes:
    lines = rng.choice(
        (b"\r\n", b"\r\n\r\n", b"\r\n" * 3, b"\r\n" * 20, b"\n", b"\r", b" \r\n", b"\r\n\n", b"\0", b"\t\r\n")
    )
    return rng.choice((b"", valid(rng))) + lines + valid(rng)


def other_protocols(rng: Random) -> bytes:
    return rng.choice((
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + rng.randbytes(60),
        b"SSH-2.0-OpenSSH_9.6\r\n", b"GET /livez\r\n", b"GET /livez\r\n\r\n", b"\x05\x01\0", b"\x04\x01\0\x50\x7f\0\0\1\0",
        b"EHLO host\r\n", b"PROXY TCP4 1.2.3.4 1.2.3.4 1 2\r\nGET /livez HTTP/1.1\r\nHost: x\r\n\r\n", b"*1\r\n$4\r\nPING\r\n",
        b"stats\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", b"RTSP/1.0 200 OK\r\n\r\n", b"\r\n\r\n\0\r\nQUIT\n",
    ))  # fmt: skip


def large_heads(rng: Random) -> bytes:
    """Heads and targets around the limit of 64 KiB."""
    size = rng.choice((60_000, 65_000, 65_536, 66_000, 70_000, 140_000))
    headers = [(b"Host", b"host"), request_id(rng)]
    shape = rng.randrange(4)
    if shape == 0:
        return head(b"GET", b"/livez?" + b"a" * size, headers)
    if shape == 1:
        return head(b"GET", b"/livez", [*headers, (b"X-Large", b"v" * size)])
    if shape == 2:
        return head(b"GET", b"/livez", [*headers, *([(b"X-Many", b"v")] * (size // 11))])
    return head(b"POST", b"/livez", [*headers, (b"Transfer-Encoding", b"chunked")]) + b"0\r\nX-Trailer: %b\r\n\r\n" % (
        b"v" * size
    )


# Damaged requests


def some_requests(rng: Random) -> bytes:
    return b"".join(valid(rng) for _ in range(rng.choice((1, 1, 1, 2, 3))))


def flipped(rng: Random) -> bytes:
    """One to three bytes are replaced."""
    data = bytearray(some_requests(rng))
    for _ in range(rng.randint(1, 3)):
        position = rng.randrange(len(data))
        data[position] = rng.choice((data[position] ^ 1 << rng.randrange(8), rng.randrange(256), *b"\0\t\n\r :;,"))
    return bytes(data)


def cut(rng: Random) -> bytes:
    """A few bytes are deleted."""
    data = some_requests(rng)
    start = rng.randrange(len(data))
    return data[:start] + data[start + rng.randint(1, 12) :]


def truncated(rng: Random) -> bytes:
    data = some_requests(rng)
    return data[: rng.randrange(len(data))]


def duplicated(rng: Random) -> bytes:
    """A few bytes or one line are repeated."""
    data = some_requests(rng)
    if rng.random() < 0.5:
        lines = data.split(CRLF)
        lines.insert(rng.randrange(len(lines)), rng.choice(lines))
        return CRLF.join(lines)
    start = rng.randrange(len(data))
    end = start + rng.randint(1, 40)
    return data[:end] + data[start:]


def spliced(rng: Random) -> bytes:
    """The beginning of one request and the end of another."""
    first, second = some_requests(rng), some_requests(rng)
    return first[: rng.randrange(len(first))] + second[rng.randrange(len(second)) :]


def other_case(rng: Random) -> bytes:
    data = some_requests(rng)
    start = rng.randrange(len(data))
    end = start + rng.randint(1, 40)
    return data[:start] + data[start:end].swapcase() + data[end:]


def white_space(rng: Random) -> bytes:
    """White space or control characters are inserted, often beside a separator."""
    data = some_requests(rng)
    places = [index for index, byte in enumerate(data[:300]) if byte in b":\r\n ,;="] or [0]
    position = rng.choice(places) + rng.randint(0, 1) if rng.random() < 0.7 else rng.randrange(len(data))
    more = rng.choice(
        (b" ", b"  ", b"\t", b"\r", b"\n", b"\r\n", b"\x0b", b"\x0c", b"\0", b"\xa0", b"\x85", b"\r\n ", b"\n\t")
    )
    return data[:position] + more + data[position:]


def injected(rng: Random) -> bytes:
    """An odd line is inserted between two lines."""
    lines = some_requests(rng).split(CRLF)
    name, values = rng.choice(
        ((b"Content-Length", LENGTHS), (b"Transfer-Encoding", CODINGS), (b"Connection", CONNECTIONS), (b"Host", ODD_HOSTS),
         (b"Expect", EXPECTS), (b"Upgrade", UPGRADES))
    )  # fmt: skip
    line = rng.choice(ODD_LINES) if rng.random() < 0.5 else b"%b: %b" % (name, rng.choice(values))
    lines.insert(rng.randint(0, len(lines)), line)
    return CRLF.join(lines)


def random_bytes(rng: Random) -> bytes:
    return rng.randbytes(rng.randint(1, 300))


def random_text(rng: Random) -> bytes:
    parts = (b"GET", b" ", b"/", b"livez", b"HTTP/1.1", b"\r\n", b"\r\n", b"\n", b":", b"Host", b"Content-Length", b"5", b"0",
             b"\0", b"Transfer-Encoding", b"chunked", b"\r", b"\t", b"hello", b",", b";", b"X", b"POST", b"\r\n\r\n")  # fmt: skip
    return b"".join(rng.choices(parts, k=rng.randint(1, 40)))


MAKERS: dict[str, Callable[[Random], bytes]] = {
    maker.__name__: maker
    for maker in (
        valid, request_lines, fields, framing, chunks, options, pipelines, empty_lines, other_protocols, large_heads, flipped,
        cut, truncated, duplicated, spliced, other_case, white_space, injected, random_bytes, random_text,
    )
}  # fmt: skip
_RARE = {"large_heads": 1, "other_protocols": 4, "random_bytes": 8, "random_text": 10, "valid": 10}
_KINDS = tuple(MAKERS)
_WEIGHTS = tuple(_RARE.get(kind, 20) for kind in _KINDS)
