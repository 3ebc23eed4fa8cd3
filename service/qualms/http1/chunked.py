"""Decode a chunked body (RFC 9112, 7.1), strictly: CRLF line ends, bounded chunk headers and trailers."""

import re

MAX_LINE = 4096
"""bytes of a chunk's size with its extensions, or of one trailer"""
MAX_TRAILERS = 16 * 1024
MAX_OVERHEAD = 64 * 1024
"""bytes beside the content that any body may have; a longer body may have as many as its content"""
CHUNKS_PER_CALL = 512
"""a call of `feed` takes at most about half a millisecond"""
_SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})(?:;[\t\x20-\x7e\x80-\xff]*)?")
_TRAILER = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+:[\t\x20-\x7e\x80-\xff]*")


class ChunkError(Exception):
    """The body is not chunked as the standard demands; the message is the reason."""


class ChunkedDecoder:
    """Decodes a body that arrives in pieces. Chunk extensions and trailers are checked and ignored."""

    __slots__ = ("_chunk_left", "_in_trailers", "_overhead", "_trailers", "body", "complete")

    def __init__(self) -> None:
        self.body = bytearray()
        """the content so far"""
        self.complete = False
        self._chunk_left = 0
        """bytes of the current chunk that have not arrived, with the line end after it; 0 before the size of a chunk"""
        self._in_trailers = False
        self._trailers = 0
        self._overhead = 0

    def feed(self, data: bytes) -> tuple[bytes, bool]:
        """Decode data. Returns the rest, and whether it can be decoded further without more data.

        The rest is to be passed to the next call, before the data that arrives then; if the body is complete, it is what
        follows the body.
        """
        position, chunks = 0, 0
        while not self.complete:
            if self._chunk_left:
                taken = self._content(data, position)
                if not taken:
                    return data[position:], False
                position += taken
                continue
            if chunks == CHUNKS_PER_CALL:
                return data[position:], True
            end = data.find(b"\n", position, position + MAX_LINE)
            if end < 0:
                if len(data) - position >= MAX_LINE:
                    raise ChunkError("A line of the chunked body is too long")
                return data[position:], False
            self._line(data[position : end + 1])
            position, chunks = end + 1, chunks + 1
        return data[position:], False

    def _content(self, data: bytes, position: int) -> int:
        """Take content of the current chunk, or the line end after it; returns the number of bytes taken."""
        left = self._chunk_left - 2
        if left:
            taken = min(left, len(data) - position)
            self.body += memoryview(data)[position : position + taken]
            self._chunk_left -= taken
            return taken
        if len(data) - position < 2:
            return 0
        if data[position : position + 2] != b"\r\n":
            raise ChunkError("A chunk does not end with CRLF")
        self._chunk_left = 0
        return 2

    def _line(self, line: bytes) -> None:
        """The size of a chunk or a trailer, with its line end."""
        if not line.endswith(b"\r\n"):
            raise ChunkError("A line of the chunked body does not end with CRLF")
        self._overhead += len(line) + 2
        if self._overhead > MAX_OVERHEAD + len(self.body):
            raise ChunkError("The chunked body has more bytes for sizes and extensions than for its content")
        line = line[:-2]
        if not self._in_trailers:
            match = _SIZE.fullmatch(line)
            if match is None:
                raise ChunkError("The size of a chunk is not a hexadecimal number")
            size = int(match[1], 16)
            self._in_trailers = not size
            self._chunk_left = size + 2 if size else 0
        elif not line:
            self.complete = True
        else:
            self._trailers += len(line)
            if self._trailers > MAX_TRAILERS or not _TRAILER.fullmatch(line):
                raise ChunkError("The trailers are malformed or too long")
