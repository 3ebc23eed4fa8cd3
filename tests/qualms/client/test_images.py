import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from qualms.client.images import Chunk, chunks, encode, is_one_image
from qualms.errors import ImageError
from qualms.images.input_spec import InputSpec
from qualms.images.preprocess import conform, preprocess, preprocess_array
from qualms.replies import RequestLimits

LIMITS = RequestLimits()
RNG = np.random.default_rng(3)


def pixels(*shape: int) -> NDArray[np.uint8]:
    return RNG.integers(0, 256, shape, np.uint8)


@pytest.mark.parametrize("shape", [(5, 7), (5, 7, 1), (5, 7, 3), (5, 7, 4)])
@pytest.mark.parametrize("colour", ["L", "RGB"])
def test_an_array_reaches_the_model_with_the_same_pixels_as_without_a_server(
    shape: tuple[int, ...], colour: Any
) -> None:
    spec = InputSpec(height=5, width=7, colour=colour)
    array = pixels(*shape)
    assert (preprocess(encode(array, 0, LIMITS), spec) == preprocess_array(array, spec)).all()


def test_an_array_with_strides_is_sent_as_it_looks() -> None:
    array = pixels(10, 14, 3)[::2, ::-2]
    assert (np.asarray(Image.open(io.BytesIO(encode(array, 0, LIMITS)))) == array).all()


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "HSV", "RGBa", "I;16", "F"])
def test_a_pil_image_of_any_mode_reaches_the_model_with_the_same_pixels(mode: str) -> None:
    spec = InputSpec(height=6, width=6, colour="RGB")
    image = Image.fromarray(pixels(6, 6, 3))
    if mode == "F":
        image = Image.fromarray(RNG.random((6, 6), np.float32))
    elif mode == "I;16":
        image = Image.fromarray(RNG.integers(0, 65536, (6, 6), np.uint16))
    else:
        image = (image.convert("RGBA") if mode == "RGBa" else image).convert(mode)
    assert image.mode == mode
    assert (preprocess(encode(image, 0, LIMITS), spec) == conform(image, spec)).all()


def test_the_orientation_of_a_pil_image_is_applied_once() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    stream = io.BytesIO()
    Image.fromarray(pixels(4, 8, 3)).save(stream, "PNG", exif=exif)
    spec = InputSpec(height=8, width=4, colour="RGB")
    opened = Image.open(io.BytesIO(stream.getvalue()))
    assert (preprocess(encode(opened, 0, LIMITS), spec) == preprocess(stream.getvalue(), spec)).all()


def test_a_path_is_read_and_bytes_are_sent_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    for image in (tmp_path / "file", str(tmp_path / "file"), b"content", bytearray(b"content"), memoryview(b"content")):
        assert is_one_image(image)
        assert encode(image, 0, LIMITS) == b"content"
    assert not is_one_image([b"content"])


@pytest.mark.parametrize(
    "kind", [io.BytesIO, lambda data: io.BufferedReader(io.BytesIO(data)), lambda _: None, lambda _: 7]
)
def test_an_open_file_and_what_cannot_be_iterated_are_not_accepted(kind: Callable[[bytes], Any]) -> None:
    image = kind(b"content")
    assert is_one_image(image)
    with pytest.raises(ImageError, match=f"It is a {type(image).__name__}; accepted: a path, bytes, a uint8 array"):
        encode(image, 0, LIMITS)


@pytest.mark.parametrize(
    ("image", "sentence"),
    [
        ("/no/such/file", "/no/such/file: The file cannot be read: No such file or directory."),
        (7, "images[4]: It is a int; accepted: a path, bytes, a uint8 array or a PIL image."),
        (pixels(2, 2, 2), r"images[4]: It is uint8 of shape (2, 2, 2); accepted is uint8 of shape (H, W) or (H, W, C)"),
        (np.zeros((2, 2)), "images[4]: It is float64 of shape (2, 2)"),
        (np.zeros((0, 2), np.uint8), "images[4]: It is uint8 of shape (0, 2)"),
        (bytes(101), "images[4]: It has more bytes than the service accepts; accepted: at most 100."),
    ],
)
def test_objects_that_cannot_be_sent_raise_an_image_error_that_names_the_image(image: Any, sentence: str) -> None:
    with pytest.raises(ImageError) as caught:
        encode(image, 4, RequestLimits(max_body_bytes=100))
    assert str(caught.value).startswith(sentence)


def test_chunks_respect_both_limits_and_keep_the_order() -> None:
    sizes = [10, 20, 900, 10, 1500, 10, 10, 10, 10]
    images = [bytes([number]) * size for number, size in enumerate(sizes)]
    made = list(chunks(images, RequestLimits(max_images=3, max_body_bytes=1500)))
    assert [file for chunk in made for file in chunk.files] == images
    assert [chunk.first for chunk in made] == [0, 2, 4, 5, 8]
    for chunk in made:
        assert len(chunk.files) <= 3
        assert len(chunk.body()[1]) <= 1500


def test_chunks_read_a_generator_only_as_far_as_needed() -> None:
    read = []

    def images() -> Iterator[bytes]:
        for number in range(1000):
            read.append(number)
            yield b"x"

    source = chunks(images(), RequestLimits(max_images=10))
    next(source)
    assert len(read) == 11


def test_halves_have_all_files_and_their_numbers() -> None:
    left, right = Chunk(5, [b"a", b"b", b"c"]).halves()
    assert (left, right) == (Chunk(5, [b"a"]), Chunk(6, [b"b", b"c"]))


def test_one_file_is_sent_as_the_body_with_its_type(encode: Callable[..., bytes]) -> None:
    for kind, media_type in (("PNG", "image/png"), ("JPEG", "image/jpeg"), ("BMP", "application/octet-stream")):
        file = encode(pixels(4, 4, 3), kind)
        assert Chunk(0, [file]).body() == (media_type, file)
