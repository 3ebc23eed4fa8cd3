"""Deflate streams that expand far, or that are long and expand to little."""

import zlib

HEADER = b"\x78\x01"
"""of a zlib stream"""
EMPTY_BLOCK = b"\x00\x00\x00\xff\xff"
"""a stored block of no bytes, not the last one"""
_PIECE = 2**24
_LAST_BLOCK = b"\x01\x00\x00\xff\xff"


def zeros(size: int) -> bytes:
    """A zlib stream of `size` zero bytes, about a thousandth as long."""
    compressor = zlib.compressobj(9)
    pieces, rest = divmod(size, _PIECE)
    piece = bytes(min(size, _PIECE))
    data = [compressor.compress(piece) for _ in range(pieces)]
    return b"".join([*data, compressor.compress(piece[:rest]), compressor.flush()])


def endless_zeros(size: int) -> bytes:
    """A zlib stream of about `size` bytes that expands to a thousand times as many zeros and has no valid checksum."""
    compressor = zlib.compressobj(9)
    first = compressor.compress(bytes(_PIECE)) + compressor.flush(zlib.Z_FULL_FLUSH)
    block = compressor.compress(bytes(_PIECE)) + compressor.flush(zlib.Z_FULL_FLUSH)
    return first + block * max(0, (size - len(first)) // len(block)) + _LAST_BLOCK + bytes(4)


def after_empty_blocks(data: bytes, blocks: int) -> bytes:
    """A zlib stream of the data behind so many blocks of no bytes, each of which an inflater reads."""
    return HEADER + EMPTY_BLOCK * blocks + zlib.compress(data, 9)[len(HEADER) :]
