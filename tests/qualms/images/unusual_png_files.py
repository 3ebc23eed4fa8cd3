"""PNG files with unusual or invalid data, headers and orders of chunks: name and bytes of each."""

import struct
import zlib
from collections.abc import Iterator

from tests.qualms.images.png_encoder import (
    CHANNELS,
    DEPTHS,
    FILTERS,
    GREY,
    GREY_ALPHA,
    PALETTE,
    RGB,
    RGB_ALPHA,
    SIGNATURE,
    Chunk,
    assemble,
    header,
    image_chunks,
    palette,
    samples,
    scanlines,
)
from tests.qualms.images.png_files import ALL_FILTERS, NamedFile, required_chunks


def unusual_png_files() -> Iterator[NamedFile]:
    parts = (_unusual_data(), _headers(), _orders(), _palettes(), _animations(), _cut())
    for name, data in (file for part in parts for file in part):
        yield f"png {name}", data


def _unusual_data() -> Iterator[NamedFile]:
    """IDAT chunks with unusual or invalid content."""
    for colour, depth in ((GREY, 8), (GREY, 1), (RGB, 8), (PALETTE, 2), (RGB_ALPHA, 16)):
        for interlaced in (False, True):
            pixels = samples(7, 14, 11, colour, depth)
            raw = scanlines(pixels, depth, ALL_FILTERS, interlaced=interlaced)
            row = 1 + (11 * CHANNELS[colour] * depth + 7) // 8
            packed = zlib.compress(raw)
            rle = zlib.compressobj(9, zlib.DEFLATED, 9)
            streams = {
                "stored": zlib.compress(raw, 0),
                "small window": rle.compress(raw) + rle.flush(),
                "wrong checksum": packed[:-1] + bytes([packed[-1] ^ 1]),
                "without checksum": packed[:-4],
                "half a checksum": packed[:-2],
                "cut": packed[: len(packed) // 2],
                "last bytes cut": packed[:-9],
                "without zlib header": packed[2:],
                "damaged zlib header": b"\x78\x9d" + packed[2:],
                "preset dictionary": b"\x78\xbb\0\0\0\1" + packed[2:],
                "damaged": packed[:20] + b"\xff\xff\xff" + packed[23:],
                "empty": b"",
                "one byte": b"\x78",
                "bytes after the stream": packed + b"more bytes",
                "two streams": zlib.compress(raw[:row]) + zlib.compress(raw[row:]),
                "one byte too few": zlib.compress(raw[:-1]),
                "one row too few": zlib.compress(raw[:-row]),
                "half of the rows": zlib.compress(raw[: len(raw) // 2]),
                "no pixels": zlib.compress(b""),
                "one byte too many": zlib.compress(raw + b"\0"),
                "many bytes too many": zlib.compress(raw + bytes(100_000)),
                "one row too many": zlib.compress(raw + raw[-row:]),
                "unknown filter": zlib.compress(b"\5" + raw[1:]),
                "unknown filter in the last row": zlib.compress(raw[:-row] + b"\xff" + raw[1 - row :]),
                "set padding bits": zlib.compress(raw[:-1] + bytes([raw[-1] | 31 if depth < 8 else raw[-1]])),
            }
            first = header(11, 14, depth, colour, int(interlaced))
            start: list[Chunk] = [first, *required_chunks(colour, depth)]
            end: list[Chunk] = [(b"IEND", b"")]
            where = f"colour {colour}, depth {depth}{', interlaced' if interlaced else ''}"
            for name, stream in streams.items():
                yield f"data: {name}, {where}", assemble([*start, (b"IDAT", stream), *end])
            for name, cuts in {
                "one byte each": range(1, len(packed)),
                "in two": [len(packed) // 2],
                "after the zlib header": [2],
                "empty first": [0],
                "empty last": [len(packed)],
                "empty in the middle": [30, 30, 30],
                "checksum apart": [len(packed) - 4],
            }.items():
                bounds = [0, *cuts, len(packed)]
                parts: list[Chunk] = [(b"IDAT", packed[a:b]) for a, b in zip(bounds, bounds[1:], strict=False)]
                yield f"several IDAT: {name}, {where}", assemble([*start, *parts, *end])
                apart = [*parts[:1], (b"tEXt", b"a\0b"), *parts[1:]]
                yield f"IDAT interrupted by tEXt: {name}, {where}", assemble([*start, *apart, *end])
                apart = [*parts[:1], (b"ABCD", b""), *parts[1:]]
                yield f"IDAT interrupted by a critical chunk: {name}, {where}", assemble([*start, *apart, *end])
            for kind in (b"IHDR", b"PLTE", b"IDAT", b"IEND"):
                name = f"wrong CRC of a critical chunk: {kind.decode()}, {where}"
                yield name, assemble([*start, (b"IDAT", packed), *end], wrong_crc=[kind])


def _headers() -> Iterator[NamedFile]:
    """Headers that the format forbids or that do not fit the data."""
    pixels = samples(8, 6, 9, RGB, 8)
    first, data, end = image_chunks(pixels, RGB, 8)
    for depth in (0, 1, 2, 3, 4, 8, 16, 32, 255):
        for colour in (0, 1, 2, 3, 4, 5, 6, 7):
            chunks: list[Chunk] = [header(9, 6, depth, colour), palette(4), data, end]
            yield f"header: colour {colour}, depth {depth}", assemble(chunks)
    for width, height in (
        (0, 6),
        (9, 0),
        (0, 0),
        (2**31, 6),
        (9, 2**31 - 1),
        (2**32 - 1, 1),
        (8, 6),
        (10, 6),
        (9, 5),
        (9, 7),
    ):
        yield f"header: data of 9×6 for {width}×{height}", assemble([header(width, height, 8, RGB), data, end])
    for name, methods, interlace in (
        ("compression", 1, 0),
        ("filter", 2, 0),
        ("interlace", 0, 2),
        ("interlace", 0, 255),
    ):
        yield (
            f"header: unknown {name} method {interlace}",
            assemble([header(9, 6, 8, RGB, interlace, methods), data, end]),
        )
    yield "header: 12 bytes", assemble([(b"IHDR", first[1][:12]), data, end])
    yield "header: 14 bytes", assemble([(b"IHDR", first[1] + b"\0"), data, end])


def _orders() -> Iterator[NamedFile]:
    """Orders of chunks that the format forbids, and bytes around the file."""
    pixels = samples(8, 6, 9, RGB, 8)
    first, data, end = image_chunks(pixels, RGB, 8)
    text: Chunk = (b"tEXt", b"a\0b")
    other = header(5, 5, 8, GREY)
    orders: dict[str, list[Chunk]] = {
        "no chunks": [],
        "IHDR only": [first],
        "no IDAT": [first, end],
        "no IEND": [first, data],
        "no IHDR": [data, end],
        "text before IHDR": [text, first, data, end],
        "IDAT before IHDR": [data, first, end],
        "two equal IHDR": [first, first, data, end],
        "two different IHDR": [first, other, data, end],
        "IHDR after IDAT": [first, data, first, end],
        "other IHDR after IDAT": [first, data, other, end],
        "IEND before IDAT": [first, end, data, end],
        "two IEND": [first, data, end, end],
        "IEND with content": [first, data, (b"IEND", b"content")],
        "two images": [first, data, end, first, data, end],
        "IDAT twice": [first, data, data, end],
        "suggested palette": [first, palette(9), data, end],
        "suggested palette after the data": [first, data, palette(9), end],
        "tRNS after the data": [first, data, (b"tRNS", bytes(6)), end],
        "two tRNS": [first, (b"tRNS", bytes(6)), (b"tRNS", pixels[2, 2].astype(">u2").tobytes()), data, end],
    }
    for name, chunks in orders.items():
        yield f"order: {name}", assemble(chunks)
    whole = assemble([first, data, end])
    yield "trailing bytes", whole + b"trailing bytes"
    yield "trailing zeros", whole + bytes(1000)
    yield "two files", whole + whole
    for name, signature in {"CRLF as LF": SIGNATURE.replace(b"\r\n", b"\n"), "7 bit": b"\x09" + SIGNATURE[1:]}.items():
        yield f"signature: {name}", signature + whole[8:]
    for length in (2**31, 2**32 - 1, 2**31 - 1, len(data[1]) + 1, len(data[1]) - 1):
        yield (
            f"IDAT length {length}",
            whole.replace(struct.pack(">I", len(data[1])) + b"IDAT", struct.pack(">I", length) + b"IDAT"),
        )


def _palettes() -> Iterator[NamedFile]:
    """Palettes that do not fit."""
    for depth in DEPTHS[PALETTE]:
        pixels = samples(9, 10, 10, PALETTE, depth)
        for entries in (0, 1, 2, 3, 4, 5, 16, 17, 200, 255, 256, 257, 300):
            for transparent in (False, True):
                alpha: list[Chunk] = [(b"tRNS", b"\x40\x80")] if transparent else []
                chunks = image_chunks(pixels, PALETTE, depth, before=[palette(entries), *alpha])
                mode = " with tRNS" if transparent else ""
                yield f"palette{mode}: {entries} entries for depth {depth}", assemble(chunks)
        required, alpha = palette(2**depth), [(b"tRNS", b"\x40")]
        for name, before, after in (
            ("missing", [], []),
            ("after the data", [], [required]),
            ("twice", [required, required], []),
            ("two different", [required, palette(2**depth, 1)], []),
            ("tRNS first", [*alpha, required], []),
            ("of 4 bytes", [(b"PLTE", b"abcd")], []),
            ("of 2 bytes", [(b"PLTE", b"ab")], []),
            ("hIST before", [(b"hIST", bytes(2**depth * 2)), required], []),
        ):
            yield (
                f"palette {name}: depth {depth}",
                assemble(image_chunks(pixels, PALETTE, depth, before=before, after=after)),
            )
    for colour in (GREY, GREY_ALPHA):
        chunks = image_chunks(samples(9, 5, 5, colour, 8), colour, 8, before=[palette(4)])
        yield f"palette in an image without one: colour {colour}", assemble(chunks)


def _animations() -> Iterator[NamedFile]:
    """Animated PNG files."""
    pixels = samples(8, 6, 9, RGB, 8)
    first, data, end = image_chunks(pixels, RGB, 8)
    control = struct.pack(">IIIIIHHBB", 0, 9, 6, 0, 0, 1, 10, 0, 0)
    small = struct.pack(">IIIIIHHBB", 0, 4, 3, 2, 2, 1, 10, 0, 1)
    frame: Chunk = (b"fdAT", struct.pack(">I", 2) + data[1])
    for frames in (1, 2, 3):
        animation: Chunk = (b"acTL", struct.pack(">II", frames, 0))
        second: list[Chunk] = [(b"fcTL", b"\0\0\0\1" + control[4:]), frame]
        yield f"animation: {frames} frames", assemble([first, animation, (b"fcTL", control), data, *second, end])
        yield (
            f"animation: {frames} frames, default image",
            assemble([first, animation, data, (b"fcTL", control), frame, end]),
        )
        yield (
            f"animation: {frames} frames, first one smaller",
            assemble([first, animation, (b"fcTL", small), data, *second, end]),
        )


def _cut() -> Iterator[NamedFile]:
    """Files that end early."""
    for colour, depth, interlaced in ((GREY, 8, False), (RGB, 8, True), (PALETTE, 2, False)):
        pixels = samples(10, 16, 16, colour, depth)
        whole = assemble(
            image_chunks(
                pixels, colour, depth, interlaced=interlaced, before=required_chunks(colour, depth), filters=FILTERS
            )
        )
        for length in sorted({*range(1, 60), *range(60, len(whole), 7), *range(len(whole) - 20, len(whole))}):
            yield f"cut: colour {colour}, {length} of {len(whole)} bytes", whole[:length]
