"""The parts of a JPEG file: segments, frames, scans, and Huffman tables with which zero bytes decode as blank blocks."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass

BASELINE, PROGRESSIVE, ARITHMETIC, ARITHMETIC_PROGRESSIVE = 0xC0, 0xC2, 0xC9, 0xCA
"""kinds of frames"""
SOI, EOI = b"\xff\xd8", b"\xff\xd9"
COM, APP1, APP2, APP13 = 0xFE, 0xE1, 0xE2, 0xED
_DHT, _SOS, _DQT = 0xC4, 0xDA, 0xDB
_ADOBE = 0xEE
MAX_SEGMENT = 65_533
"""bytes in one segment"""
END_OF_BLOCKS = 0xE0
"""symbol of the alternating-current table that ends 2¹⁴ blocks and more; 14 bits follow"""
ONE = 0x01
"""symbol of a coefficient of 1 or −1 without zeros before it; one bit follows"""
END_OF_BLOCK = 0x00


def segment(marker: int, data: bytes = b"") -> bytes:
    """A marker with its length and data."""
    return struct.pack(">BBH", 0xFF, marker, 2 + len(data)) + data


def huffman(ac_symbol: int = END_OF_BLOCK) -> bytes:
    """Both Huffman tables, in which the code 0 is a difference of 0 and the given symbol."""
    other = END_OF_BLOCK if ac_symbol != END_OF_BLOCK else ONE
    return segment(_DHT, _table(0x00, (0, 1)) + _table(0x10, (ac_symbol, other)))


def _table(number: int, symbols: tuple[int, int]) -> bytes:
    """Codes of one and two bits: 0 and 10."""
    return bytes([number, 1, 1, *bytes(14), *symbols])


def quantization() -> bytes:
    """A table of ones."""
    return segment(_DQT, bytes([0]) + bytes([1] * 64))


@dataclass(frozen=True)
class Frame:
    """Size, kind and components of an image; `sampling` holds the factors of each component, 0x11 for 1 × 1."""

    kind: int
    width: int
    height: int
    sampling: tuple[int, ...] = (0x11,)

    @property
    def segment(self) -> bytes:
        """SOF."""
        head = struct.pack(">BHHB", 8, self.height, self.width, len(self.sampling))
        return segment(self.kind, head + b"".join(bytes([1 + i, s, 0]) for i, s in enumerate(self.sampling)))

    @property
    def blocks(self) -> int:
        """Blocks of 8 × 8 of one component without subsampling."""
        return -(-self.width // 8) * -(-self.height // 8)


def scan(data: bytes, components: Sequence[int] = (0,), first: int = 0, last: int = 63, bits: int = 0) -> bytes:
    """SOS and entropy-coded data; `bits`: high and low bit of successive approximation in one byte."""
    head = bytes([len(components), *(value for index in components for value in (1 + index, 0)), first, last, bits])
    return segment(_SOS, head) + data


def jpeg(frame: Frame, scans: bytes, *before: bytes, tables: bytes | None = None) -> bytes:
    """A complete file; segments `before` its tables and its frame."""
    adobe = segment(_ADOBE, b"Adobe\0\x64\0\0\0\0\0") if len(frame.sampling) == 4 else b""
    tables = huffman() if tables is None else tables
    return b"".join([SOI, *before, adobe, quantization(), tables, frame.segment, scans, EOI])


def blank(*before: bytes) -> bytes:
    """A grey image of 32 × 32 pixels behind other segments."""
    frame = Frame(BASELINE, 32, 32)
    return jpeg(frame, scan(bytes(frame.blocks // 4)), *before)
