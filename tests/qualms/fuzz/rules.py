"""What the service must answer to a request that h11 accepts: the statuses of its route, and where we are stricter than h11.

`STRICTER` is the complete list of reasons to refuse such a request. There is no list for the other direction: everything that
h11 refuses must be refused, except in the two places that `oracle.py` names.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from tests.qualms.fuzz.oracle import Message

MAX_HEAD_BYTES = 65536
MAX_EMPTY_LINES = 2
MAX_HEADERS = 256
MAX_TRAILER_BYTES = 4096
METHODS = frozenset({b"GET", b"HEAD", b"POST", b"PUT", b"DELETE", b"OPTIONS", b"PATCH", b"TRACE", b"CONNECT"})
"""methods that are not refused by themselves; a route without the method answers with 405"""
REFUSALS = frozenset({400, 405, 408, 413, 414, 417, 431, 501, 505})
"""statuses of requests that h11 refuses"""


@dataclass(frozen=True)
class Rule:
    """A reason to refuse a request that h11 accepts."""

    name: str
    statuses: frozenset[int]
    required: bool
    """whether the request must be refused; False if it may be"""
    applies: Callable[[Message], bool]


def _trailers(message: Message) -> bytes:
    last = _LAST_CHUNK.search(message.framing)
    return b"" if last is None else message.framing[last.end() :]


def _lines(message: Message) -> bytes:
    """The head and the trailers, without the chunk lines."""
    return message.head + _trailers(message)


_LAST_CHUNK = re.compile(rb"(?:^|\r\n)0+[ \t]*(?:;[^\n]*)?\r\n")
_BARE_LF = re.compile(rb"(?<!\r)\n")
_FOLD = re.compile(rb"\n[ \t]")
_CONTROL = re.compile(rb"[\x01-\x08\x0b\x0c\x0e-\x1f\x7f]")
_NOT_HOST = re.compile(rb"[^A-Za-z0-9\-._~!$&'()*+,;=%:\[\]]")
_HOST = re.compile(rb"(?:[A-Za-z0-9\-._~!$&'()*+;=]|%[0-9A-Fa-f]{2})+(?::[0-9]*)?|\[[0-9A-Fa-f:.]+\](?::[0-9]*)?")
_LENGTHS = re.compile(rb"^content-length[ \t]*:([^\r\n]*)", re.IGNORECASE | re.MULTILINE)
_FRAMING_FIELD = re.compile(rb"^(?:content-length|transfer-encoding|host)[ \t]*:", re.IGNORECASE | re.MULTILINE)
_TARGET_FORM = re.compile(rb"/|https?://[^/?@]+(?:[/?]|$)", re.IGNORECASE)
_TARGET = re.compile(rb"(?:[A-Za-z0-9\-._~!$&'()*+,;=:@/?\[\]]|%[0-9A-Fa-f]{2})*")
_TOKEN = rb"[-!#$%&'*+.^_`|~0-9A-Za-z]+"
_CHUNK_LINE = re.compile(
    rb"[0-9A-Fa-f]{1,15}(?:;" + _TOKEN + rb"(?:=(?:" + _TOKEN + rb"|\"[\t \x21\x23-\x5b\x5d-\x7e\x80-\xff]*\"))?)*"
)


def _several_lengths(message: Message) -> bool:
    values = _LENGTHS.findall(message.head)
    return len(values) > 1 or any(b"," in value for value in values)


def _unusual_chunk_line(message: Message) -> bool:
    """Whether a chunk line is not as in RFC 9112, 7.1, or has more than 15 digits."""
    if not message.values(b"transfer-encoding"):
        return False
    last = _LAST_CHUNK.search(message.framing)
    chunk_lines = message.framing if last is None else message.framing[: last.end()]
    return any(line and not _CHUNK_LINE.fullmatch(line) for line in chunk_lines.split(b"\r\n"))


def _rule(name: str, statuses: set[int], applies: Callable[[Message], bool], *, required: bool = True) -> Rule:
    return Rule(name, frozenset(statuses), required, applies)


STRICTER = (
    _rule("bare LF", {400}, lambda one: _BARE_LF.search(_lines(one)) is not None),
    _rule("folded line", {400}, lambda one: _FOLD.search(_lines(one)) is not None),
    _rule("control character", {400}, lambda one: _CONTROL.search(_lines(one)) is not None),
    _rule("Host with other characters", {400}, lambda one: any(map(_NOT_HOST.search, one.values(b"host")))),
    _rule(
        "Host of another form",
        {400},
        lambda one: not all(map(_HOST.fullmatch, one.values(b"host"))),
        required=False,
    ),
    _rule(
        "Transfer-Encoding and Content-Length",
        {400},
        lambda one: bool(one.values(b"transfer-encoding") and one.values(b"content-length")),
    ),
    _rule("several Content-Length", {400}, _several_lengths),
    _rule(
        "Transfer-Encoding in HTTP/1.0",
        {400},
        lambda one: one.version == b"1.0" and bool(one.values(b"transfer-encoding")),
    ),
    _rule("another version", {400, 505}, lambda one: one.version not in (b"1.0", b"1.1")),
    _rule(
        "Content-Length of more than 18 digits",
        {400, 413},
        lambda one: any(len(value) > 18 for value in one.values(b"content-length")),
    ),
    _rule("unknown method", {400, 501}, lambda one: one.method not in METHODS, required=False),
    _rule("target too long", {414, 431}, lambda one: len(one.target) > MAX_HEAD_BYTES),
    _rule("head too long", {414, 431}, lambda one: len(one.head) > MAX_HEAD_BYTES + 2),
    _rule("many header fields", {431}, lambda one: len(one.headers) > MAX_HEADERS),
    _rule("trailers too long", {400, 413, 431}, lambda one: len(one.framing) > MAX_TRAILER_BYTES, required=False),
    _rule(
        "target of another form",
        {400},
        lambda one: not _TARGET_FORM.match(one.target) and (one.method, one.target) != (b"OPTIONS", b"*"),
        required=False,
    ),
    _rule("target with other characters", {400}, lambda one: not _TARGET.fullmatch(one.target), required=False),
    _rule(
        "trailer that is part of the framing",
        {400},
        lambda one: _FRAMING_FIELD.search(_trailers(one)) is not None,
        required=False,
    ),
    _rule("chunk line of another form", {400}, _unusual_chunk_line, required=False),
    _rule("many empty lines", {400}, lambda one: one.empty_lines > MAX_EMPTY_LINES, required=False),
    _rule(
        "Expect of another value",
        {417},
        lambda one: any(value.lower() != b"100-continue" for value in one.values(b"expect")),
        required=False,
    ),
)

_HEALTH = {"/livez", "/readyz", "/healthz"}
_PATHS = {**dict.fromkeys(_HEALTH, "health"), "/models": "models", "/metrics": "metrics"}
_PATHS |= {"/docs": "docs", "/openapi.json": "docs", "/predict": "predict", "/": "page", "/status": "status"}


def path_of(target: bytes) -> str:
    """The decoded path of a target."""
    text = target.decode("latin-1")
    if not text.startswith("/"):
        try:
            text = urlsplit(text).path or "/"
        except ValueError:
            return ""
    return unquote(text.partition("?")[0].partition("#")[0])


def route_of(path: str) -> str:
    """The route label in metrics."""
    if path.startswith("/models/"):
        return "models"
    if path.startswith(("/docs/", "/page/")):
        return path.split("/")[1]
    return _PATHS.get(path, "other")


def route_statuses(message: Message, max_body_bytes: int) -> set[int]:
    """The statuses that the route of a valid request may answer with."""
    path, reads = path_of(message.target), message.method in (b"GET", b"HEAD")
    if path == "/predict":
        statuses = {200, 400, 408, 413, 415, 422, 429} if message.method == b"POST" else {405}
        if message.values(b"x-request-timeout"):
            statuses.add(504)
    elif path in _PATHS:
        statuses = {200} if reads else {405}
    elif path.startswith(("/models/", "/docs/", "/page/")):
        statuses = {200, 404} if reads else {404, 405}
    else:
        statuses = {404} if reads else {404, 405}
    if path.endswith("/") and path != "/":
        statuses.add(307)
    if any(int(value) > max_body_bytes for value in message.values(b"content-length")):
        statuses.add(413)
    return statuses
