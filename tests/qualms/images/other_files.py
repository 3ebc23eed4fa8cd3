"""WebP, GIF, BMP and TIFF files, and files of no accepted format: name and bytes of each."""

import io
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
from PIL import Image
from tests.qualms.images.exif import exif
from tests.qualms.images.jpeg_files import photo
from tests.qualms.images.png_files import NamedFile

SIZES = ((1, 1), (9, 7), (28, 28), (33, 50))
ORIENTATION = 274


def other_files() -> Iterator[NamedFile]:
    for part in (_webp(), _gif(), _bmp(), _tiff(), _damaged()):
        yield from part


def _saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def _images(seed: int, height: int, width: int) -> dict[str, Image.Image]:
    """A picture in several modes."""
    colour = Image.fromarray(photo(seed, height, width))
    alpha = Image.fromarray(photo(seed + 1, height, width, 1))
    with_alpha = colour.copy()
    with_alpha.putalpha(alpha)
    return {
        "RGB": colour,
        "RGBA": with_alpha,
        "L": alpha,
        "LA": Image.merge("LA", (alpha, alpha)),
        "P": colour.quantize(9),
    }


def _webp() -> Iterator[NamedFile]:
    for seed, size in enumerate(SIZES):
        images = _images(seed, *size)
        for mode in ("RGB", "RGBA"):
            for lossless in (False, True):
                for quality in (1, 50, 100):
                    data = _saved(images[mode], "WEBP", lossless=lossless, quality=quality)
                    yield f"webp: {mode}, {size}, lossless {lossless}, quality {quality}", data
        more = _images(seed + 10, *size)["RGBA"]
        yield f"webp animated: {size}", _saved(images["RGBA"], "WEBP", save_all=True, append_images=[more])
        yield f"webp with profile: {size}", _saved(images["RGB"], "WEBP", icc_profile=bytes(200))
    for value in range(10):
        yield f"webp orientation: {value}", _saved(_images(0, 9, 14)["RGB"], "WEBP", exif=b"Exif\0\0" + exif(value))


def _gif() -> Iterator[NamedFile]:
    for seed, size in enumerate(SIZES):
        images = _images(seed, *size)
        for mode in ("L", "P", "RGB", "RGBA"):
            for interlace in (0, 1):
                yield f"gif: {mode}, {size}, interlace {interlace}", _saved(images[mode], "GIF", interlace=interlace)
        yield f"gif transparent: {size}", _saved(images["P"], "GIF", transparency=3)
        frames = [_images(seed + index, *size)["P"] for index in (20, 30)]
        for disposal in (0, 1, 2, 3):
            data = _saved(images["P"], "GIF", save_all=True, append_images=frames, disposal=disposal, duration=50)
            yield f"gif animated, local palettes: {size}, disposal {disposal}", data


def _bmp() -> Iterator[NamedFile]:
    for seed, size in enumerate(SIZES):
        images = _images(seed, *size)
        for mode in ("1", "L", "P", "RGB", "RGBA"):
            image = images["L"].convert("1") if mode == "1" else images[mode]
            yield f"bmp: {mode}, {size}", _saved(image, "BMP")
        yield f"bmp upside down: {size}", _bmp_file(*size, bits=24, flip=True, seed=seed)
        for bits in (1, 4, 8, 16, 24, 32):
            yield f"bmp: {bits} bits, {size}", _bmp_file(*size, bits=bits, seed=seed)
            yield f"bmp OS/2: {bits} bits, {size}", _bmp_file(*size, bits=bits, seed=seed, os2=True)
        for compression, bits in ((1, 8), (2, 4)):
            yield (
                f"bmp run-length: {bits} bits, {size}",
                _bmp_file(*size, bits=bits, seed=seed, compression=compression),
            )
    for masks in ((0xF800, 0x7E0, 0x1F), (0x7C00, 0x3E0, 0x1F), (1, 2, 4)):
        yield f"bmp bit fields: {masks}", _bmp_file(9, 7, bits=16, seed=1, masks=masks)


def _bmp_file(
    height: int,
    width: int,
    *,
    bits: int,
    seed: int,
    os2: bool = False,
    flip: bool = False,
    compression: int = 0,
    masks: tuple[int, ...] = (),
) -> bytes:
    """A BMP file with random pixels."""
    rng = np.random.default_rng(seed)
    row = (width * bits + 31) // 32 * 4
    if compression:
        runs = [b"".join(bytes([1, value]) for value in rng.integers(0, 256, width)) + b"\0\0" for _ in range(height)]
        data = b"".join(runs) + b"\0\1"
    else:
        data = rng.integers(0, 256, row * height, dtype=np.uint8).tobytes()
    entries = 2**bits if bits <= 8 else 0
    palette = rng.integers(0, 256, entries * (3 if os2 else 4), dtype=np.uint8).tobytes()
    fields = struct.pack(f"<{len(masks)}I", *masks)
    if os2:
        head = struct.pack("<IHHHH", 12, width, height, 1, bits)
    else:
        top_down = -height if flip else height
        method = 3 if masks else compression
        head = struct.pack("<IiiHHIIiiII", 40, width, top_down, 1, bits, method, len(data), 2835, 2835, entries, 0)
    offset = 14 + len(head) + len(fields) + len(palette)
    return struct.pack("<2sIHHI", b"BM", offset + len(data), 0, 0, offset) + head + fields + palette + data


def _tiff() -> Iterator[NamedFile]:
    rng = np.random.default_rng(0)
    for seed, size in enumerate(SIZES):
        images = _images(seed, *size)
        images |= {
            "1": images["L"].convert("1"),
            "CMYK": images["RGB"].convert("CMYK"),
            "YCbCr": images["RGB"].convert("YCbCr"),
            "I;16": Image.fromarray(rng.integers(0, 2**16, size, dtype=np.uint16)),
            "I;16B": Image.frombytes("I;16B", size[::-1], rng.bytes(2 * size[0] * size[1])),
            "I": Image.fromarray(rng.integers(-5, 2**17, size, dtype=np.int32)),
            "F": Image.fromarray(rng.random(size, np.float32)),
            "F beyond 1": Image.fromarray(3 * rng.random(size, np.float32)),
        }
        for mode, image in images.items():
            for compression in (None, "tiff_lzw", "tiff_adobe_deflate", "packbits", "group4", "jpeg"):
                allowed = {"group4": ("1",), "jpeg": ("L", "RGB", "CMYK", "YCbCr")}.get(str(compression))
                if (allowed is None or mode in allowed) and not (mode == "I;16B" and compression):
                    yield f"tiff: {mode}, {size}, {compression}", _saved(image, "TIFF", compression=compression)
        yield f"tiff strips: {size}", _saved(images["RGB"], "TIFF", compression="tiff_lzw", strip_size=64)
        yield f"tiff BigTIFF: {size}", _saved(images["RGB"], "TIFF", big_tiff=True)
        for order in "<>":
            for depth in (8, 16):
                yield f"tiff tiles: {size}, {order}, {depth} bits", _tiled(size, order, depth, seed)
    for value in range(10):
        yield f"tiff orientation: {value}", _saved(_images(0, 9, 14)["RGB"], "TIFF", tiffinfo={ORIENTATION: value})


def _tiled(size: tuple[int, int], order: str, depth: int, seed: int) -> bytes:
    """An uncompressed grey TIFF file of tiles of 16 × 16 pixels, in either byte order."""
    height, width = size
    count = -(-width // 16) * -(-height // 16)
    length = 16 * 16 * depth // 8
    data = np.random.default_rng(seed).bytes(count * length)
    tags = {256: [width], 257: [height], 258: [depth], 259: [1], 262: [1], 277: [1], 322: [16], 323: [16]}
    start = 8 + len(data)
    tags |= {324: [8 + length * index for index in range(count)], 325: [length] * count}
    entries, extra, position = b"", b"", start + 2 + 12 * len(tags) + 4
    for tag, values in tags.items():
        packed = struct.pack(f"{order}{len(values)}I", *values)
        if len(values) > 1:
            packed, extra = struct.pack(order + "I", position + len(extra)), extra + packed
        entries += struct.pack(order + "HHI", tag, 4, len(values)) + packed
    head = (b"II" if order == "<" else b"MM") + struct.pack(order + "HI", 42, start)
    return head + data + struct.pack(order + "H", len(tags)) + entries + bytes(4) + extra


def _damaged() -> Iterator[NamedFile]:
    """Files that end early, and bytes that are no image of an accepted format."""
    for kind in ("WEBP", "GIF", "BMP", "TIFF"):
        data = _saved(_images(3, 20, 20)["RGB"], kind)
        for length in sorted({*range(1, 50), *range(50, len(data), len(data) // 40)}):
            yield f"{kind.lower()} cut: {length} of {len(data)} bytes", data[:length]
    picture = _images(4, 10, 10)
    for kind in ("PPM", "ICO", "TGA", "PCX", "SGI", "JPEG2000", "DDS", "ICNS"):
        yield f"other format: {kind}", _saved(picture["RGB"], kind)
    yield "no bytes", b""
    yield "text", b"not an image"
    yield "zeros", bytes(1000)
    yield "svg", b'<svg xmlns="http://www.w3.org/2000/svg" width="5" height="5"/>'
