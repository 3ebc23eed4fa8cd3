"""Odd requests, each with the statuses that are accepted as the first reply and whether the connection then closes.

The sections follow RFC 9112: request line, fields, framing, chunks, connections. Most invalid requests are variants of request
smuggling: two parsers that disagree about the end of a request would read the rest as another one.
"""

from typing import NamedTuple

from qualms.settings import Settings

CRLF = b"\r\n"
HOST = b"Host: x"
CHUNKED = b"Transfer-Encoding: chunked"
HELLO = b"5\r\nhello\r\n0\r\n\r\n"
LIMIT = Settings.model_fields["max_head_bytes"].default if "max_head_bytes" in Settings.model_fields else 65536


class OddRequest(NamedTuple):
    """One request and its expected reply."""

    name: str
    data: bytes
    statuses: frozenset[int]
    closes: bool


def _get(*lines: bytes, target: bytes = b"/livez", version: bytes = b"HTTP/1.1", method: bytes = b"GET") -> bytes:
    return CRLF.join([b" ".join((method, target, version)), *lines, b"", b""])


def _post(*lines: bytes, body: bytes = b"", version: bytes = b"HTTP/1.1", target: bytes = b"/livez") -> bytes:
    return CRLF.join([b" ".join((b"POST", target, version)), HOST, *lines, b"", body])


def _chunks(body: bytes) -> bytes:
    """A request for a prediction: other routes answer without reading chunks."""
    return _post(b"Content-Type: image/png", CHUNKED, body=body, target=b"/predict")


def _coding(value: bytes, body: bytes = HELLO) -> bytes:
    return _post(b"Content-Type: image/png", b"Transfer-Encoding: " + value, body=body, target=b"/predict")


def _length(value: bytes, body: bytes = b"hello") -> bytes:
    return _post(b"Content-Length: " + value, body=body)


def _served(name: str, data: bytes, *statuses: int, closes: bool = False) -> OddRequest:
    """A request that the application answers, by default with 200."""
    return OddRequest(name, data, frozenset(statuses or (200,)), closes)


def _refused(name: str, data: bytes, *statuses: int) -> OddRequest:
    """A request that the server refuses, by default with 400, before it closes the connection."""
    return OddRequest(name, data, frozenset(statuses or (400,)), True)


REQUEST_LINES = [
    _served("plain", _get(HOST)),
    _served("one empty line first", CRLF + _get(HOST)),
    _served("two empty lines first", CRLF * 2 + _get(HOST)),
    _refused("bare LF first", b"\n" + _get(HOST)),
    _refused("bare CR first", b"\r" + _get(HOST)),
    _refused("space first", b" " + _get(HOST)),
    _refused("line of spaces first", b"  \r\n" + _get(HOST)),
    _refused("NUL first", b"\0" + _get(HOST)),
    _refused("byte order mark first", b"\xef\xbb\xbf" + _get(HOST)),
    _refused("two spaces after the method", b"GET  /livez HTTP/1.1\r\nHost: x\r\n\r\n"),
    _refused("two spaces before the version", b"GET /livez  HTTP/1.1\r\nHost: x\r\n\r\n"),
    _refused("tab after the method", b"GET\t/livez HTTP/1.1\r\nHost: x\r\n\r\n"),
    _refused("tab before the version", b"GET /livez\tHTTP/1.1\r\nHost: x\r\n\r\n"),
    _refused("vertical tab after the method", b"GET\x0b/livez HTTP/1.1\r\nHost: x\r\n\r\n"),
    _refused("CR in place of a space", b"GET /livez\rHTTP/1.1\r\nHost: x\r\n\r\n"),
    _refused("space after the version", b"GET /livez HTTP/1.1 \r\nHost: x\r\n\r\n"),
    _refused("a fourth word", b"GET /livez HTTP/1.1 HTTP/1.1\r\nHost: x\r\n\r\n"),
    _refused("no version", b"GET /livez\r\nHost: x\r\n\r\n"),
    _refused("HTTP/0.9", b"GET /livez\r\n\r\n"),
    _refused("no target", b"GET HTTP/1.1\r\nHost: x\r\n\r\n"),
    _refused("empty target", b"GET  HTTP/1.1\r\nHost: x\r\n\r\n"),
    _refused("no method", b"/livez HTTP/1.1\r\nHost: x\r\n\r\n"),
    _refused("a reply", b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"),
    _refused("TLS handshake", b"\x16\x03\x01\x00\xa5\x01\x00\x00\xa1\x03\x03\r\n\r\n"),
    _refused("lower-case method", _get(HOST, method=b"get"), 400, 405, 501),
    _refused("unknown method", _get(HOST, method=b"BREW"), 400, 405, 501),
    _refused("method with a bracket", _get(HOST, method=b"GE(T")),
    _refused("method with a colon", _get(HOST, method=b"GET:")),
    _refused("method with a byte above 127", _get(HOST, method=b"GE\xc9")),
    _refused("method with NUL", _get(HOST, method=b"GE\0T")),
    _refused("long method", _get(HOST, method=b"G" * 5000), 400, 501),
    _refused("CONNECT", _get(HOST, method=b"CONNECT", target=b"x:80"), 400, 405),
    _served("CONNECT with a path", _get(HOST, method=b"CONNECT"), 405),
    _refused("HTTP/2 preface", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400, 505),
    _refused("HTTP/2.0", _get(HOST, version=b"HTTP/2.0"), 400, 505),
    _refused("HTTP/2", _get(HOST, version=b"HTTP/2"), 400, 505),
    _refused("HTTP/1.2", _get(HOST, version=b"HTTP/1.2"), 400, 505),
    _refused("HTTP/1.10", _get(HOST, version=b"HTTP/1.10"), 400, 505),
    _refused("HTTP/01.1", _get(HOST, version=b"HTTP/01.1"), 400, 505),
    _refused("HTTP/0.9 as version", _get(HOST, version=b"HTTP/0.9"), 400, 505),
    _refused("HTTP/9.9", _get(HOST, version=b"HTTP/9.9"), 400, 505),
    _refused("lower-case http/1.1", _get(HOST, version=b"http/1.1")),
    _refused("HTTP/1,1", _get(HOST, version=b"HTTP/1,1")),
    _refused("HTTP/1", _get(HOST, version=b"HTTP/1")),
    _refused("HTTPS/1.1", _get(HOST, version=b"HTTPS/1.1")),
    _refused("RTSP/1.0", _get(HOST, version=b"RTSP/1.0")),
    _refused("version with a superscript digit", _get(HOST, version=b"HTTP/1.\xb9")),
]

TARGETS = [
    _served("absolute-form", _get(HOST, target=b"http://x/livez")),
    _served("absolute-form in upper case with a port", _get(HOST, target=b"HTTP://X:80/livez")),
    _served("absolute-form with a query", _get(HOST, target=b"http://x/livez?a=b")),
    _served("absolute-form without a path", _get(HOST, target=b"http://x"), 200),
    _refused("absolute-form without a Host field", _get(target=b"http://x/livez")),
    _refused("absolute-form of another scheme", _get(HOST, target=b"ftp://x/livez")),
    _refused("authority-form", _get(HOST, target=b"x:80")),
    _refused("target without a slash", _get(HOST, target=b"livez")),
    _refused("asterisk with GET", _get(HOST, target=b"*")),
    _served("asterisk with OPTIONS", _get(HOST, target=b"*", method=b"OPTIONS"), 200, 204, 404, 405),
    _served("percent-encoded letter", _get(HOST, target=b"/%6Civez")),
    _served("query with odd characters", _get(HOST, target=b"/livez?a=%00&b=[]!*'();:@&=+$,/?")),
    _served("two slashes", _get(HOST, target=b"//livez"), 404),
    _served("dot segments", _get(HOST, target=b"/x/../livez"), 404),
    _served("encoded slash", _get(HOST, target=b"/models/%2F"), 307, 404),
    _served("encoded NUL", _get(HOST, target=b"/livez%00"), 404),
    _served("encoded CRLF", _get(HOST, target=b"/livez%0d%0aX-A:%20b"), 404),
    _served("incomplete percent-encoding", _get(HOST, target=b"/livez%"), 404),
    _refused("fragment", _get(HOST, target=b"/livez#x")),
    _refused("space in the target", _get(HOST, target=b"/li vez")),
    _refused("NUL in the target", _get(HOST, target=b"/livez\0")),
    _refused("DEL in the target", _get(HOST, target=b"/livez\x7f")),
    _refused("byte above 127 in the target", _get(HOST, target=b"/caf\xc3\xa9")),
    _refused("quotation mark in the target", _get(HOST, target=b'/"')),
    _served("target below the limit", _get(HOST, target=b"/livez?" + b"a" * (LIMIT - 1000))),
    _refused("target above the limit", _get(HOST, target=b"/livez?" + b"a" * (LIMIT + 1000)), 414, 431),
]

FIELDS = [
    _refused("no Host", _get()),
    _refused("two Host", _get(HOST, HOST)),
    _refused("two different Host", _get(HOST, b"Host: y")),
    _served("empty Host", _get(b"Host:")),
    _refused("Host with a space", _get(b"Host: x y")),
    _refused("Host with a slash", _get(b"Host: x/y")),
    _refused("Host with a user", _get(b"Host: u@x")),
    _refused("Host with NUL", _get(b"Host: x\0")),
    _refused("Host with a byte above 127", _get(b"Host: h\xc3\xb6st")),
    _served("Host with a port", _get(b"Host: x:8000")),
    _served("Host as IPv6 address", _get(b"Host: [::1]:8000")),
    _served("Host without a space after the colon", _get(b"Host:x")),
    _served("Host between tabs and spaces", _get(b"Host: \t x \t ")),
    _served("HTTP/1.0 without Host", _get(version=b"HTTP/1.0"), closes=True),
    _refused("space before the colon", _get(HOST, b"X-A : b")),
    _refused("tab before the colon", _get(HOST, b"X-A\t: b")),
    _refused("Host with a space before the colon", _get(b"Host : x")),
    _refused("space before the first field", _get(b" X-A: b", HOST)),
    _refused("folded line", _get(HOST, b"X-A: b", b" c")),
    _refused("line folded with a tab", _get(HOST, b"X-A: b", b"\tc")),
    _refused("folded empty value", _get(HOST, b"X-A:", b" b")),
    _refused("line of spaces between fields", _get(HOST, b"  ", b"X-A: b")),
    _refused("empty name", _get(HOST, b": b")),
    _refused("line without a colon", _get(HOST, b"X-A")),
    _refused("name with a space", _get(HOST, b"X A: b")),
    _refused("name with NUL", _get(HOST, b"X\0A: b")),
    _refused("name with a control character", _get(HOST, b"X\x01A: b")),
    _refused("name with DEL", _get(HOST, b"X\x7fA: b")),
    _refused("name with a byte above 127", _get(HOST, b"X\xc3\xa9: b")),
    _refused("name with a bracket", _get(HOST, b"X(A): b")),
    _refused("name with a slash", _get(HOST, b"X/A: b")),
    _refused("name in quotation marks", _get(HOST, b'"X": b')),
    _served("name with unusual characters", _get(HOST, b"!#$%&'*+-.^_`|~9z: b")),
    _refused("value with NUL", _get(HOST, b"X-A: b\0c")),
    _refused("value with a control character", _get(HOST, b"X-A: b\x01c")),
    _refused("value with vertical tab", _get(HOST, b"X-A: b\x0bc")),
    _refused("value with DEL", _get(HOST, b"X-A: b\x7fc")),
    _refused("value with bare CR", _get(HOST, b"X-A: b\rc")),
    _refused("value that ends with CR", _get(HOST, b"X-A: b\r")),
    _refused("value with bare CR and a field", _get(HOST, b"X-A: b\rContent-Length: 5")),
    _refused("value with bare LF and a field", _get(HOST, b"X-A: b\nContent-Length: 5")),
    _served("value with a tab", _get(HOST, b"X-A: b\tc")),
    _served("value with bytes above 127", _get(HOST, b"X-A: caf\xc3\xa9\xff")),
    _served("empty value", _get(HOST, b"X-A:")),
    _served("colon in the value", _get(HOST, b"X-A: :b: c")),
    _refused("bare LF line ends", b"GET /livez HTTP/1.1\nHost: x\n\n"),
    _refused("bare LF after the request line", b"GET /livez HTTP/1.1\nHost: x\r\n\r\n"),
    _refused("bare LF after a field", b"GET /livez HTTP/1.1\r\nHost: x\n\r\n"),
    _refused("bare LF as empty line", b"GET /livez HTTP/1.1\r\nHost: x\r\n\n"),
    _refused("bare CR line ends", b"GET /livez HTTP/1.1\rHost: x\r\r\r\n\r\n"),
    _served("many fields", _get(HOST, *[b"X-A: b"] * 90)),
    _refused("head above the limit", _get(HOST, b"X-A: " + b"b" * (LIMIT + 1000)), 431),
    _refused("head of many fields above the limit", _get(HOST, *[b"X-A: b"] * (LIMIT // 8 + 100)), 431),
    _refused("head without an end", b"GET /livez HTTP/1.1\r\nX-A: " + b"b" * (2 * LIMIT), 431),
    _refused("request line without an end", b"GET /" + b"b" * (2 * LIMIT), 414, 431),
]

LENGTHS = [
    _served("Content-Length", _length(b"5"), 405),
    _served("Content-Length in lower case", _post(b"content-length: 5", body=b"hello"), 405),
    _served("Content-Length with spaces around it", _length(b"  5  "), 405),
    _served("Content-Length with leading zeros", _length(b"0005"), 405),
    _served("Content-Length of 0", _length(b"0", b""), 405),
    _served("body with GET", _get(HOST, b"Content-Length: 5") + b"hello"),
    _refused("two equal Content-Length", _post(b"Content-Length: 5", b"Content-Length: 5", body=b"hello")),
    _refused("two different Content-Length", _post(b"Content-Length: 5", b"Content-Length: 6", body=b"hello")),
    _refused("Content-Length as list of equal values", _length(b"5, 5")),
    _refused("Content-Length as list of different values", _length(b"5, 0")),
    _refused("Content-Length with a comma at the end", _length(b"5,")),
    _refused("Content-Length with plus", _length(b"+5")),
    _refused("Content-Length with minus", _length(b"-5")),
    _refused("Content-Length of minus zero", _length(b"-0", b"")),
    _refused("Content-Length in hexadecimal", _length(b"0x5")),
    _refused("Content-Length with hexadecimal digits", _length(b"a", b"helloworld")),
    _refused("Content-Length with a fraction", _length(b"5.0")),
    _refused("Content-Length with an exponent", _length(b"5e0")),
    _refused("Content-Length with an underscore", _length(b"1_0", b"helloworld")),
    _refused("Content-Length of two numbers", _length(b"5 5")),
    _refused("Content-Length in quotation marks", _length(b'"5"')),
    _refused("Content-Length after vertical tab", _length(b"\x0b5")),
    _refused("Content-Length before NUL", _length(b"5\0")),
    _refused("Content-Length of a superscript digit", _length(b"\xb9")),
    _refused("empty Content-Length", _length(b"")),
    _refused("Content-Length beyond 64 bits", _length(b"18446744073709551621"), 400, 413),
    _refused("Content-Length of 40 digits", _length(b"9" * 40), 400, 413),
    _refused("Content-Length with a space before the colon", _post(b"Content-Length : 5", body=b"hello")),
    _refused("folded Content-Length", _length(b"\r\n 5")),
]

CODINGS = [
    _served("chunked", _coding(b"chunked"), 415),
    _served("chunked in upper case", _coding(b"CHUNKED"), 415),
    _served("chunked with spaces around it", _coding(b" \tchunked\t "), 415),
    _refused("CL.TE", _post(b"Content-Length: 6", CHUNKED, body=b"0\r\n\r\nG")),
    _refused("TE.CL", _post(CHUNKED, b"Content-Length: 4", body=b"5c\r\nG\r\n0\r\n\r\n")),
    _refused("Content-Length of 0 and chunked", _post(b"Content-Length: 0", CHUNKED, body=HELLO)),
    _refused("two equal codings", _post(CHUNKED, CHUNKED, body=HELLO), 400, 501),
    _refused("chunked, then identity", _post(CHUNKED, b"Transfer-Encoding: identity", body=HELLO), 400, 501),
    _refused("identity, then chunked", _post(b"Transfer-Encoding: identity", CHUNKED, body=HELLO), 400, 501),
    _refused("space before the colon of Transfer-Encoding", _post(b"Transfer-Encoding : chunked", body=HELLO)),
    _refused("tab before the colon of Transfer-Encoding", _post(b"Transfer-Encoding\t: chunked", body=HELLO)),
    _refused("Transfer-Encoding after a space", _post(b" Transfer-Encoding: chunked", body=HELLO)),
    _refused("Transfer-Encoding after bare LF", _post(b"X-A: b\nTransfer-Encoding: chunked", body=HELLO)),
    _refused("xchunked", _coding(b"xchunked"), 400, 501),
    _refused("chunkedx", _coding(b"chunkedx"), 400, 501),
    _refused("chunked after vertical tab", _coding(b"\x0bchunked"), 400, 501),
    _refused("chunked after form feed", _coding(b"\x0cchunked"), 400, 501),
    _refused("chunked before NUL", _coding(b"chunked\0"), 400, 501),
    _refused("chunked after a no-break space", _coding(b"\xa0chunked"), 400, 501),
    _refused("folded chunked", _coding(b"\r\n chunked"), 400, 501),
    _refused("chunked twice", _coding(b"chunked, chunked"), 400, 501),
    _refused("chunked with a comma", _coding(b"chunked,"), 400, 501),
    _refused("comma with chunked", _coding(b", chunked"), 400, 501),
    _refused("chunked with a parameter", _coding(b"chunked;a=b"), 400, 501),
    _refused("chunked in quotation marks", _coding(b'"chunked"'), 400, 501),
    _refused("gzip, chunked", _coding(b"gzip, chunked"), 501),
    _refused("chunked, gzip", _coding(b"chunked, gzip"), 400, 501),
    _refused("gzip", _coding(b"gzip"), 400, 501),
    _refused("identity", _coding(b"identity"), 400, 501),
    _refused("empty coding", _coding(b""), 400, 501),
    _refused("chunked in HTTP/1.0", _post(CHUNKED, body=HELLO, version=b"HTTP/1.0")),
    _served("underscore in Transfer_Encoding", _post(b"Transfer_Encoding: chunked"), 405),
]

CHUNKS = [
    _served("no chunks", _chunks(b"0\r\n\r\n"), 400, 415),
    _served("two chunks", _chunks(b"2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n"), 415),
    _served("chunk size in upper case", _chunks(b"A\r\nhelloworld\r\n0\r\n\r\n"), 415),
    _served("chunk size with leading zeros", _chunks(b"0005\r\nhello\r\n000\r\n\r\n"), 415),
    _served("chunk extension", _chunks(b'5;a=b;c="d"\r\nhello\r\n0;e\r\n\r\n'), 415),
    _served("trailers", _chunks(b"5\r\nhello\r\n0\r\nX-A: b\r\nX-C: d\r\n\r\n"), 415),
    _served("trailer that looks like framing", _chunks(b"0\r\nContent-Length: 5\r\n\r\n"), 400, 415),
    _refused("chunk size with plus", _chunks(b"+5\r\nhello\r\n0\r\n\r\n")),
    _refused("chunk size with minus", _chunks(b"-5\r\nhello\r\n0\r\n\r\n")),
    _refused("chunk size with 0x", _chunks(b"0x5\r\nhello\r\n0\r\n\r\n")),
    _refused("space before the chunk size", _chunks(b" 5\r\nhello\r\n0\r\n\r\n")),
    _refused("space after the chunk size", _chunks(b"5 \r\nhello\r\n0\r\n\r\n")),
    _refused("empty chunk size", _chunks(b"\r\nhello\r\n0\r\n\r\n")),
    _refused("chunk size with an underscore", _chunks(b"0_5\r\nhello\r\n0\r\n\r\n")),
    _refused("chunk size that is not hexadecimal", _chunks(b"5g\r\nhello\r\n0\r\n\r\n")),
    _refused("chunk size beyond 64 bits", _chunks(b"10000000000000005\r\nhello\r\n0\r\n\r\n"), 400, 413),
    _refused("chunk size of 200 digits", _chunks(b"0" * 199 + b"5\r\nhello\r\n0\r\n\r\n")),
    _refused("bare LF after the chunk size", _chunks(b"5\nhello\r\n0\r\n\r\n")),
    _refused("bare CR after the chunk size", _chunks(b"5\rhello\r\n0\r\n\r\n")),
    _refused("bare LF after the chunk", _chunks(b"5\r\nhello\n0\r\n\r\n")),
    _refused("no CRLF after the chunk", _chunks(b"5\r\nhello0\r\n\r\n")),
    _refused("chunk longer than its size", _chunks(b"4\r\nhello\r\n0\r\n\r\n")),
    _refused("chunk shorter than its size", _chunks(b"6\r\nhello\r\n0\r\n\r\n")),
    _refused("bare LF in a chunk extension", _chunks(b"5;a\nb\r\nhello\r\n0\r\n\r\n")),
    _refused("bare CR in a chunk extension", _chunks(b"5;a\rb\r\nhello\r\n0\r\n\r\n")),
    _refused("NUL in a chunk extension", _chunks(b"5;a\0b\r\nhello\r\n0\r\n\r\n")),
    _refused("chunk extension of 100 kB", _chunks(b"5;" + b"a" * 100_000 + b"\r\nhello\r\n0\r\n\r\n"), 400, 413, 431),
    _refused("bare LF after the last chunk", _chunks(b"0\n\r\n")),
    _refused("bare LF at the end of the body", _chunks(b"0\r\n\n")),
    _refused("trailer with a space before the colon", _chunks(b"0\r\nX-A : b\r\n\r\n")),
    _refused("folded trailer", _chunks(b"0\r\nX-A: b\r\n c\r\n\r\n")),
    _refused("trailer without a colon", _chunks(b"0\r\nX-A\r\n\r\n")),
    _refused("trailer with NUL", _chunks(b"0\r\nX-A: \0\r\n\r\n")),
    _refused("trailer of 100 kB", _chunks(b"0\r\nX-A: " + b"b" * 100_000 + b"\r\n\r\n"), 400, 413, 431),
]

CONNECTIONS = [
    _served("Connection: close", _get(HOST, b"Connection: close"), closes=True),
    _served("Connection: Close in a list", _get(HOST, b"Connection: x, Close"), closes=True),
    _served("second Connection field with close", _get(HOST, b"Connection: x", b"Connection: close"), closes=True),
    _served("close and keep-alive", _get(HOST, b"Connection: close, keep-alive"), closes=True),
    _served("Connection: closed", _get(HOST, b"Connection: closed")),
    _served("empty Connection", _get(HOST, b"Connection: ,")),
    _served("Connection names Content-Length", _post(b"Connection: content-length", b"Content-Length: 5", body=b"hello"), 405),
    _served("HTTP/1.0", _get(HOST, version=b"HTTP/1.0"), closes=True),
    _served("HEAD", _get(HOST, method=b"HEAD")),
    _served("HEAD of nothing", _get(HOST, method=b"HEAD", target=b"/nothing"), 404),
    _served("Upgrade: websocket", _get(HOST, b"Connection: Upgrade", b"Upgrade: websocket")),
    _served("Upgrade: h2c", _get(HOST, b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AAMAAABk")),
    _served("Upgrade with a body", _post(b"Connection: Upgrade", b"Upgrade: h2c", b"Content-Length: 5", body=b"hello"), 405),
    _served("Upgrade with chunks", _post(b"Connection: Upgrade", b"Upgrade: h2c", CHUNKED, body=HELLO, target=b"/predict"), 415),
    _served("Upgrade without Connection", _get(HOST, b"Upgrade: h2c")),
    _served("Expect: 100-continue without a body", _get(HOST, b"Expect: 100-continue")),
    _served("Expect: 100-continue with a body", _post(b"Expect: 100-continue", b"Content-Length: 5", body=b"hello"), 405),
    _served("body in place of a request line", _length(b"%d" % len(_get(HOST)), _get(HOST)), 405),
    _served("two requests at once", _get(HOST) + _get(HOST, target=b"/nothing")),
    _served("request after chunks", _chunks(HELLO) + _get(HOST), 415),
    _served("empty line between requests", _get(HOST) + CRLF + _get(HOST)),
]  # fmt: skip

ODD_REQUESTS = [*REQUEST_LINES, *TARGETS, *FIELDS, *LENGTHS, *CODINGS, *CHUNKS, *CONNECTIONS]
