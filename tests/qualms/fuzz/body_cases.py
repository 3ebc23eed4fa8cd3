"""Hostile bodies, queries and headers for `POST /predict`, and the same as raw HTTP for the fuzz campaign.

Every case follows from its number alone (and the campaign's seed).
"""

import base64
import io
import json
import random
import struct
import zlib
from collections.abc import Callable
from functools import cache
from typing import Any

import httpx
import numpy as np
from PIL import Image
from tests.qualms.fuzz.case import Case
from tests.qualms.fuzz.http_cases import chunked, random_cuts, random_pause

MAX_PIXELS = 2**18
MAX_BODY_BYTES = 2**20
"""settings of the service that the bodies are made for: some exceed them"""
MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "I", "F", "I;16")
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "ICO", "PPM", "TGA", "JPEG2000")

Random = np.random.Generator
Request = dict[str, Any]
"""arguments of httpx.Request"""


def body_case(seed: int, number: int) -> Case:
    """The case of a number as raw HTTP: the body with its length or in chunks, at once or in pieces."""
    maker = MAKERS[number % len(MAKERS)]
    request = httpx.Request("POST", "http://host/predict", **maker(np.random.default_rng((seed, number))))
    body = request.read()
    rng = random.Random(f"{seed}/{number}")
    in_chunks = rng.random() < 0.25
    lines = [b"POST %b HTTP/1.1" % request.url.raw_path]
    lines += [
        b"%b: %b" % field for field in request.headers.raw if not in_chunks or field[0].lower() != b"content-length"
    ]
    if in_chunks:
        lines.append(b"Transfer-Encoding: chunked")
        body = chunked(rng, body)
    data = b"\r\n".join([*lines, b"", body])
    return Case(number, maker.__name__, data, random_cuts(rng, data), random_pause(rng))


def image_file(rng: Random, kind: str | None = None) -> bytes:
    """A valid image file of random size, mode and format: one of some thousands, because to draw one takes most of the time."""
    return _draw(int(rng.integers(4096)), kind)


@cache
def _draw(number: int, kind: str | None) -> bytes:
    rng = np.random.default_rng(number)
    height, width = rng.integers(1, 60, 2)
    pixels = rng.integers(0, 256, (height, width, 3), np.uint8)
    image = Image.fromarray(pixels)
    with io.BytesIO() as stream:
        mode, kind = rng.choice(MODES), kind or str(rng.choice(FORMATS))
        try:
            image.convert("L").convert(mode).save(stream, kind)
        except (OSError, ValueError):  # some formats do not support some modes
            image.save(stream, kind)
        return stream.getvalue()


def raw(data: bytes, kind: str = "image/png") -> Request:
    return {"content": data, "headers": {"content-type": kind}}


def valid(rng: Random) -> Request:
    return raw(image_file(rng))


def truncated(rng: Random) -> Request:
    data = image_file(rng)
    return raw(data[: rng.integers(0, len(data))])


def mutated(rng: Random) -> Request:
    data = np.frombuffer(image_file(rng), np.uint8).copy()
    positions = rng.integers(0, len(data), rng.integers(1, 8))
    data[positions] = rng.integers(0, 256, len(positions), np.uint8)
    return raw(data.tobytes())


def mutated_header(rng: Random) -> Request:
    data = np.frombuffer(image_file(rng), np.uint8).copy()
    positions = rng.integers(0, min(64, len(data)), rng.integers(1, 5))
    data[positions] = rng.choice(np.array([0, 1, 127, 128, 255], np.uint8), len(positions))
    return raw(data.tobytes())


def spliced(rng: Random) -> Request:
    first, second = image_file(rng), image_file(rng)
    return raw(first[: rng.integers(0, len(first))] + second[rng.integers(0, len(second)) :])


def random_bytes(rng: Random) -> Request:
    return raw(rng.bytes(int(rng.integers(0, 4000))))


def random_bytes_after_a_signature(rng: Random) -> Request:
    signatures = (
        b"\x89PNG\r\n\x1a\n",
        b"\xff\xd8\xff\xe0",
        b"BM",
        b"GIF89a",
        b"II*\0",
        b"MM\0*",
        b"RIFF\0\0\0\0WEBPVP8 ",
    )
    return raw(signatures[rng.integers(len(signatures))] + rng.bytes(int(rng.integers(0, 500))))


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, depth: int, colour: int, *chunks: bytes) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + b"".join(chunks) + chunk(b"IEND", b"")


@cache
def compressed_zeros(size: int) -> bytes:
    return zlib.compress(bytes(size))


def bomb(rng: Random) -> Request:
    """A small file with a header of up to 2⁶⁴ pixels."""
    width, height = (int(side) for side in rng.choice([1, 513, 60_000, 2**31 - 1, 2**32 - 1], 2))
    data = chunk(b"IDAT", zlib.compress(bytes(rng.integers(0, 100_000))))
    return raw(png(width, height, int(rng.choice([1, 8, 16])), int(rng.choice([0, 2, 3, 4, 6])), data))


def metadata_bomb(rng: Random) -> Request:
    """A small image with compressed metadata of several megabytes."""
    text = compressed_zeros(2 * 2**20)
    kind, head = [(b"zTXt", b"k\0\0"), (b"iCCP", b"k\0\0"), (b"iTXt", b"k\0\1\0\0\0")][rng.integers(3)]
    pixels = chunk(b"IDAT", zlib.compress(bytes(4)))
    return raw(png(3, 1, 8, 0, *([chunk(kind, head + text)] * int(rng.integers(1, 5))), pixels))


def zero_size(rng: Random) -> Request:
    width, height = (int(side) for side in rng.choice([0, 1], 2))
    kind = rng.integers(3)
    if kind == 0:
        return raw(png(width, height, 8, 0, chunk(b"IDAT", zlib.compress(bytes(2)))))
    if kind == 1:
        return raw(
            b"BM" + struct.pack("<IIIIiiHHIIiiII", 58, 0, 54, 40, width, -height, 1, 24, 0, 4, 0, 0, 0, 0) + bytes(4)
        )
    return raw(b"GIF89a" + struct.pack("<HHBBB", width, height, 0, 0, 0) + b";")


def animated(rng: Random) -> Request:
    frames = [Image.fromarray(rng.integers(0, 256, (9, 9, 3), np.uint8)) for _ in range(rng.integers(2, 9))]
    with io.BytesIO() as stream:
        kind = str(rng.choice(["GIF", "WEBP", "PNG", "TIFF"]))
        frames[0].save(stream, kind, save_all=True, append_images=frames[1:])
        data = stream.getvalue()
    return raw(data if rng.integers(2) else data[: rng.integers(1, len(data))])


def wrong_type(rng: Random) -> Request:
    kinds = (
        "text/html",
        "image/svg+xml",
        "application/pdf",
        "",
        "image/",
        "multipart/form-data",
        "APPLICATION/JSON",
        "é",
    )
    return {"content": image_file(rng), "headers": {"content-type": kinds[rng.integers(len(kinds))].encode("latin-1")}}


def other_file(rng: Random) -> Request:
    files = (b"%PDF-1.7\n", b"<svg xmlns='http://www.w3.org/2000/svg'/>", b"PK\3\4", b"\0\0\0\x1cftypavif", b"8BPS\0\1")
    return raw(files[rng.integers(len(files))] + rng.bytes(int(rng.integers(0, 200))))


def form(rng: Random) -> Request:
    files = [image_file(rng) if rng.integers(3) else rng.bytes(50) for _ in range(rng.integers(1, 5))]
    return {
        "files": [("images", (f"{index}.png", data)) for index, data in enumerate(files)],
        "headers": {"content-type": "multipart/form-data; boundary=edge"},
    }


def broken_form(rng: Random) -> Request:
    body = (
        b'--edge\r\nContent-Disposition: form-data; name="i"; filename="a"\r\n\r\n'
        + image_file(rng)
        + b"\r\n--edge--\r\n"
    )
    data = np.frombuffer(body, np.uint8).copy()
    positions = rng.integers(0, min(100, len(data)), rng.integers(0, 4))
    data[positions] = rng.integers(0, 256, len(positions), np.uint8)
    return raw(data[: rng.integers(1, len(data) + 1)].tobytes(), "multipart/form-data; boundary=edge")


def deep_json(rng: Random) -> Request:
    depth = int(rng.integers(1, 100_000))
    opening = str(rng.choice(["[", '{"a":', '{"images":[', "[[[["]))
    return raw((opening * depth)[: 2**20].encode(), "application/json")


def broken_json(rng: Random) -> Request:
    body = json.dumps({"images": [base64.b64encode(image_file(rng)).decode(), [[0, 255], [1, 2]]]}).encode()
    data = np.frombuffer(body, np.uint8).copy()
    positions = rng.integers(0, len(data), rng.integers(1, 6))
    data[positions] = rng.integers(32, 127, len(positions), np.uint8)
    return raw(data.tobytes(), "application/json")


def unusual_json(rng: Random) -> Request:
    values: tuple[Any, ...] = (
        None, True, 3, 1e400, -1, 256, "", "AAAA", "data:,", [], [[]], [[[]]], {}, [[1, [2]]], [[[1, 2]]], [["1"]], [[1.5]],
        [[[0] * 5] * 9] * 9, [[10**30]], "é\ud800", [[0] * 2000] * 200,
    )  # fmt: skip
    images = [values[rng.integers(len(values))] for _ in range(rng.integers(0, 4))]
    return raw(json.dumps({"images": images}).encode(), "application/json")


def unusual_query(rng: Random) -> Request:
    names = ("score", "target_fpr", "guarantee", "target_risk", "explain", "alpha", "x", "")
    values = (
        "entropy",
        "0.1",
        "1e-300",
        "nan",
        "-0",
        "0.5",
        "marginal",
        "true",
        "",
        "é",
        "9" * 400,
        "%00",
        "1e5",
        "0x1",
        "²",
    )
    pairs = [
        f"{names[rng.integers(len(names))]}={values[rng.integers(len(values))]}" for _ in range(rng.integers(1, 4))
    ]
    return {**valid(rng), "params": "&".join(pairs)}


def unusual_headers(rng: Random) -> Request:
    values = (b"", b"0", b"-1", b"nan", b"1e-9", b"1e400", b"9" * 5000, b"\xff", b"1_0", b" 5 ", b"0x1")
    names = ("x-request-timeout", "x-request-id", "content-encoding", "range", "expect", "accept")
    request = valid(rng)
    request["headers"] = {**request["headers"], names[rng.integers(6)]: values[rng.integers(len(values))]}
    return request


MAKERS: tuple[Callable[[Random], Request], ...] = (
    valid, truncated, mutated, mutated_header, spliced, random_bytes, random_bytes_after_a_signature, bomb, metadata_bomb,
    zero_size, animated, wrong_type, other_file, form, broken_form, deep_json, broken_json, unusual_json,
    unusual_query, unusual_headers,
)  # fmt: skip
