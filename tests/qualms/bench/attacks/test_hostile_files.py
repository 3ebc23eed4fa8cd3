"""Hostile files are what they claim to be: format, size, structure, and the same bytes each time."""

import io
import json
import struct
import zlib
from base64 import b64decode

import numpy as np
import pytest
from PIL import Image

from qualms.bench.attacks.files.arithmetic_coding import endless_coefficients
from qualms.bench.attacks.files.definition import PIXELS, HostileFile
from qualms.bench.attacks.files.deflate import after_empty_blocks, endless_zeros, zeros
from qualms.bench.attacks.files.jpeg_parts import ARITHMETIC, Frame, jpeg, scan
from qualms.bench.attacks.files.registry import FILES
from qualms.bench.attacks.payloads import MAX_BODY
from qualms.bench.attacks.registry import find_attacks
from qualms.errors import ImageError
from qualms.images.input_spec import InputSpec
from qualms.images.pillow_decoder import FORMATS
from qualms.images.preprocess import preprocess

SMALL = 0.001
SIGNATURES = {
    "png": b"\x89PNG",
    "jpeg": b"\xff\xd8\xff",
    "webp": b"RIFF",
    "bmp": b"BM",
    "gif": b"GIF89a",
    "tiff": b"II",
}
SPEC = InputSpec(height=8, width=8)
DAMAGED = {"bmp-moves", "bmp-lines", "bmp-long-runs", "png-text-bomb", "png-profile-bomb"}
"""files whose cost arises before an error is found, also in their small versions"""

each_file = pytest.mark.parametrize("file", FILES.values(), ids=lambda file: file.name)


def test_every_accepted_format_has_hostile_files() -> None:
    assert {name.partition("-")[0].upper() for name in FILES} == set(FORMATS)
    assert len(FILES) >= 30


@each_file
def test_a_file_has_its_signature_and_fits_in_a_body(file: HostileFile) -> None:
    data = file.make()
    assert data.startswith(SIGNATURES[file.name.partition("-")[0]])
    assert len(data) <= MAX_BODY
    assert file.content_type in {"image/png", "image/jpeg", "image/webp", "image/bmp", "image/gif", "image/tiff"}


@each_file
def test_small_versions_are_the_same_each_time_and_decode_unless_they_are_damaged(file: HostileFile) -> None:
    data = file.make(SMALL)
    assert data == file.make(SMALL)
    try:
        pixels = preprocess(data, SPEC, max_pixels=PIXELS)
    except ImageError as error:
        assert file.name in DAMAGED, error
    else:
        assert pixels.shape == SPEC.shape


@pytest.mark.parametrize(
    "name",
    ["png-row", "png-16-bit", "jpeg-arithmetic", "jpeg-empty-scans", "jpeg-without-data", "webp-blank", "gif-blank"],
)
def test_files_of_few_bytes_have_as_many_pixels_as_are_accepted(name: str) -> None:
    data = FILES[name].make()
    image = Image.open(io.BytesIO(data))
    assert image.width * image.height == PIXELS
    assert len(data) < 150_000


def test_pixels_of_short_files_are_those_of_one_colour() -> None:
    for name in ("gif-blank", "webp-transforms", "png-interlaced", "tiff-column"):
        pixels = np.asarray(Image.open(io.BytesIO(FILES[name].make(SMALL))))
        assert pixels.min(axis=(0, 1)).tolist() == pixels.max(axis=(0, 1)).tolist(), name


def test_deflate_streams_expand_to_what_they_say() -> None:
    assert zlib.decompress(zeros(100_000)) == bytes(100_000)
    assert zlib.decompress(after_empty_blocks(b"pixel", 1000)) == b"pixel"
    assert len(after_empty_blocks(b"pixel", 1000)) > 5000
    expanded = zlib.decompressobj().decompress(endless_zeros(60_000), 40_000_000)
    assert len(expanded) == 40_000_000


def test_arithmetic_data_of_one_block_decode_as_equal_blocks_without_end() -> None:
    frame = Frame(ARITHMETIC, 64, 64)
    image = Image.open(io.BytesIO(jpeg(frame, scan(endless_coefficients(dc=True)), tables=b"")))
    pixels = np.asarray(image).astype(int)
    blocks = pixels.reshape(8, 8, 8, 8).swapaxes(1, 2).reshape(64, 64)
    assert (np.ptp(blocks, axis=1) > 0).all()  # no block is blank: its coefficients were decoded


def test_tiles_of_a_tiff_share_their_data() -> None:
    data = FILES["tiff-jpeg-tiles"].make()
    (directory,) = struct.unpack_from("<I", data, 4)
    assert len(data) < 600_000
    tags = {struct.unpack_from("<H", data, directory + 2 + 12 * index)[0]: index for index in range(11)}
    count, offset = struct.unpack_from("<II", data, directory + 2 + 12 * tags[324] + 4)
    assert count == 65_536
    assert set(struct.unpack_from(f"<{count}I", data, offset)) == {8}


def test_each_file_is_an_attack_by_eight_connections() -> None:
    for attack in find_attacks(list(FILES)):
        assert attack.connections == 8
        assert attack.description == FILES[attack.name].description
    request = next(iter(find_attacks(["webp-blank"]))).payload()
    assert request.endswith(b"\r\n\r\n" + FILES["webp-blank"].make())
    assert b"Content-Type: image/webp\r\n" in request


def test_forms_and_json_bodies_hold_64_files() -> None:
    form, body, small = (
        attack.payload().partition(b"\r\n\r\n")[2]
        for attack in find_attacks(["webp-blank-form", "webp-transforms-json", "small-hostile-files"])
    )
    assert form.count(FILES["webp-blank"].make()) == 64
    images = json.loads(body)["images"]
    assert [b64decode(image) for image in images] == [FILES["webp-transforms"].make()] * 64
    assert small.count(b"Content-Disposition") == min(64, len(FILES))
    assert len(small) <= MAX_BODY
