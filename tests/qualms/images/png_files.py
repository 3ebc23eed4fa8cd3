"""PNG files of every colour type, depth, filter and transparency, with metadata: name and bytes of each."""

import struct
import zlib
from collections.abc import Iterator

import numpy as np
from tests.qualms.images.exif import exif, xmp
from tests.qualms.images.png_encoder import (
    DEPTHS,
    GREY,
    GREY_ALPHA,
    PALETTE,
    RGB,
    RGB_ALPHA,
    Chunk,
    assemble,
    image_chunks,
    palette,
    samples,
)

NamedFile = tuple[str, bytes]
SIZES = ((1, 1), (1, 9), (9, 1), (2, 3), (5, 4), (8, 8), (17, 13), (28, 28), (40, 61))
ALL_FILTERS = (0, 1, 2, 3, 4)
_KINDS = [(colour, depth) for colour, depths in DEPTHS.items() for depth in depths]


def png_files() -> Iterator[NamedFile]:
    for name, data in (*_plain(), *_transparent(), *_with_metadata()):
        yield f"png {name}", data


def required_chunks(colour: int, depth: int) -> list[Chunk]:
    """The palette, if the colour type needs one."""
    return [palette(2**depth, seed=depth)] if colour == PALETTE else []


def _plain() -> Iterator[NamedFile]:
    """Every colour type, depth, filter and interlacing, in several sizes."""
    for colour, depth in _KINDS:
        for filters in ((0,), (1,), (2,), (3,), (4,), ALL_FILTERS, (4, 3, 2, 1)):
            for interlaced in (False, True):
                for seed, (height, width) in enumerate(SIZES):
                    pixels = samples(seed, height, width, colour, depth)
                    before = required_chunks(colour, depth)
                    chunks = image_chunks(pixels, colour, depth, filters=filters, interlaced=interlaced, before=before)
                    text = "".join(map(str, filters))
                    mode = "interlaced" if interlaced else "plain"
                    yield f"{mode}: colour {colour}, depth {depth}, filter {text}, {width}×{height}", assemble(chunks)


def _transparent() -> Iterator[NamedFile]:
    """Colour keys, and palettes with complete, short, partial and too long transparency."""
    for depth in DEPTHS[GREY]:
        pixels = samples(1, 12, 15, GREY, depth)
        for value in {0, int(pixels[3, 4, 0]), 2**depth - 1, min(2**depth, 65535), 65535}:
            chunks = image_chunks(pixels, GREY, depth, before=[(b"tRNS", struct.pack(">H", value))])
            yield f"colour key: grey, depth {depth}, {value}", assemble(chunks)
    for depth in DEPTHS[RGB]:
        pixels = samples(2, 12, 15, RGB, depth)
        pixels[2:5] = pixels[3, 4]
        for name, key in (("used", pixels[3, 4]), ("unused", (1, 2, 3)), ("beyond the depth", (256, 300, 65535))):
            chunks = image_chunks(pixels, RGB, depth, before=[(b"tRNS", struct.pack(">HHH", *key))])
            yield f"colour key: RGB, depth {depth}, {name}", assemble(chunks)
    for depth in DEPTHS[PALETTE]:
        pixels = samples(3, 12, 15, PALETTE, depth)
        entries = 2**depth
        alphas = {
            "opaque": bytes([255]) * entries,
            "one transparent": b"\0",
            "last transparent": bytes([255]) * (entries - 1) + b"\0",
            "partial": bytes(np.linspace(0, 255, entries).astype(np.uint8)),
            "short": bytes([10, 200])[:entries],
            "empty": b"",
            "too long": bytes(range(2, 5)) * (entries + 1),
        }
        for name, alpha in alphas.items():
            for interlaced in (False, True):
                before = [*required_chunks(PALETTE, depth), (b"tRNS", alpha)]
                chunks = image_chunks(pixels, PALETTE, depth, interlaced=interlaced, before=before)
                mode = ", interlaced" if interlaced else ""
                yield f"palette with tRNS: depth {depth}, {name}{mode}", assemble(chunks)
    for colour, depth in _KINDS:
        for length in (1, 2, 3, 5, 6, 7, 300):
            if colour != PALETTE:
                chunks = image_chunks(samples(4, 5, 6, colour, depth), colour, depth, before=[(b"tRNS", bytes(length))])
                yield f"tRNS of {length} bytes: colour {colour}, depth {depth}", assemble(chunks)


def _ancillary(colour: int) -> list[tuple[str, Chunk]]:
    significant = {GREY: 1, RGB: 3, PALETTE: 3, GREY_ALPHA: 2, RGB_ALPHA: 4}[colour]
    background = {1: struct.pack(">H", 1), 3: struct.pack(">HHH", 1, 2, 3)}[3 if colour in (RGB, RGB_ALPHA) else 1]
    return [
        ("gAMA", (b"gAMA", struct.pack(">I", 45455))),
        ("gAMA of 1", (b"gAMA", struct.pack(">I", 100000))),
        ("gAMA of 0", (b"gAMA", bytes(4))),
        ("short gAMA", (b"gAMA", b"\0")),
        ("cHRM", (b"cHRM", struct.pack(">8I", *range(31270, 31278)))),
        ("short cHRM", (b"cHRM", bytes(31))),
        ("sRGB", (b"sRGB", b"\0")),
        ("sRGB of 9", (b"sRGB", b"\x09")),
        ("empty sRGB", (b"sRGB", b"")),
        ("iCCP", (b"iCCP", b"profile\0\0" + zlib.compress(bytes(500)))),
        ("damaged iCCP", (b"iCCP", b"profile\0\0" + b"damaged")),
        ("iCCP with an unknown method", (b"iCCP", b"profile\0\1" + zlib.compress(bytes(50)))),
        ("empty iCCP", (b"iCCP", b"")),
        ("tEXt", (b"tEXt", b"Title\0a picture")),
        ("tEXt without separator", (b"tEXt", b"Title")),
        ("empty tEXt", (b"tEXt", b"")),
        ("zTXt", (b"zTXt", b"Title\0\0" + zlib.compress(b"a picture"))),
        ("damaged zTXt", (b"zTXt", b"Title\0\0damaged")),
        ("zTXt with an unknown method", (b"zTXt", b"Title\0\7" + zlib.compress(b"a"))),
        ("empty zTXt", (b"zTXt", b"")),
        ("iTXt", (b"iTXt", "Title\0\0\0en\0Titel\0ein Bild é".encode())),
        ("compressed iTXt", (b"iTXt", b"Title\0\1\0en\0Titel\0" + zlib.compress(b"a picture"))),
        ("damaged iTXt", (b"iTXt", b"Title\0\1\0en\0Titel\0damaged")),
        ("short iTXt", (b"iTXt", b"Title\0")),
        ("pHYs", (b"pHYs", struct.pack(">IIB", 2835, 2835, 1))),
        ("pHYs of 0", (b"pHYs", bytes(9))),
        ("short pHYs", (b"pHYs", bytes(3))),
        ("tIME", (b"tIME", struct.pack(">HBBBBB", 2026, 1, 2, 3, 4, 5))),
        ("invalid tIME", (b"tIME", bytes([255] * 7))),
        ("sBIT", (b"sBIT", bytes([5] * significant))),
        ("sBIT of 0", (b"sBIT", bytes(significant))),
        ("short sBIT", (b"sBIT", b"")),
        ("bKGD", (b"bKGD", b"\0" if colour == PALETTE else background)),
        ("long bKGD", (b"bKGD", bytes(20))),
        ("hIST", (b"hIST", bytes(2 * 256))),
        ("sPLT", (b"sPLT", b"name\0\x08" + bytes(range(6)))),
        ("oFFs", (b"oFFs", struct.pack(">iiB", 5, -5, 0))),
        ("unknown ancillary chunk", (b"abCd", b"content")),
        ("unknown private chunk", (b"quLm", b"")),
        ("unknown critical chunk", (b"ABCD", b"content")),
        ("chunk of invalid name", (b"a1\0\xff", b"content")),
        ("CgBI", (b"CgBI", bytes(4))),
        ("acTL", (b"acTL", struct.pack(">II", 2, 0))),
        ("acTL of 0 frames", (b"acTL", struct.pack(">II", 0, 0))),
        ("eXIf", (b"eXIf", exif(1))),
        ("damaged eXIf", (b"eXIf", b"II*\0damaged")),
        ("empty eXIf", (b"eXIf", b"")),
    ]


def _with_metadata() -> Iterator[NamedFile]:
    """Ancillary chunks before and after the data, and orientations in all places where Pillow reads them."""
    for colour, depth in ((GREY, 8), (RGB, 8), (PALETTE, 4), (GREY_ALPHA, 8), (RGB_ALPHA, 16)):
        pixels, required = samples(5, 9, 12, colour, depth), required_chunks(colour, depth)
        for name, chunk in _ancillary(colour):
            for place, before, after in (("before", [chunk], []), ("after", [], [chunk])):
                chunks = image_chunks(pixels, colour, depth, before=[*required, *before], after=after)
                yield f"chunk {place} the data: {name}, colour {colour}", assemble(chunks)
                wrong = assemble(chunks, wrong_crc=[chunk[0]])
                yield f"wrong CRC of a chunk {place} the data: {name}, colour {colour}", wrong
            chunks = image_chunks(pixels, colour, depth, before=[*required, chunk, chunk])
            yield f"chunk twice: {name}, colour {colour}", assemble(chunks)
    pixels = samples(6, 7, 10, RGB, 8)
    for value in (*range(10), 65535):
        raw = b"\nexif\n%8d\n" % len(exif(value)) + (b"Exif\0\0" + exif(value)).hex().encode()
        places: dict[str, Chunk] = {
            "eXIf": (b"eXIf", exif(value)),
            "big-endian eXIf": (b"eXIf", exif(value, order=">")),
            "eXIf as LONG": (b"eXIf", exif(value, kind=4)),
            "eXIf with Exif prefix": (b"eXIf", b"Exif\0\0" + exif(value)),
            "XMP": (b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + xmp(value)),
            "raw profile as tEXt": (b"tEXt", b"Raw profile type exif\0" + raw),
            "raw profile as zTXt": (b"zTXt", b"Raw profile type exif\0\0" + zlib.compress(raw)),
        }
        for name, chunk in places.items():
            yield f"orientation by {name}: {value}", assemble(image_chunks(pixels, RGB, 8, before=[chunk]))
            yield (
                f"orientation by {name} after the data: {value}",
                assemble(image_chunks(pixels, RGB, 8, after=[chunk])),
            )
