"""Data sets in memory and as files have the same preprocessing and digest, and are encoded in the same way."""

import io
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from qualms.images.encodings import parse_encodings
from qualms.images.input_spec import InputSpec
from qualms.images.preprocess import preprocess, preprocess_batch
from qualms_training.data.dataset import Images, ImageSet, Received, Selection
from qualms_training.errors import DataError

SPEC = InputSpec(height=6, width=6)


def in_memory(n: int = 600, seed: int = 0) -> ImageSet:
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, (n, 5, 4), dtype=np.uint8)
    return ImageSet("noise", "test", images, rng.integers(0, 2, n), ("a", "b"))


def on_disk(folder: Path, source: ImageSet) -> ImageSet:
    paths = []
    for index, image in enumerate(np.asarray(source.images)):
        paths.append(folder / f"{index}.png")
        Image.fromarray(image).save(paths[-1])
    return ImageSet(source.name, source.split, tuple(paths), source.labels, source.classes)


def test_conformed_images_equal_preprocess_batch() -> None:
    images = in_memory()
    np.testing.assert_array_equal(images.conformed(SPEC), preprocess_batch(np.asarray(images.images), SPEC))


def test_files_and_memory_give_the_same_pixels(tmp_path: Path) -> None:
    images = in_memory(20)
    np.testing.assert_array_equal(on_disk(tmp_path, images).conformed(SPEC), images.conformed(SPEC))


def test_indices_select_and_order_images(tmp_path: Path) -> None:
    images = in_memory(20)
    whole = images.conformed(SPEC)
    for candidate in (images, on_disk(tmp_path, images)):
        np.testing.assert_array_equal(candidate.conformed(SPEC, [7, 3, 3]), whole[[7, 3, 3]])


def test_no_indices_give_an_empty_array() -> None:
    assert in_memory(5).conformed(SPEC, []).shape == (0, 6, 6, 3)


def test_progress_counts_every_image() -> None:
    done: list[int] = []
    in_memory(600).conformed(SPEC, progress=done.append)
    assert sum(done) == 600
    assert len(done) > 1


def test_digest_depends_on_content_only(tmp_path: Path) -> None:
    images = in_memory(20)
    renamed = ImageSet("other", "train", images.images, images.labels, images.classes)
    assert images.digest() == renamed.digest() == in_memory(20).digest()
    pixel = np.array(images.images)
    pixel[3, 2, 1] ^= 1
    changed = [
        ImageSet("noise", "test", pixel, images.labels, images.classes),
        ImageSet("noise", "test", images.images, 1 - images.labels, images.classes),
        ImageSet("noise", "test", images.images, images.labels, ("a", "c")),
        ImageSet("noise", "test", np.asarray(images.images).reshape(20, 4, 5), images.labels, images.classes),
    ]
    assert len({images.digest(), *(other.digest() for other in changed)}) == 5
    files = on_disk(tmp_path, images)
    before = files.digest()
    assert before == files.digest()
    Image.new("L", (4, 5)).save(tmp_path / "3.png")
    assert files.digest() != before


def test_the_error_for_a_corrupt_file_names_it_and_the_reason(tmp_path: Path) -> None:
    files = on_disk(tmp_path, in_memory(5))
    (tmp_path / "3.png").write_bytes(b"\x89PNG\r\n\x1a\nnot any more")
    with pytest.raises(DataError, match=r"3\.png is not usable: .*damaged"):
        files.conformed(SPEC)


def test_the_error_for_a_missing_file_names_it(tmp_path: Path) -> None:
    files = on_disk(tmp_path, in_memory(5))
    (tmp_path / "2.png").unlink()
    for use in (files.digest, lambda: files.conformed(SPEC)):
        with pytest.raises(DataError, match=r"2\.png cannot be read"):
            use()


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([0, 1], "3 images but labels of shape"),
        ([0, 1, 2], "labels from 0 to 2; with 2 classes, 0 to 1 are accepted"),
        ([0, -1, 1], "labels from -1"),
    ],
)
def test_labels_that_do_not_match_images_or_classes_are_an_error(labels: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        ImageSet("x", "test", np.zeros((3, 4, 4), np.uint8), np.array(labels), ("a", "b"))


def test_a_set_without_images_is_an_error() -> None:
    with pytest.raises(DataError, match="0 images"):
        ImageSet("x", "test", np.zeros((0, 4, 4), np.uint8), np.zeros(0, np.int64), ("a",))


# Images as they are sent

ENCODED = InputSpec(height=16, width=16)


def pictures(n: int = 12, seed: int = 0) -> Images:
    """Smooth colour images, of another size than the model's input."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (n, 6, 5, 3), dtype=np.uint8)
    return Images("pictures", "test", coarse.repeat(4, axis=1).repeat(4, axis=2))


def counted(received: Received) -> dict[str, int]:
    """The number of images by encoding."""
    return Counter(one.text for one in received.observed)


def files_of(folder: Path, images: Images) -> Images:
    """The same images as PNG files."""
    paths = []
    for index, image in enumerate(np.asarray(images.images)):
        paths.append(folder / f"{index:03}.png")
        Image.fromarray(image).save(paths[-1])
    return Images(images.name, images.split, tuple(paths))


@pytest.mark.parametrize("encodings", [[], ["png"], ["bmp"], ["tiff"], ["png", "bmp", "tiff"]], ids="+".join)
def test_images_sent_without_losses_have_the_pixels_of_the_stored_ones(encodings: list[str], tmp_path: Path) -> None:
    images = pictures()
    for candidate in (images, files_of(tmp_path, images), in_memory(12)):
        received = candidate.received(ENCODED, parse_encodings(encodings), seed=0)
        np.testing.assert_array_equal(received.images, candidate.conformed(ENCODED))
        assert set(counted(received)) <= {"lossless, larger size", "lossless, smaller size"}
        assert len(received.observed) == 12


def test_images_sent_with_losses_are_those_of_the_encoded_file(tmp_path: Path) -> None:
    images, (encoding,) = pictures(), parse_encodings(["jpeg:60"])
    received = images.received(ENCODED, [encoding], seed=0)
    for row, pixels in enumerate(np.asarray(images.images)):
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "JPEG", quality=60)
        np.testing.assert_array_equal(received.images[row], preprocess(file.getvalue(), ENCODED))
    assert (np.asarray(received.images) != images.conformed(ENCODED)).any()
    assert counted(received) == {"jpeg 60-69, larger size": 12}


MIXTURE = ["png", "jpeg:40-95", "webp:30-60", "resize:0.5-2", "brightness:0.5-1.5+jpeg:50"]


@pytest.mark.parametrize("encodings", [["jpeg:20-95"], MIXTURE], ids=["range", "mixture"])
def test_the_encoding_of_an_image_depends_on_seed_and_index_alone(encodings: list[str]) -> None:
    images, parsed = pictures(40), parse_encodings(encodings)
    whole = images.received(ENCODED, parsed, seed=3)
    again = images.received(ENCODED, parsed, seed=3)
    np.testing.assert_array_equal(whole.images, again.images)
    assert whole.observed == again.observed
    some = [31, 2, 17, 2, 39]
    chosen = images.received(ENCODED, parsed, 3, some)
    np.testing.assert_array_equal(chosen.images, whole.images[some])
    assert chosen.observed == [whole.observed[index] for index in some]
    selection = Selection(images, np.array(some, np.int64))
    np.testing.assert_array_equal(selection.received(ENCODED, parsed, 3).images, whole.images[some])
    np.testing.assert_array_equal(selection.first(2).received(ENCODED, parsed, 3).images, whole.images[some[:2]])
    other = np.asarray(images.received(ENCODED, parsed, seed=4).images)
    assert (other != np.asarray(whole.images)).any(axis=(1, 2, 3)).sum() > 20


def test_files_and_arrays_are_encoded_alike(tmp_path: Path) -> None:
    images = pictures()
    received = [one.received(ENCODED, parse_encodings(MIXTURE), 5) for one in (images, files_of(tmp_path, images))]
    np.testing.assert_array_equal(received[0].images, received[1].images)
    assert received[0].observed == received[1].observed


def test_a_mixture_draws_every_listed_encoding_about_equally_often() -> None:
    images = Images("noise", "test", np.zeros((600, 16, 16), np.uint8))
    observed = counted(images.received(ENCODED, parse_encodings(["png", "jpeg:75", "webp:80", "gif"]), seed=0))
    assert set(observed) == {f"{kind}, same size" for kind in ("lossless", "jpeg 70-79", "webp lossy", "gif palette")}
    assert sum(observed.values()) == 600
    assert all(110 <= count <= 190 for count in observed.values())  # 150 ± 4 standard deviations of 10.6


def test_a_repeated_encoding_has_a_larger_share() -> None:
    images = Images("noise", "test", np.zeros((400, 16, 16), np.uint8))
    observed = counted(images.received(ENCODED, parse_encodings(["png", "png", "png", "jpeg:75"]), seed=0))
    assert 260 <= observed["lossless, same size"] <= 340


def test_encodings_of_stored_images_have_their_format_and_size(tmp_path: Path) -> None:
    paths = []
    for name, side in (("0.png", 8), ("1.bmp", 16), ("2.jpg", 40)):
        paths.append(tmp_path / name)
        Image.new("RGB", (side, side + 50)).save(paths[-1], quality=75)
    files = Images("mixed", "test", tuple(paths))
    kinds = [("png", "lossless", "smaller"), ("bmp", "lossless", "same"), ("jpeg", "70-79", "larger")]
    assert files.observed(ENCODED) == kinds
    assert files.observed(ENCODED, [2, 0]) == [kinds[2], kinds[0]]
    assert Selection(files, np.array([1])).observed(ENCODED) == [kinds[1]]
    assert pictures(2).observed(ENCODED) == [("pixels", "lossless", "larger")] * 2
    assert files.received(ENCODED, [], seed=0).observed == kinds


def test_progress_of_sent_images_counts_every_image() -> None:
    done: list[int] = []
    pictures(30).received(ENCODED, parse_encodings(["jpeg:75"]), seed=0, progress=done.append)
    assert sum(done) == 30


@pytest.mark.parametrize("encodings", [[], ["jpeg:75"]], ids=["as stored", "encoded"])
def test_the_error_for_an_unusable_file_that_is_sent_names_it(encodings: list[str], tmp_path: Path) -> None:
    files = files_of(tmp_path, pictures(5))
    (tmp_path / "003.png").write_bytes(b"\x89PNG\r\n\x1a\nnot any more")
    with pytest.raises(DataError, match=r"003\.png is not usable: .*damaged"):
        files.received(ENCODED, parse_encodings(encodings), seed=0)
    (tmp_path / "003.png").unlink()
    with pytest.raises(DataError, match=r"003\.png cannot be read"):
        files.received(ENCODED, parse_encodings(encodings), seed=0)


def test_images_without_labels_have_a_digest_of_their_pixels_alone(tmp_path: Path) -> None:
    labelled = in_memory(20)
    plain = Images("noise", "test", labelled.images)
    assert plain.digest() == Images("other", "train", labelled.images).digest() != labelled.digest()
    assert plain.digest() != Images("noise", "test", np.asarray(labelled.images)[::-1]).digest()


def test_a_collection_without_images_is_an_error() -> None:
    with pytest.raises(DataError, match=r"'x' \(split 'test'\) has 0 images; at least 1 is needed"):
        Images("x", "test", ())
