"""Images that are decoded when they are used have the pixels, encodings and noises' shapes of those in memory."""

import os
from pathlib import Path
from threading import Lock

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from qualms.images.encodings import parse_encodings
from qualms.images.fingerprints import fingerprints
from qualms.images.input_spec import InputSpec
from qualms_training.data import dataset, lazy_images
from qualms_training.data.dataset import Images, Selection
from qualms_training.data.lazy_images import LazyImages, first_images
from qualms_training.data.noise import NOISES, apply_noise, corrupt
from qualms_training.errors import DataError

SPEC = InputSpec(height=16, width=12)
COUNT = 30


@pytest.fixture
def files(tmp_path: Path) -> Images:
    rng = np.random.default_rng(0)
    paths = []
    for index in range(COUNT):
        paths.append(tmp_path / f"{index}.png")
        coarse = rng.integers(0, 256, (5, 6, 3), np.uint8)
        Image.fromarray(coarse.repeat(4, axis=0).repeat(4, axis=1)).save(paths[-1])
    return Images("files", "test", tuple(paths))


@pytest.fixture
def all_lazy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset, "LAZY_BYTES", 0)


def lazy_of(images: Images, indices: list[int] | None = None) -> LazyImages:
    pixels = images.pixels(SPEC, indices)
    assert isinstance(pixels, LazyImages)
    return pixels


@pytest.mark.usefixtures("all_lazy")
@pytest.mark.parametrize(
    "key",
    [
        slice(None),
        slice(3, 9),
        slice(0, 0),
        slice(None, None, 7),
        slice(-5, None),
        np.array([4, 4, 29, 0]),
        [2, 1],
        -1,
        7,
    ],
    ids=str,
)
def test_any_index_gives_the_pixels_of_the_array(files: Images, key: slice) -> None:
    whole = files.conformed(SPEC)
    np.testing.assert_array_equal(lazy_of(files)[key], whole[key])


@pytest.mark.usefixtures("all_lazy")
def test_batches_in_order_give_each_image_and_decode_it_once(files: Images, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, decoded, lock = files.conformed(SPEC), list[Path](), Lock()
    original = dataset._read_file

    def counted(path: Path) -> bytes:
        with lock:
            decoded.append(path)
        return original(path)

    monkeypatch.setattr(dataset, "_read_file", counted)
    lazy = lazy_of(files)
    batches = [lazy[start : start + 8] for start in range(0, COUNT, 8)]
    np.testing.assert_array_equal(np.concatenate(batches), whole)
    assert len(decoded) == COUNT
    assert lazy.shape == (COUNT, 16, 12, 3)
    assert lazy.nbytes == whole.nbytes


@pytest.mark.usefixtures("all_lazy")
def test_iteration_gives_each_image(files: Images) -> None:
    np.testing.assert_array_equal(np.stack(list(lazy_of(files))), files.conformed(SPEC))


@pytest.mark.usefixtures("all_lazy")
def test_indices_and_parts_select_images(files: Images) -> None:
    whole = files.conformed(SPEC)
    lazy = lazy_of(files, [9, 3, 20])
    np.testing.assert_array_equal(np.asarray(lazy), whole[[9, 3, 20]])
    np.testing.assert_array_equal(np.asarray(first_images(lazy, 2)), whole[[9, 3]])
    np.testing.assert_array_equal(np.asarray(lazy.take(np.array([2, 0]))), whole[[20, 9]])


@pytest.mark.usefixtures("all_lazy")
def test_the_digest_depends_on_files_indices_and_input_and_decodes_nothing(
    files: Images, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dataset, "preprocess", None)
    other = Images("files", "test", files.images[::-1])  # type: ignore[index]
    wide = files.pixels(InputSpec(height=16, width=16))
    assert isinstance(wide, LazyImages)
    part = lazy_of(files).take(slice(5))
    sets = [lazy_of(files), lazy_of(files, [0, 1]), lazy_of(files, [1, 0]), lazy_of(other), wide, part]
    assert len({one.digest() for one in sets}) == len(sets)
    assert lazy_of(files).digest() == sets[0].digest()


def test_small_sets_and_arrays_stay_in_memory(files: Images, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(files.pixels(SPEC), np.ndarray)
    monkeypatch.setattr(dataset, "LAZY_BYTES", 0)
    assert isinstance(Images("array", "test", np.zeros((4, 8, 8), np.uint8)).pixels(SPEC), np.ndarray)


@pytest.mark.usefixtures("all_lazy")
def test_the_error_for_an_unusable_file_names_it_when_it_is_read(files: Images, tmp_path: Path) -> None:
    (tmp_path / "3.png").write_bytes(b"\x89PNG\r\n\x1a\nnot any more")
    lazy = lazy_of(files)
    assert len(lazy[:3]) == 3
    with pytest.raises(DataError, match=r"3\.png is not usable"):
        lazy[2:6]
    assert len(lazy[10:]) == 20


@pytest.mark.parametrize("encodings", [[], ["jpeg:40-95", "png"]], ids=["as stored", "encoded"])
def test_images_received_one_by_one_are_those_received_at_once(
    files: Images, encodings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed, chosen, done = parse_encodings(encodings), [5, 2, 29, 2], list[int]()
    whole = files.received(SPEC, parsed, 3, chosen)
    monkeypatch.setattr(dataset, "LAZY_BYTES", 0)
    lazy = Selection(files, np.array(chosen)).received(SPEC, parsed, 3, done.append)
    assert isinstance(lazy.images, LazyImages)
    assert lazy.observed[1] == whole.observed[1]
    for _ in range(2):
        np.testing.assert_array_equal(lazy.images[:], whole.images)
    assert list(lazy.observed) == whole.observed
    assert lazy.observed[1:3] == whole.observed[1:3]
    assert sum(done) == len(chosen)
    assert lazy.images.digest() != files.received(SPEC, parsed, 4, chosen).images.digest()  # type: ignore[union-attr]


@pytest.mark.usefixtures("all_lazy")
@pytest.mark.parametrize("name", NOISES)
def test_noise_of_an_image_depends_on_seed_and_position_alone(files: Images, name: str) -> None:
    lazy = lazy_of(files)
    noisy, again, other = (apply_noise(lazy, [name], np.random.default_rng(seed)) for seed in (0, 0, 1))
    whole = noisy[:]
    np.testing.assert_array_equal(again[[7, 3]], whole[[7, 3]])
    assert whole.shape == lazy.shape
    assert (whole != lazy[:]).any(axis=(1, 2, 3)).mean() > 0.8
    assert (whole != other[:]).any()
    assert noisy.digest() == again.digest()
    assert len({lazy.digest(), noisy.digest(), other.digest()}) == 3


def by_pixel(images: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The pixels of each image in ascending order."""
    return np.sort(images.reshape(len(images), -1), axis=1)


@pytest.mark.usefixtures("all_lazy")
def test_noise_when_read_is_the_noise_of_arrays(files: Images) -> None:
    lazy, rng = lazy_of(files), np.random.default_rng(0)
    whole = lazy[:]
    np.testing.assert_array_equal(by_pixel(apply_noise(lazy, ["permutation"], rng)[:]), by_pixel(whole))
    twice = 2 * apply_noise(lazy, ["blend"], rng)[:].astype(int) - whole
    # Every blended image is the average of itself and one of the others, up to rounding.
    assert all((abs(one - whole).max(axis=(1, 2, 3)) <= 1).any() for one in twice)
    corner = apply_noise(lazy, ["mosaic"], rng)[:][:, :8, :6]
    assert all((one == whole[:, :8, :6]).all(axis=(1, 2, 3)).any() for one in corner)


@pytest.mark.usefixtures("all_lazy")
def test_corrupted_lazy_images_are_a_source_of_images(files: Images) -> None:
    corrupted = corrupt(lazy_of(files), np.random.default_rng(0))
    source = Images("corrupted", "test", corrupted)
    np.testing.assert_array_equal(source.conformed(SPEC, [4, 1]), corrupted[[4, 1]])
    assert len(source.digest()) == 64
    assert {one.format for one in source.observed(SPEC, [0])} == {"pixels"}


@pytest.mark.usefixtures("all_lazy")
def test_fingerprints_are_those_of_the_array(files: Images) -> None:
    np.testing.assert_array_equal(fingerprints(lazy_of(files)), fingerprints(files.conformed(SPEC)))


def test_images_are_decoded_on_systems_without_affinity_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    lazy_images.pool.cache_clear()
    assert lazy_images.on_all_cores(lambda index: 2 * index, range(3)) == [0, 2, 4]
