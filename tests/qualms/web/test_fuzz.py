"""Hostile requests (400, or FUZZ_CASES): the reply is never a 5xx, and every error is a problem.

Half of the cases are generated from the OpenAPI document (schemathesis), half are damaged or hostile image files and bodies.
Both are the same in every run.
"""

import base64
import gc
import io
import json
import os
import struct
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from PIL import Image
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import positive_data_acceptance

from qualms.web.problems import MEDIA_TYPE, ProblemReply
from qualms.web.reply import PredictReply

CASES = int(os.environ.get("FUZZ_CASES", "400"))
MAX_PIXELS = 2**18
GROWTH = 32 * 2**20
"""maximal growth of memory in bytes after a warm-up, for any number of cases: allocators keep some freed memory"""
MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "I", "F", "I;16")
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "ICO", "PPM", "TGA", "JPEG2000")

Random = np.random.Generator
Request = dict[str, Any]


@pytest.fixture
def client(start_service: Callable[..., httpx.Client]) -> httpx.Client:
    return start_service(max_pixels=MAX_PIXELS, max_body_bytes=2**20)


def check(response: httpx.Response) -> None:
    """A reply is a complete prediction or a problem with a status below 500; a short deadline may also be missed (504)."""
    expired = response.status_code == 504 and "x-request-timeout" in response.request.headers
    assert response.status_code < 500 or expired, response.text
    if response.status_code == 200:
        PredictReply.model_validate_json(response.content)
    else:
        assert response.headers["content-type"] == MEDIA_TYPE, response.text
        problem = ProblemReply.model_validate_json(response.content)
        assert problem.status == response.status_code
        assert problem.request_id == response.headers["x-request-id"]


# From the OpenAPI document


OPERATIONS = [("/predict", "POST", mode, 0.49) for mode in GenerationMode]
OPERATIONS += [
    (path, "GET", GenerationMode.POSITIVE, 0.02)
    for path in ("/models", "/models/{name}", "/metrics", "/livez", "/readyz")
]
"""path, method, valid or invalid data, share of the cases; only /predict has parameters that can be invalid"""


@pytest.mark.slow
@pytest.mark.parametrize(("path", "method", "mode", "share"), OPERATIONS)
def test_replies_to_generated_requests_agree_with_the_document(
    client: httpx.Client, path: str, method: str, mode: GenerationMode, share: float
) -> None:
    operation = schemathesis.openapi.from_dict(client.get("/openapi.json").json())[path][method]
    statuses: Counter[int] = Counter()

    @seed(1)
    @settings(
        max_examples=max(1, round(CASES / 2 * share)),
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(operation.as_strategy(generation_mode=mode))
    def send(case: Case[Any]) -> None:
        arguments = case.as_transport_kwargs(base_url="http://service")
        prepared: Any = requests.Request(**arguments).prepare()
        headers = {name: value.encode("latin-1") for name, value in prepared.headers.items()}
        response = client.request(prepared.method, prepared.url, headers=headers, content=prepared.body)
        statuses[response.status_code] += 1
        # A schema cannot require that a string is the base64 of an image; `check` handles 5xx.
        case.validate_response(response, excluded_checks=[positive_data_acceptance, not_a_server_error])
        if path == "/predict":
            check(response)
        else:
            assert response.status_code < 500

    send()
    print(f"{mode} {method} {path}: {statuses.total()} cases, {dict(statuses)}")
    if mode is GenerationMode.POSITIVE and path != "/models/{name}":  # the document does not list the models
        assert statuses[200], statuses


# Hostile files and bodies


def image_file(rng: Random, kind: str | None = None) -> bytes:
    """A valid image file of random size, mode and format."""
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


def bomb(rng: Random) -> Request:
    """A small file with a header of up to 2⁶⁴ pixels."""
    width, height = (int(side) for side in rng.choice([1, 513, 60_000, 2**31 - 1, 2**32 - 1], 2))
    data = chunk(b"IDAT", zlib.compress(bytes(rng.integers(0, 100_000))))
    return raw(png(width, height, int(rng.choice([1, 8, 16])), int(rng.choice([0, 2, 3, 4, 6])), data))


def metadata_bomb(rng: Random) -> Request:
    """A small image with compressed metadata of several megabytes."""
    text = zlib.compress(bytes(2 * 2**20))
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
    return {"files": [("images", (f"{index}.png", data)) for index, data in enumerate(files)]}


def broken_form(rng: Random) -> Request:
    body = (
        b'--edge\r\nContent-Disposition: form-data; name="i"; filename="a"\r\n\r\n'
        + image_file(rng)
        + b"\r\n--edge--\r\n"
    )
    data = np.frombuffer(body, np.uint8).copy()
    positions = rng.integers(0, 100, rng.integers(0, 4))
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
    names = ("score", "target_fpr", "guarantee", "target_risk", "explain", "x", "")
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


def resident() -> int:
    """Resident memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_hostile_requests_cause_no_server_error_and_no_memory_growth(client: httpx.Client) -> None:
    cases = CASES // 2
    statuses: Counter[int] = Counter()
    warm = 0
    for number in range(cases):
        if number == cases // 4:
            gc.collect()
            warm = resident()
        maker = MAKERS[number % len(MAKERS)]
        response = client.post("/predict", **maker(np.random.default_rng(number)))
        try:
            check(response)
        except AssertionError as error:
            error.add_note(f"{maker.__name__}, number {number}")
            raise
        statuses[response.status_code] += 1
    gc.collect()
    growth = resident() - warm
    print(f"{cases} cases: {dict(statuses)}; memory grew by {growth / 2**20:.1f} MiB")
    assert set(statuses) >= {200, 400, 413, 415, 422}
    assert growth < GROWTH
    assert client.get("/readyz").status_code == 200
