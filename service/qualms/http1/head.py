"""Parse the head of one request: llhttp (by httptools) for the headers, and rules that it does not check.

The caller finds the end of the head. A new parser per head keeps the framing of messages in one place, the connection:
nothing that llhttp reads can change where the next message begins.
"""

import re
from functools import lru_cache
from urllib.parse import unquote_to_bytes

import httptools

from qualms.http1.messages import HEAD_TOO_LARGE, MALFORMED, UNSUPPORTED, URL_TOO_LONG, Head, Refusal

MAX_HEADERS = 256
_MAX_LENGTH_DIGITS = 18
"""a longer Content-Length is malformed; far above every limit on bodies"""
_VERSIONS = {b"HTTP/1.1": "1.1", b"HTTP/1.0": "1.0"}
_METHOD = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]{1,64}")
_TARGET = re.compile(rb"[!$-;=?-\[\]_a-z~%]+")
"""characters of a URL without fragment (RFC 3986, and the brackets that many clients do not escape)"""
_HOST = re.compile(rb"[A-Za-z0-9._~!$&'()*+,;=:%\[\]-]*")
_ABSOLUTE = re.compile(rb"https?://[^/?@]+(?=[/?]|\Z)", re.IGNORECASE)
"""scheme and host, which must not be empty or contain a user (RFC 9110, 4.2)"""
_TRAILING_SPACE = re.compile(rb"(?<=[^ \t\n])[ \t]++\r\n")
_EMPTY_LINES = 8 * b"\r\n"
"""more empty lines before a request than any client sends"""
_SINGLE = (b"host", b"content-length", b"transfer-encoding")
"""headers of which a request may have one"""


def parse_head(data: bytes) -> Head:
    """The head in `data`, which ends with the first empty line; Refusal if it is not accepted."""
    line = data[: data.find(b"\r\n")]
    method, target, path, query, version = _known_line(line) if len(line) <= _MAX_KNOWN else _parse_line(line)
    headers = _parse_headers(data, method)
    fields = dict(headers)
    if len(fields) != len(headers):
        _check_repeated(headers)
    host = fields.get(b"host")
    if host is None:
        if version == "1.1":
            raise _malformed("A request in HTTP/1.1 needs a Host header")
    elif not (_is_known_host(host) if len(host) <= _MAX_KNOWN else _HOST.fullmatch(host)):
        raise _malformed(f"The Host header {_text(host)} is not a host")
    keep_alive = version == "1.1"
    if b"connection" in fields:
        options = b",".join(value for name, value in headers if name == b"connection").lower().split(b",")
        stripped = {option.strip() for option in options}
        keep_alive = b"close" not in stripped and (keep_alive or b"keep-alive" in stripped)
    length = _body_length(fields, version)
    return Head(method, target, path, query, version, headers, fields, keep_alive, length)


def skip_empty_lines(data: bytes) -> bytes:
    """Data without the empty lines at its start, which some clients send after a body; Refusal if they are too many."""
    if data.startswith(_EMPTY_LINES):
        raise _malformed("The request begins with too many empty lines")
    while data.startswith(b"\r\n"):
        data = data[2:]
    return data


def head_too_large(data: bytes, max_bytes: int) -> Refusal:
    """The refusal of a head that does not end within `max_bytes`."""
    if b"\r\n" not in data[:max_bytes]:
        accepted = f"a first line of at most {max_bytes:,} bytes"
        return Refusal(414, URL_TOO_LONG, f"The URL is too long; accepted: {accepted}.", accepted)
    accepted = f"at most {max_bytes:,} bytes"
    return Refusal(431, HEAD_TOO_LARGE, f"The head of the request is too large; accepted: {accepted}.", accepted)


def _parse_line(line: bytes) -> tuple[str, bytes, str, bytes, str]:
    """Method, target, path, query and version of a request line."""
    parts = line.split(b" ")
    if len(parts) != 3 or (version := _VERSIONS.get(parts[2])) is None:
        raise _malformed("The first line is not of the form METHOD TARGET HTTP/1.1")
    method, target = parts[0], parts[1]
    if not _METHOD.fullmatch(method) or not _TARGET.fullmatch(target):
        raise _malformed("The method or the target of the request has characters that are not allowed")
    if not target.startswith(b"/"):
        target = _origin_form(target, method)
    raw_path, _, query = target.partition(b"?")
    path = (unquote_to_bytes(raw_path) if b"%" in raw_path else raw_path).decode("utf-8", "replace")
    return method.decode(), target, path, query, version


_MAX_KNOWN = 256
"""bytes of a line that is remembered: clients repeat the same few lines"""
_known_line = lru_cache(maxsize=256)(_parse_line)


@lru_cache(maxsize=64)
def _is_known_host(host: bytes) -> bool:
    return _HOST.fullmatch(host) is not None


class _Headers:
    """Collects the headers from llhttp's callbacks."""

    __slots__ = ("complete", "headers")

    def __init__(self) -> None:
        self.headers: list[tuple[bytes, bytes]] = []
        self.complete = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value.rstrip(b" \t")))

    def on_headers_complete(self) -> None:
        self.complete = True


def _parse_headers(data: bytes, method: str) -> list[tuple[bytes, bytes]]:
    if data.count(b"\r\n") > MAX_HEADERS + 2:
        accepted = f"at most {MAX_HEADERS} headers"
        raise Refusal(431, HEAD_TOO_LARGE, f"The request has too many headers; accepted: {accepted}.", accepted)
    collected = _Headers()
    try:
        httptools.HttpRequestParser(collected).feed_data(data)
    except httptools.HttpParserUpgrade:  # an offer to change the protocol, which is declined by ignoring it
        pass
    except httptools.HttpParserInvalidMethodError:
        raise Refusal(501, UNSUPPORTED, f"The method {method} is not supported.") from None
    except httptools.HttpParserInvalidURLError:
        raise _malformed("The target of the request is not a URL") from None
    except httptools.HttpParserError as error:
        trimmed = _TRAILING_SPACE.sub(b"\r\n", data)  # llhttp does not accept a tab after some values
        if trimmed != data:
            return _parse_headers(trimmed, method)
        if b"transfer-encoding" in dict(collected.headers):
            _check_repeated(collected.headers)
            _check_coding(dict(collected.headers)[b"transfer-encoding"])
        raise _malformed(str(error).replace("`", "'")) from None
    if not collected.complete:
        raise _malformed("The head of the request is not complete")
    return collected.headers


def _check_repeated(headers: list[tuple[bytes, bytes]]) -> None:
    names = [name for name, _ in headers]
    for name in _SINGLE:
        if names.count(name) > 1:
            raise _malformed(f"The request has more than one {name.decode()} header")


def _body_length(fields: dict[bytes, bytes], version: str) -> int | None:
    """Bytes of the body, or None if it is chunked."""
    coding = fields.get(b"transfer-encoding")
    length = fields.get(b"content-length")
    if coding is None:
        if length is None:
            return 0
        if not length.isdigit() or len(length) > _MAX_LENGTH_DIGITS:
            raise _malformed(f"The Content-Length {_text(length)} is not a number")
        return int(length)
    if length is not None:
        raise _malformed("The request has both Content-Length and Transfer-Encoding")
    if version == "1.0":
        raise _malformed("Transfer-Encoding is not part of HTTP/1.0")
    _check_coding(coding)
    return None


def _check_coding(coding: bytes) -> None:
    if coding.lower() == b"chunked":
        return
    codings = [one.strip().lower() for one in coding.split(b",")]
    if codings.count(b"chunked") > 1 or not all(_METHOD.fullmatch(one) for one in codings):
        raise _malformed(f"The Transfer-Encoding {_text(coding)} is not accepted; accepted: chunked")
    what = f"The Transfer-Encoding {_text(coding)} is not supported"
    raise Refusal(501, UNSUPPORTED, f"{what}; accepted: chunked.", "chunked")


def _origin_form(target: bytes, method: bytes) -> bytes:
    """A target as path and query: clients of a proxy send the whole URL."""
    match = _ABSOLUTE.match(target)
    if match:
        rest = target[match.end() :]
        return rest if rest.startswith(b"/") else b"/" + rest
    if target == b"*" and method == b"OPTIONS":
        return target
    raise _malformed(f"The target {_text(target)} is neither a path nor an http:// URL")


def _malformed(what: str) -> Refusal:
    return Refusal(400, MALFORMED, what.rstrip(".") + ".")


def _text(value: bytes) -> str:
    """A client's bytes for an error sentence."""
    text = value.decode("latin-1")
    return repr(text if len(text) <= 64 else text[:61] + "...")
