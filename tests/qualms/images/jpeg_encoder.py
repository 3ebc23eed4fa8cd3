"""A baseline JPEG encoder for tests: any components, sampling factors, scans and restart intervals, which Pillow cannot write.

The Huffman tables are those of Pillow's files. `split` and `join` take any JPEG file apart and put it together again.
"""

import io
import struct
from collections.abc import Iterable, Sequence
from functools import cache
from math import ceil

import numpy as np
from numpy.typing import NDArray
from PIL import Image

SOF0, DHT, SOI, EOI, SOS, DQT, DRI, APP0, APP1, APP2, APP14, COM = (
    0xC0, 0xC4, 0xD8, 0xD9, 0xDA, 0xDB, 0xDD, 0xE0, 0xE1, 0xE2, 0xEE, 0xFE,
)  # fmt: skip
FRAMES = (0xC0, 0xC1, 0xC2)
JFIF = (APP0, b"JFIF\0\1\1\0\0\1\0\1\0\0")

Part = tuple[int, bytes]
"""marker, and the content of its segment; a scan's data follow the content of its SOS"""
_ZIGZAG = np.array(
    sorted(range(64), key=lambda i: (i // 8 + i % 8, i // 8 if (i // 8 + i % 8) % 2 else i % 8)), np.int64
)
_DCT = np.cos((2 * np.arange(8) + 1) * np.arange(8)[:, None] * np.pi / 16) / 2
_DCT[0] /= np.sqrt(2)


def adobe(transform: int) -> Part:
    return APP14, b"Adobe\0\x64\0\0\0\0" + bytes([transform])


def split(data: bytes) -> list[Part]:
    """The parts of a well-formed file between SOI and EOI."""
    parts, offset = list[Part](), 2
    while data[offset + 1] != EOI:
        marker, length = data[offset + 1], struct.unpack_from(">H", data, offset + 2)[0]
        end = offset + 2 + length
        if marker == SOS:
            while data[end] != 0xFF or data[end + 1] == 0 or 0xD0 <= data[end + 1] <= 0xD7:
                end += 1
        parts.append((marker, data[offset + 4 : end]))
        offset = end
    return parts


def join(parts: Iterable[Part]) -> bytes:
    """The file of these parts."""
    return b"\xff\xd8" + b"".join(segment(*part) for part in parts) + b"\xff\xd9"


def segment(marker: int, content: bytes) -> bytes:
    """The bytes of one part."""
    # The length of a scan's header follows from its number of components.
    length = 4 + 2 * content[0] if marker == SOS else len(content)
    return struct.pack(">BBH", 0xFF, marker, length + 2) + content


@cache
def _huffman_tables() -> tuple[list[Part], list[dict[int, str]]]:
    """The segments of Pillow's tables for brightness, and their codes by symbol: DC, AC."""
    stream = io.BytesIO()
    Image.new("L", (8, 8)).save(stream, "JPEG")
    segments = [part for part in split(stream.getvalue()) if part[0] == DHT]
    tables = []
    for _, content in segments:
        code, codes, symbols = 0, dict[int, str](), iter(content[17:])
        for length, count in enumerate(content[1:17], start=1):
            for _ in range(count):
                codes[next(symbols)] = f"{code:0{length}b}"
                code += 1
            code <<= 1
        tables.append(codes)
    return segments, tables


def encode(
    planes: Sequence[NDArray[np.uint8]],
    factors: Sequence[tuple[int, int]],
    *,
    scans: Sequence[Sequence[int]] | None = None,
    restart: int = 0,
    ids: Sequence[int] = (1, 2, 3, 4),
    step: int = 1,
    wide_tables: bool = False,
    before: Iterable[Part] = (JFIF,),
    frame: int = SOF0,
) -> list[Part]:
    """The parts of a file of component planes, (H, W) each, with horizontal and vertical sampling factors.

    `scans` are the components of each scan, by default one scan with all. `restart` is the interval of restart markers in MCUs.
    """
    height, width = planes[0].shape
    most = max(h for h, _ in factors), max(v for _, v in factors)
    table = np.minimum(1 + step * np.arange(64), 255)
    blocks = [_blocks(plane, factor, most, table) for plane, factor in zip(planes, factors, strict=True)]
    content = struct.pack(">BHHB", 8, height, width, len(planes))
    content += b"".join(bytes([one, h << 4 | v, 0]) for one, (h, v) in zip(ids, factors, strict=False))
    quantisation = b"\x10" + table.astype(">u2").tobytes() if wide_tables else b"\0" + bytes(table.tolist())
    parts = [*before, (DQT, quantisation), (frame, content), *_huffman_tables()[0]]
    if restart:
        parts.append((DRI, struct.pack(">H", restart)))
    for members in scans or [range(len(planes))]:
        units = _units([blocks[index] for index in members], [factors[index] for index in members], most, width, height)
        selected = b"".join(bytes([ids[index], 0]) for index in members)
        parts.append((SOS, bytes([len(members)]) + selected + b"\0\x3f\0" + _coded(units, len(members), restart)))
    return parts


def _blocks(
    plane: NDArray[np.uint8], factor: tuple[int, int], most: tuple[int, int], table: NDArray[np.int64]
) -> NDArray[np.int64]:
    """The quantised coefficients of a plane in zigzag order, (rows, columns, 64), padded to whole MCUs."""
    height, width = plane.shape
    across, down = ceil(width / (8 * most[0])) * 8 * factor[0], ceil(height / (8 * most[1])) * 8 * factor[1]
    rows = np.minimum(np.arange(down) * most[1] // factor[1], height - 1)
    columns = np.minimum(np.arange(across) * most[0] // factor[0], width - 1)
    values = plane[rows][:, columns].astype(np.float64) - 128
    squares = values.reshape(down // 8, 8, across // 8, 8).swapaxes(1, 2)
    coefficients = (_DCT @ squares @ _DCT.T).reshape(*squares.shape[:2], 64)[..., _ZIGZAG]
    result: NDArray[np.int64] = np.rint(coefficients / table).astype(np.int64)
    return result


def _units(
    blocks: list[NDArray[np.int64]], factors: list[tuple[int, int]], most: tuple[int, int], width: int, height: int
) -> list[list[tuple[int, NDArray[np.int64]]]]:
    """The MCUs of a scan: component and coefficients of each block."""
    if len(blocks) == 1:  # the MCU of a single component is one block, and blocks beyond the image are left out
        (grid,), ((h, v),) = blocks, factors
        rows, columns = ceil(ceil(height * v / most[1]) / 8), ceil(ceil(width * h / most[0]) / 8)
        return [[(0, grid[y, x])] for y in range(rows) for x in range(columns)]
    rows, columns = blocks[0].shape[0] // factors[0][1], blocks[0].shape[1] // factors[0][0]
    return [
        [
            (index, grid[y * v + down, x * h + across])
            for index, (grid, (h, v)) in enumerate(zip(blocks, factors, strict=True))
            for down in range(v)
            for across in range(h)
        ]
        for y in range(rows)
        for x in range(columns)
    ]


def _coded(units: list[list[tuple[int, NDArray[np.int64]]]], components: int, restart: int) -> bytes:
    """The Huffman-coded data of a scan."""
    _, (dc_codes, ac_codes) = _huffman_tables()
    interval = restart or len(units)
    pieces = []
    for start in range(0, len(units), interval):
        bits, previous = list[str](), [0] * components
        for unit in units[start : start + interval]:
            for component, block in unit:
                values = block.tolist()
                bits.append(_number(dc_codes, 0, values[0] - previous[component]))
                previous[component] = values[0]
                run = 0
                for value in values[1:]:
                    if value == 0:
                        run += 1
                        continue
                    bits.extend(ac_codes[0xF0] for _ in range(run // 16))
                    bits.append(_number(ac_codes, run % 16, value))
                    run = 0
                if run:
                    bits.append(ac_codes[0])
        text = "".join(bits)
        text += "1" * (-len(text) % 8)
        pieces.append(int(text, 2).to_bytes(len(text) // 8, "big").replace(b"\xff", b"\xff\0"))
    return b"".join(
        piece + (bytes([0xFF, 0xD0 + index % 8]) if index < len(pieces) - 1 else b"")
        for index, piece in enumerate(pieces)
    )


def _number(codes: dict[int, str], run: int, value: int) -> str:
    """The code of a coefficient after `run` zeros."""
    size = abs(value).bit_length()
    extra = value if value > 0 else value + (1 << size) - 1
    return codes[run << 4 | size] + (f"{extra:0{size}b}" if size else "")
