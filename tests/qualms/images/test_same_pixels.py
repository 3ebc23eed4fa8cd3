"""`preprocess` gives exactly the pixels of Pillow, or refuses what Pillow refuses, for thousands of files."""

import io
import os
import time
from itertools import islice
from pathlib import Path
from random import Random

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from tests.qualms.images.image_files import image_files, mutations
from tests.qualms.images.jpeg_encoder import encode, join
from tests.qualms.images.jpeg_files import photo
from tests.qualms.images.png_encoder import GREY, RGB, assemble, image_chunks, samples
from tests.qualms.images.png_files import NamedFile

from qualms.errors import ImageError
from qualms.images.input_spec import InputSpec
from qualms.images.pillow_decoder import decode
from qualms.images.plain_files import read_plain
from qualms.images.preprocess import conform, preprocess, preprocess_with_pillow
from qualms.images.worker_pool import WorkerPool

SPECS = {
    "28×28 grey": InputSpec(height=28, width=28, colour="L"),
    "32×32 colour": InputSpec(height=32, width=32),
    "224 crop of 256": InputSpec(height=224, width=224, fit="crop", shorter_side=256),
    "64×48 bicubic": InputSpec(height=48, width=64, resize="bicubic"),
}
MUTATED_FILES = 300
MUTATIONS = 5

Outcome = NDArray[np.uint8] | str
"""the pixels, or the reason of a refusal"""


@pytest.fixture(scope="module")
def files() -> list[NamedFile]:
    return list(image_files())


def reference(data: bytes) -> Image.Image | ImageError:
    """The image as Pillow decodes it, or the error."""
    try:
        return decode(data)
    except ImageError as error:
        return error


def outcome_of_reference(decoded: Image.Image | ImageError, spec: InputSpec) -> Outcome:
    if isinstance(decoded, ImageError):
        return decoded.reason
    try:
        return conform(decoded, spec)
    except ImageError as error:
        return error.reason


def outcome(data: bytes, spec: InputSpec) -> Outcome:
    try:
        return preprocess(data, spec)
    except ImageError as error:
        return error.reason


def difference(actual: Outcome, expected: Outcome) -> str | None:
    """What differs, or None."""
    if isinstance(actual, str) or isinstance(expected, str):
        names = [one if isinstance(one, str) else "accepted" for one in (actual, expected)]
        return None if names[0] == names[1] else f"{names[0]}, by Pillow {names[1]}"
    if actual.shape != expected.shape:
        return f"shape {actual.shape}, by Pillow {expected.shape}"
    count = int((actual != expected).sum())
    return f"{count:,} of {actual.size:,} values differ" if count else None


def differences(name: str, data: bytes, specs: dict[str, InputSpec]) -> list[str]:
    decoded = reference(data)
    found = [
        f"{name}, {size}: {one}"
        for size, spec in specs.items()
        if (one := difference(outcome(data, spec), outcome_of_reference(decoded, spec)))
    ]
    return [one for one in found if not is_known(one)]


def is_known(difference: str) -> bool:
    """Whether it is the known one: only Pillow verifies the checksum inside the compressed pixels of a PNG."""
    return difference.startswith(("png data: wrong checksum", "png data: damaged")) and difference.endswith(
        "accepted, by Pillow malformed"
    )


def test_every_file_has_the_pixels_of_pillow(files: list[NamedFile]) -> None:
    """Each file with the two small inputs, one in 40 with each of the others."""
    small, large = dict(list(SPECS.items())[:2]), list(SPECS.items())[2:]
    found = []
    for number, (name, data) in enumerate(files):
        specs = {**small, **dict(large[number // 20 % 2 : number // 20 % 2 + 1])} if number % 20 == 0 else small
        found += differences(name, data, specs)
    assert found == []


@pytest.mark.slow
def test_every_file_has_the_pixels_of_pillow_for_every_input(files: list[NamedFile]) -> None:
    assert [one for name, data in files for one in differences(name, data, SPECS)] == []


def test_mutated_files_have_the_pixels_of_pillow(files: list[NamedFile]) -> None:
    rng = Random(1)
    others = [data for _, data in rng.sample(files, 50)]
    small = dict(list(SPECS.items())[:2])
    found = []
    for name, data in rng.sample(files, MUTATED_FILES):
        for number, mutation in enumerate(islice(mutations(data, rng, others), MUTATIONS)):
            found += differences(f"{name}, mutation {number}", mutation, small)
    assert found == []


def test_most_files_are_plain_and_many_are_not(files: list[NamedFile]) -> None:
    plain = sum(read_plain(data) is not None for _, data in files)
    assert 8_000 < plain < len(files) - 6_000


def test_scaled_jpeg_files_have_the_pixels_of_pillow(files: list[NamedFile]) -> None:
    spec = InputSpec(height=9, width=7, scaled_jpeg=True)
    scaled = 0
    for name, data in files:
        plain = read_plain(data)
        if (
            plain is not None
            and plain.kind == "jpeg"
            and min(plain.width, plain.height) >= 2 * (spec.min_jpeg_side or 0)
        ):
            scaled += 1
            assert np.array_equal(preprocess(data, spec), preprocess_with_pillow(data, spec)), name
    assert scaled > 30


def test_files_are_many_different_and_of_both_kinds(files: list[NamedFile]) -> None:
    assert len(files) > 10_000
    assert len({name for name, _ in files}) == len(files)
    refused = sum(isinstance(reference(data), ImageError) for _, data in files)
    assert 3_000 < refused < len(files) - 8_000


def test_a_difference_of_one_value_is_found() -> None:
    pixels = np.zeros((2, 2, 3), np.uint8)
    other = pixels.copy()
    other[1, 0, 2] = 1
    assert difference(pixels, pixels) is None
    assert difference(other, pixels) == "1 of 12 values differ"
    assert difference(pixels, "malformed") == "accepted, by Pillow malformed"
    assert difference("too_large", "malformed") == "too_large, by Pillow malformed"
    assert difference("malformed", "malformed") is None


@pytest.mark.parametrize("interlaced", [False, True])
@pytest.mark.parametrize("kind", [0, 1, 2, 3, 4])
def test_drawn_png_files_have_the_drawn_pixels(kind: int, interlaced: bool) -> None:
    pixels = samples(3, 11, 13, RGB, 8)
    data = assemble(image_chunks(pixels, RGB, 8, filters=[kind], interlaced=interlaced))
    assert np.array_equal(np.asarray(decode(data)), pixels)


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_drawn_png_files_of_few_bits_have_the_drawn_pixels(depth: int) -> None:
    pixels = samples(3, 11, 13, GREY, depth)
    decoded = np.asarray(decode(assemble(image_chunks(pixels, GREY, depth))).convert("L"))
    assert np.array_equal(decoded, pixels[..., 0] * (255 // (2**depth - 1)))


@pytest.mark.parametrize("restart", [0, 1, 5])
@pytest.mark.parametrize("scans", [None, [[0], [1], [2]]])
def test_drawn_jpeg_files_have_nearly_the_drawn_pixels(restart: int, scans: list[list[int]] | None) -> None:
    planes = list(np.moveaxis(photo(3, 27, 30), -1, 0))
    parts = encode(planes, [(1, 1)] * 3, ids=tuple(b"RGB"), before=(), step=0, restart=restart, scans=scans)
    decoded = np.asarray(decode(join(parts)), np.int64)
    assert np.abs(decoded - np.stack(planes, axis=-1)).max() <= 1


@pytest.mark.slow
def test_ten_thousand_real_images_have_the_same_pixels_by_every_decoder() -> None:
    """CIFAR-10 images as PNG and JPEG: by the fast decoders, by Pillow, and by Pillow in worker processes."""
    path = Path(os.environ.get("QUALMS_DATA") or "nowhere") / "cifar10-test.npz"
    if not path.is_file():
        pytest.skip("needs QUALMS_DATA with cifar10-test.npz")
    with np.load(path) as data:
        images = data["images"]
    assert len(images) == 10_000
    spec, pool = InputSpec(height=32, width=32), WorkerPool(2)
    options = {"max_pixels": 2**24, "max_side": 2**14, "max_memory": 2**26}
    try:
        for number, pixels in enumerate(images):
            file = io.BytesIO()
            Image.fromarray(pixels).save(file, "PNG" if number % 2 else "JPEG", quality=75 + number % 21)
            encoded = file.getvalue()
            assert read_plain(encoded) is not None
            expected = preprocess(encoded, spec)
            assert np.array_equal(preprocess_with_pillow(encoded, spec), expected)
            in_worker = pool.preprocess(encoded, spec, deadline=time.monotonic() + 60, **options)
            assert np.array_equal(in_worker, expected)
            if number % 2:
                assert np.array_equal(expected, pixels)
    finally:
        pool.close()
