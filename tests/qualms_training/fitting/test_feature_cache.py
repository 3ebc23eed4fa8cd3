"""The feature cache returns the base's outputs, is renewed when these change, and never holds half-written entries."""

import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from qualms_training.data.lazy_images import LazyImages
from qualms_training.errors import ModelError
from qualms_training.fitting import probe
from qualms_training.fitting.feature_cache import Features, cache_key, cached_features
from qualms_training.meta.extractor import Extractor, Normalise, Reduce
from qualms_training.meta.taps.tapped import Tapped
from qualms_training.models import build, freeze

CPU = torch.device("cpu")
IMAGES = np.random.default_rng(0).integers(0, 256, (30, 16, 16, 3), dtype=np.uint8)


class Counted(nn.Module):
    """A base that counts the images it runs on."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.net = build("small", 4, 3, 16, 16)
        self.scale = nn.Parameter(torch.tensor(scale))
        self.stem = nn.Identity()
        self.images = 0

    def forward(self, x: Tensor) -> Tensor:
        self.images += len(x)
        logits: Tensor = self.net(self.stem(x * self.scale))
        return logits


def new_extractor(
    scale: float = 1.0,
    taps: tuple[str, ...] = ("net.pool1", "net.pool2"),
    reduce: Reduce | None = None,
    mean: float = 0.5,
    std: float = 0.5,
) -> Extractor:
    base = freeze(Counted(scale))
    return Extractor(Normalise([mean] * 3, [std] * 3), Tapped(base, taps), reduce or Reduce("pool")).eval()


def images_run(extractor: Extractor) -> int:
    assert isinstance(extractor.tapped.base, Counted)
    return extractor.tapped.base.images


def entries(root: Path) -> list[str]:
    """Names of the files and folders of a cache except lock files."""
    return sorted(path.name for path in root.iterdir() if path.suffix != ".lock")


def fill(extractor: Extractor, root: Path, images: np.ndarray[Any, Any] = IMAGES, **options: Any) -> Features:
    return cached_features(extractor, images, root, CPU, **options)


def test_the_cache_holds_the_outputs_of_the_base(tmp_path: Path) -> None:
    extractor = new_extractor()
    with torch.inference_mode():
        logits, taps = extractor(torch.from_numpy(IMAGES))
    cached = fill(extractor, tmp_path, batch=7)
    np.testing.assert_allclose(cached.logits, logits, rtol=1e-4, atol=1e-5)
    assert cached.logits.dtype == np.float32
    for actual, expected in zip(cached.taps, taps, strict=True):
        assert actual.dtype == np.float16
        np.testing.assert_allclose(actual, expected, rtol=2**-11, atol=1e-6)  # half of the last of eleven bits
    batch = cached.batch(np.array([3, 0, 29]), CPU)
    assert [tap.dtype for tap in batch] == [torch.float32, torch.float32]
    np.testing.assert_array_equal(batch[0][1], cached.taps[0][0])
    np.testing.assert_array_equal(batch[1][2], cached.taps[1][29])
    assert cached.bytes > 30 * (16 + 32) * 2  # means and maxima of 8 and of 16 channels, two bytes each


def test_the_base_runs_once_over_the_same_images(tmp_path: Path) -> None:
    first = new_extractor()
    progress: list[int] = []
    fill(first, tmp_path, batch=8, progress=progress.append)
    assert progress == [8, 8, 8, 6]
    assert images_run(first) == len(IMAGES)
    again = new_extractor()
    fill(again, tmp_path, batch=16)
    assert images_run(again) == probe.IMAGES  # to check that the base's code has not changed
    assert len(entries(tmp_path)) == 1


def test_before_filling_is_called_only_if_the_base_has_to_run_and_can_prevent_it(tmp_path: Path) -> None:
    def refuse() -> None:
        raise PermissionError

    with pytest.raises(PermissionError):
        fill(new_extractor(), tmp_path, before_filling=refuse)
    assert entries(tmp_path) == []
    calls: list[int] = []
    fill(new_extractor(), tmp_path, before_filling=lambda: calls.append(1))
    assert calls == [1]
    fill(new_extractor(), tmp_path, before_filling=refuse)


class Edited(Counted):
    """The same weights with other code."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


Edited.__qualname__ = Counted.__qualname__  # the same class of a user, before and after an edit


def test_a_change_of_the_bases_code_makes_another_entry_and_keeps_the_first(tmp_path: Path) -> None:
    before = fill(new_extractor(), tmp_path)
    edited = new_extractor()
    edited.tapped.base = freeze(Edited())
    assert cache_key(edited, IMAGES) == cache_key(new_extractor(), IMAGES)
    fills: list[int] = []
    after = fill(edited, tmp_path, before_filling=lambda: fills.append(1))
    np.testing.assert_allclose(after.logits, 2 * before.logits, rtol=1e-5)
    assert fill(new_extractor(), tmp_path, before_filling=lambda: fills.append(2)).folder == before.folder
    assert fill(edited, tmp_path, before_filling=lambda: fills.append(3)).folder == after.folder != before.folder
    assert fills == [1]
    assert len(entries(tmp_path)) == 2


def test_the_key_is_the_same_for_equal_inputs() -> None:
    assert cache_key(new_extractor(), IMAGES) == cache_key(new_extractor(), IMAGES.copy(order="F"))


@pytest.mark.parametrize(
    "other",
    [
        new_extractor(scale=1.001),
        new_extractor(taps=("net.pool1",)),
        new_extractor(taps=("net.pool2", "net.pool1")),
        new_extractor(reduce=Reduce("flatten")),
        new_extractor(reduce=Reduce("pool", 2)),
        new_extractor(reduce=Reduce("pool", 1, ("mean", "std"))),
        new_extractor(mean=0.4),
        new_extractor(std=0.4),
    ],
    ids=["weights", "fewer taps", "order of taps", "flatten", "grid", "statistics", "mean", "std"],
)
def test_the_key_changes_with_everything_that_determines_the_features(other: Extractor) -> None:
    assert cache_key(other, IMAGES) != cache_key(new_extractor(), IMAGES)


def test_the_key_changes_with_the_pixels_their_order_and_their_shape() -> None:
    changed = IMAGES.copy()
    changed[17, 3, 3, 1] ^= 1
    keys = {
        cache_key(new_extractor(), images)
        for images in (IMAGES, changed, IMAGES[::-1], IMAGES[:29], IMAGES.reshape(30, 8, 32, 3))
    }
    assert len(keys) == 5


def test_a_run_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def fail(_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fill(new_extractor(), tmp_path, batch=8, progress=fail)
    assert entries(tmp_path) == []
    assert len(fill(new_extractor(), tmp_path).logits) == 30


def test_the_files_of_a_killed_run_are_neither_read_nor_kept(tmp_path: Path) -> None:
    killed = tmp_path / "killed"

    def copy_unfinished_files(_: int) -> None:
        if not killed.exists():
            shutil.copytree(tmp_path / "cache", killed)

    fill(new_extractor(), tmp_path / "cache", batch=8, progress=copy_unfinished_files)
    assert entries(killed) != entries(tmp_path / "cache")
    extractor = new_extractor()
    cached = fill(extractor, killed)
    assert images_run(extractor) == len(IMAGES)
    assert np.isfinite(cached.logits).all()
    assert entries(killed) == entries(tmp_path / "cache") == [cache_key(extractor, IMAGES)]


@pytest.mark.parametrize("edited", [False, True], ids=["same code", "other code"])
def test_a_run_that_needs_an_entry_which_another_run_is_writing_waits_for_it(edited: bool, tmp_path: Path) -> None:
    second = new_extractor()
    if edited:
        second.tapped.base = freeze(Edited())
    is_needed = threading.Event()
    results: list[Features] = []

    def run_second() -> None:
        results.append(fill(second, tmp_path, before_filling=is_needed.set))

    thread = threading.Thread(target=run_second)

    def start_second(_: int) -> None:
        if not thread.ident:
            thread.start()
            assert is_needed.wait(60)  # the second run has looked for the entry before it was complete

    first = fill(new_extractor(), tmp_path, batch=8, progress=start_second)
    thread.join(60)
    (result,) = results
    if edited:  # the entry is not what the second run needs, so it writes its own
        assert images_run(second) == probe.IMAGES + len(IMAGES)
        np.testing.assert_allclose(result.logits, 2 * first.logits, rtol=1e-5)
    else:
        assert images_run(second) == probe.IMAGES
        assert result.folder == first.folder
    assert entries(tmp_path) == sorted({first.folder.name, result.folder.name})


def test_an_entry_without_its_last_file_is_written_again(tmp_path: Path) -> None:
    folder = fill(new_extractor(), tmp_path).folder
    (folder / "done.json").unlink()
    (folder / "tap0.npy").write_bytes(b"half")
    extractor = new_extractor()
    assert np.isfinite(fill(extractor, tmp_path).taps[0]).all()
    assert images_run(extractor) == len(IMAGES)


@pytest.mark.parametrize("scale", [7e4, 1e-4], ids=["large", "small"])
def test_a_tap_outside_the_range_of_half_precision_is_stored_in_single_precision(scale: float, tmp_path: Path) -> None:
    extractor = new_extractor(scale=scale, taps=("net.pool2", "stem"), reduce=Reduce("flatten"))
    with torch.inference_mode():
        _, taps = extractor(torch.from_numpy(IMAGES))
    cached = fill(extractor, tmp_path, batch=7)
    assert cached.taps[1].dtype == np.float32
    np.testing.assert_allclose(cached.taps[1], taps[1], rtol=1e-6)


def test_a_tap_that_leaves_the_range_of_half_precision_in_a_later_batch_is_widened(tmp_path: Path) -> None:
    extractor = new_extractor(scale=7e4, taps=("stem",), reduce=Reduce("flatten"))
    images = IMAGES.copy()
    images[:7] = 128  # nearly zero once normalised
    with torch.inference_mode():
        _, taps = extractor(torch.from_numpy(images))
    assert taps[0][:7].abs().max() < 60_000 < taps[0][7:].abs().max()
    cached = fill(extractor, tmp_path, images, batch=7)
    assert cached.taps[0].dtype == np.float32
    np.testing.assert_allclose(cached.taps[0], taps[0], rtol=2**-11)
    assert sorted(path.name for path in cached.folder.iterdir()) == ["done.json", "logits.npy", "tap0.npy"]


def test_non_finite_logits_are_refused(tmp_path: Path) -> None:
    extractor = new_extractor(taps=("stem",), reduce=Reduce("flatten"))
    extractor.normalise.scale[1] = float("nan")
    with pytest.raises(ModelError, match="not finite"):
        fill(extractor, tmp_path)
    assert entries(tmp_path) == []


class NotANumberInside(nn.Module):
    """A base with a module that returns NaN, on which its logits do not depend."""

    def __init__(self) -> None:
        super().__init__()
        self.broken = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(1)
        self.broken(flat * float("nan"))
        return flat[:, :4]


def test_a_non_finite_tap_is_refused_although_the_logits_are_finite(tmp_path: Path) -> None:
    extractor = Extractor(
        Normalise([0.5] * 3, [0.5] * 3), Tapped(freeze(NotANumberInside()), ["broken"]), Reduce("flatten")
    )
    with pytest.raises(ModelError, match="Tap 'broken' reaches nan"):
        fill(extractor, tmp_path)


def test_images_that_are_decoded_when_they_are_used_are_identified_by_their_digest(tmp_path: Path) -> None:
    lazy = LazyImages(lambda index: IMAGES[index], np.arange(len(IMAGES)), IMAGES.shape[1:], lambda: "the pixels")
    cached = cached_features(new_extractor(), lazy, tmp_path / "lazy", CPU, batch=7)
    expected = fill(new_extractor(), tmp_path / "array", batch=7)
    for one, other in zip([cached.logits, *cached.taps], [expected.logits, *expected.taps], strict=True):
        np.testing.assert_array_equal(one, other)
    assert entries(tmp_path / "lazy") == [cache_key(new_extractor(), lazy)]
    again = cached_features(new_extractor(), lazy, tmp_path / "lazy", CPU)
    assert again.folder == cached.folder


def test_batches_of_large_images_are_smaller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qualms.bundle.runtime.BATCH_VALUES", 8 * IMAGES[0].size)
    sizes = list[int]()
    fill(new_extractor(), tmp_path, progress=sizes.append)
    assert sizes[0] == 8
    assert sum(sizes) == len(IMAGES)
