"""JPEG files that are damaged, cut or against the format: name and bytes of each."""

import struct
from collections.abc import Iterator
from random import Random

import numpy as np
from tests.qualms.images.jpeg_encoder import (
    APP0,
    DHT,
    DQT,
    DRI,
    FRAMES,
    JFIF,
    SOS,
    Part,
    encode,
    join,
    segment,
    split,
)
from tests.qualms.images.jpeg_files import photo, save
from tests.qualms.images.png_files import NamedFile

_FLIPS = 300


def unusual_jpeg_files() -> Iterator[NamedFile]:
    for source, data in _sources().items():
        for part in (_around(data), _cut(data), _flipped(data), _frames(data), _scans(data), _tables(data)):
            for name, changed in part:
                yield f"jpeg {name}, {source}", changed
    for name, changed in _restarts():
        yield f"jpeg {name}", changed


def _sources() -> dict[str, bytes]:
    colour, grey = photo(11, 30, 37), photo(12, 23, 25, 1)
    planes = list(np.moveaxis(colour, -1, 0))
    return {
        "grey": save(grey),
        "4:2:0": save(colour, subsampling=2),
        "4:4:4": save(colour, subsampling=0),
        "progressive": save(colour, progressive=True),
        "restarts": save(colour, restart_marker_blocks=2),
        "CMYK": save(photo(13, 20, 20, 4), "CMYK"),
        "RGB": save(colour, keep_rgb=True),
        "several scans": join(encode(planes, [(2, 2), (1, 1), (1, 1)], scans=[[0], [1], [2]])),
    }


def _around(data: bytes) -> Iterator[NamedFile]:
    """Bytes before, after and between segments."""
    parts = split(data)
    pieces = [segment(*part) for part in parts]
    yield "missing EOI", data[:-2]
    yield "half an EOI", data[:-1]
    yield "two EOI", data + b"\xff\xd9"
    yield "garbage after EOI", data + bytes(range(256))
    yield "second file after EOI", data + save(photo(14, 9, 9))
    yield "garbage before SOI", b"garbage" + data
    yield "zero before SOI", b"\0" + data
    yield "two SOI", b"\xff\xd8" + data
    yield "no SOI", data[2:]
    for name, bytes_ in {
        "one fill byte": b"\xff",
        "many fill bytes": b"\xff" * 50,
        "zeros": bytes(4),
        "garbage": b"garbage",
        "stuffed byte": b"\xff\0",
        "restart marker": b"\xff\xd3",
        "TEM marker": b"\xff\x01",
        "SOI": b"\xff\xd8",
        "EOI": b"\xff\xd9",
        "reserved marker": b"\xff\x02",
        "DNL": b"\xff\xdc\0\4\0\x20",
        "DAC": b"\xff\xcc\0\4\0\1",
        "DHP": b"\xff\xde\0\3\0",
        "EXP": b"\xff\xdf\0\3\0",
        "segment of length 0": b"\xff\xfe\0\0",
        "segment of length 1": b"\xff\xfe\0\1",
        "segment that is too long": b"\xff\xfe\xff\xff",
    }.items():
        for index, place in (
            (0, "first"),
            (1, "second"),
            (len(pieces) - 1, "before the last scan"),
            (len(pieces), "last"),
        ):
            yield (
                f"{name} between segments: {place}",
                b"\xff\xd8" + b"".join(pieces[:index]) + bytes_ + b"".join(pieces[index:]) + b"\xff\xd9",
            )
    for index, (marker, _) in enumerate(parts):
        yield f"missing segment: {marker:02x} {index}", join(parts[:index] + parts[index + 1 :])
        yield f"segment twice: {marker:02x} {index}", join(parts[: index + 1] + parts[index:])
        yield (
            f"segment moved to the front: {marker:02x} {index}",
            join([parts[index], *parts[:index], *parts[index + 1 :]]),
        )


def _cut(data: bytes) -> Iterator[NamedFile]:
    head = sum(len(segment(*part)) for part in split(data)[:-1])
    for length in sorted(
        {*range(2, 30), *range(30, head, 23), *range(head, len(data), 11), *range(len(data) - 12, len(data))}
    ):
        yield f"cut: {length} of {len(data)} bytes", data[:length]
        if length > head:
            yield f"cut with EOI: {length} of {len(data)} bytes", data[:length] + b"\xff\xd9"


def _flipped(data: bytes) -> Iterator[NamedFile]:
    rng = Random(len(data))
    head = sum(len(segment(*part)) for part in split(data)[:-1])
    for index in range(_FLIPS):
        start, end, where = (2, head, "header") if index % 3 == 0 else (head, len(data), "scan")
        changed = bytearray(data)
        position = rng.randrange(start, end)
        changed[position] ^= 1 << rng.randrange(8)
        yield f"flipped bit in the {where}: byte {position}, {index}", bytes(changed)
    for index in range(0, _FLIPS, 5):
        position = rng.randrange(head, len(data))
        yield f"missing byte in the scan: {position}, {index}", data[:position] + data[position + 1 :]
        yield f"byte inserted in the scan: {position}, {index}", data[:position] + rng.randbytes(1) + data[position:]
        yield (
            f"marker inserted in the scan: {position}, {index}",
            data[:position] + bytes([255, rng.randrange(1, 255)]) + data[position:],
        )


def _replaced(data: bytes, markers: tuple[int, ...], marker: int | None, offset: int, content: bytes) -> bytes:
    """The file with another marker, or with other bytes at an offset, in all segments with these markers."""
    parts = [
        (one if marker is None else marker, old[:offset] + content + old[offset + len(content) :])
        if one in markers
        else (one, old)
        for one, old in split(data)
    ]
    return join(parts)


def _frames(data: bytes) -> Iterator[NamedFile]:
    """Frame headers that do not fit the data, and frames of other processes."""
    frame = next(content for marker, content in split(data) if marker in FRAMES)
    height, width = struct.unpack(">HH", frame[1:5])
    for marker in (*range(0xC0, 0xC4), *range(0xC5, 0xC8), *range(0xC8, 0xCC), *range(0xCD, 0xD0)):
        yield f"other process: SOF{marker - 0xC0}", _replaced(data, FRAMES, marker, 0, b"")
    for precision in (0, 1, 7, 9, 10, 12, 16):
        yield f"precision: {precision}", _replaced(data, FRAMES, None, 0, bytes([precision]))
    for name, sides in {
        "no height": (0, width),
        "no width": (height, 0),
        "one row less": (height - 1, width),
        "one row more": (height + 1, width),
        "one block row more": (height + 16, width),
        "far more rows": (height + 900, width),
        "one column less": (height, width - 1),
        "one block column more": (height, width + 16),
        "far smaller": (3, 3),
    }.items():
        yield f"size: {name}", _replaced(data, FRAMES, None, 1, struct.pack(">HH", *sides))
    no_height = split(_replaced(data, FRAMES, None, 1, struct.pack(">HH", 0, width)))
    first = next(index for index, part in enumerate(no_height) if part[0] == SOS)
    dnl: Part = (0xDC, struct.pack(">H", height))
    yield "size: height by DNL", join([*no_height[: first + 1], dnl, *no_height[first + 1 :]])
    for count in (0, 1, 2, 3, 4, 5, 10, 255):
        yield f"components: {count} announced", _replaced(data, FRAMES, None, 5, bytes([count]))
    for component in range(frame[5]):
        for value in (0x00, 0x01, 0x10, 0x11, 0x12, 0x21, 0x22, 0x41, 0x44, 0x31, 0x55, 0xFF):
            yield (
                f"sampling: {value:02x} of component {component}",
                _replaced(data, FRAMES, None, 7 + 3 * component, bytes([value])),
            )
        for value in (1, 3, 4, 255):
            yield (
                f"quantisation table: {value} of component {component}",
                _replaced(data, FRAMES, None, 8 + 3 * component, bytes([value])),
            )
        for value in (0, 1, 2, 82, 255):
            yield (
                f"component number: {value} of component {component}",
                _replaced(data, FRAMES, None, 6 + 3 * component, bytes([value])),
            )
    parts = split(data)
    place = next(index for index, part in enumerate(parts) if part[0] in FRAMES)
    other: Part = (parts[place][0], frame[:1] + struct.pack(">HH", height + 8, width) + frame[5:])
    yield "two different frames", join([*parts[:place], other, *parts[place:]])
    yield "frame after the scan", join([*parts[:place], *parts[place + 1 :], parts[place]])


def _scans(data: bytes) -> Iterator[NamedFile]:
    """Scan headers that do not fit."""
    parts = split(data)
    scans = [index for index, part in enumerate(parts) if part[0] == SOS]
    for index in scans[:3]:
        content = parts[index][1]
        end = 1 + 2 * content[0]
        for offset, what in (
            (end, "spectral start"),
            (end + 1, "spectral end"),
            (end + 2, "approximation"),
            (1, "component"),
            (2, "tables"),
        ):
            for value in (0, 1, 2, 5, 0x10, 0x11, 0x33, 62, 63, 64, 255):
                changed = (SOS, content[:offset] + bytes([value]) + content[offset + 1 :])
                yield f"scan: {what} {value}, scan {index}", join([*parts[:index], changed, *parts[index + 1 :]])
        yield f"scan without data: scan {index}", join([*parts[:index], (SOS, content[: end + 3]), *parts[index + 1 :]])
        yield (
            f"scan with zeros: scan {index}",
            join([*parts[:index], (SOS, content[: end + 3] + bytes(50)), *parts[index + 1 :]]),
        )
        for length in (0, 2, 3, 7, 100, 65535):
            whole = join(parts)
            start = whole.index(segment(*parts[index]))
            yield (
                f"scan: header length {length}, scan {index}",
                whole[: start + 2] + struct.pack(">H", length) + whole[start + 4 :],
            )
    yield "scans twice", join([*parts, *(parts[index] for index in scans)])
    yield "scans in reverse", join([*parts[: scans[0]], *(parts[index] for index in reversed(scans))])
    yield "last scan missing", join(parts[:-1])


def _tables(data: bytes) -> Iterator[NamedFile]:
    """Tables that are missing, damaged or doubled."""
    parts = split(data)
    for marker, name in ((DHT, "Huffman"), (DQT, "quantisation")):
        yield f"table: no {name} tables", join([part for part in parts if part[0] != marker])
        index = next(index for index, part in enumerate(parts) if part[0] == marker)
        content = parts[index][1]
        changes = {
            "number 3": bytes([content[0] | 3]) + content[1:],
            "number 4": bytes([content[0] | 4]) + content[1:],
            "16 bits announced": bytes([content[0] | 0x10]) + content[1:],
            "short": content[:-1],
            "empty": b"",
            "more bytes": content + b"\0",
            "zeros": content[:1] + bytes(len(content) - 1),
            "too many codes": content[:1] + b"\xff" * 16 + content[17:],
            "ones": content[:1] + b"\1" * (len(content) - 1),
        }
        for change, new in changes.items():
            yield f"table: {name}, {change}", join([*parts[:index], (marker, new), *parts[index + 1 :]])
    merged = b"".join(content for marker, content in parts if marker == DQT)
    rest = [part for part in parts if part[0] != DQT]
    yield "table: quantisation, all in one segment", join([(DQT, merged), *rest])
    yield "only JFIF", join([JFIF])
    yield "without APP0", join([part for part in parts if part[0] != APP0])
    for interval in (1, 2, 3, 65535):
        yield f"restart interval without restarts: {interval}", join([(DRI, struct.pack(">H", interval)), *parts])
    yield "restart interval of 3 bytes", join([(DRI, b"\0\1\0"), *parts])


def _restarts() -> Iterator[NamedFile]:
    """Restart markers that are missing, doubled or in a wrong order."""
    planes = list(np.moveaxis(photo(15, 40, 40), -1, 0))
    for progressive in (False, True):
        data = (
            save(photo(15, 40, 40), progressive=True, restart_marker_blocks=2)
            if progressive
            else join(encode(planes, [(1, 1)] * 3, restart=2))
        )
        kind = "progressive" if progressive else "baseline"
        markers = [index for index in range(len(data) - 1) if data[index] == 255 and 0xD0 <= data[index + 1] <= 0xD7]
        for index in markers[:12]:
            before, marker, after = data[:index], data[index : index + 2], data[index + 2 :]
            changes = {
                "missing": b"",
                "twice": marker * 2,
                "one too far": bytes([255, 0xD0 + (marker[1] + 1) % 8]),
                "one too early": bytes([255, 0xD0 + (marker[1] - 1) % 8]),
                "four too far": bytes([255, 0xD0 + (marker[1] + 4) % 8]),
                "with fill bytes": b"\xff\xff\xff" + marker,
                "with garbage before": b"\x12\x34" + marker,
                "with garbage after": marker + b"\x12\x34",
                "EOI instead": b"\xff\xd9",
                "comment instead": b"\xff\xfe\0\4ab",
            }
            for name, change in changes.items():
                yield f"restart marker {name}: {kind}, byte {index}", before + change + after
