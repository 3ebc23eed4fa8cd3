"""The cache gives what the base would say again, knows when it would say something else, and is never half there."""

import fcntl
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from qualms_training.errors import ModelError
from qualms_training.fitting import probe
from qualms_training.fitting.feature_cache import Extractor, Features, cache_key, cached_features, is_cached
from qualms_training.meta.meta_model import Reduce
from qualms_training.meta.normalise import Normalise
from qualms_training.meta.taps import Tapped
from qualms_training.models import build, freeze

CPU = torch.device("cpu")
IMAGES = np.random.default_rng(0).integers(0, 256, (30, 16, 16, 3), dtype=np.uint8)


class Counted(nn.Module):
    """A base that counts the images it is shown."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.net = build("small", 4, 3, 16, 16)
        self.scale = nn.Parameter(torch.tensor(scale))
        self.stem = nn.Identity()
        self.shown = 0

    def forward(self, x: Tensor) -> Tensor:
        self.shown += len(x)
        logits: Tensor = self.net(self.stem(x * self.scale))
        return logits


def extractor(
    scale: float = 1.0,
    taps: tuple[str, ...] = ("net.pool1", "net.pool2"),
    reduce: Reduce | None = None,
    mean: float = 0.5,
    std: float = 0.5,
) -> Extractor:
    base = freeze(Counted(scale))
    return Extractor(Normalise([mean] * 3, [std] * 3), Tapped(base, taps), reduce or Reduce("pool")).eval()


def shown(found: Extractor) -> int:
    assert isinstance(found.tapped.base, Counted)
    return found.tapped.base.shown


def entries(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def fill(found: Extractor, root: Path, images: np.ndarray[Any, Any] = IMAGES, **options: Any) -> Features:
    return cached_features(found, images, root, CPU, **options)


def test_it_holds_what_the_base_says(tmp_path: Path) -> None:
    found = extractor()
    with torch.inference_mode():
        logits, taps = found(torch.from_numpy(IMAGES))
    cached = fill(found, tmp_path, batch=7)
    np.testing.assert_allclose(cached.logits, logits, rtol=1e-4, atol=1e-5)
    assert cached.logits.dtype == np.float32
    for ours, theirs in zip(cached.taps, taps, strict=True):
        assert ours.dtype == np.float16
        np.testing.assert_allclose(ours, theirs, rtol=2**-11, atol=1e-6)  # half of the last of eleven bits
    batch = cached.batch(np.array([3, 0, 29]), CPU)
    assert [tap.dtype for tap in batch] == [torch.float32, torch.float32]
    np.testing.assert_array_equal(batch[0][1], cached.taps[0][0])
    np.testing.assert_array_equal(batch[1][2], cached.taps[1][29])
    assert cached.bytes > 30 * (16 + 32) * 2  # means and maxima of 8 and of 16 channels, two bytes each


def test_the_base_runs_once_and_never_again_for_the_same_images(tmp_path: Path) -> None:
    first = extractor()
    progress: list[int] = []
    fill(first, tmp_path, batch=8, progress=progress.append)
    assert progress == [8, 8, 8, 6]
    assert shown(first) == len(IMAGES)
    again = extractor()
    fill(again, tmp_path, batch=16)
    assert shown(again) == probe.IMAGES  # to see that it is the base it was
    assert len(entries(tmp_path)) == 1


class Edited(Counted):
    """The same weights, and other code around them."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


Edited.__qualname__ = Counted.__qualname__  # one class of a user's, before and after an edit


def test_an_edit_of_the_bases_code_is_another_cache_and_the_first_one_stays(tmp_path: Path) -> None:
    before = fill(extractor(), tmp_path)
    edited = extractor()
    edited.tapped.base = freeze(Edited())
    assert cache_key(edited, IMAGES) == cache_key(extractor(), IMAGES)
    assert not is_cached(edited, IMAGES, tmp_path, CPU)
    after = fill(edited, tmp_path)
    assert is_cached(edited, IMAGES, tmp_path, CPU)
    np.testing.assert_allclose(after.logits, 2 * before.logits, rtol=1e-5)
    assert fill(extractor(), tmp_path).folder == before.folder
    assert fill(edited, tmp_path).folder == after.folder != before.folder
    assert len(entries(tmp_path)) == 2


def test_the_key_is_the_same_for_equal_inputs() -> None:
    assert cache_key(extractor(), IMAGES) == cache_key(extractor(), IMAGES.copy(order="F"))


@pytest.mark.parametrize(
    "other",
    [
        extractor(scale=1.001),
        extractor(taps=("net.pool1",)),
        extractor(taps=("net.pool2", "net.pool1")),
        extractor(reduce=Reduce("flatten")),
        extractor(reduce=Reduce("pool", 2)),
        extractor(reduce=Reduce("pool", 1, ("mean", "std"))),
        extractor(mean=0.4),
        extractor(std=0.4),
    ],
    ids=["weights", "fewer taps", "order of taps", "flatten", "grid", "statistics", "mean", "std"],
)
def test_the_key_changes_with_all_that_decides_the_features(other: Extractor) -> None:
    assert cache_key(other, IMAGES) != cache_key(extractor(), IMAGES)


def test_the_key_changes_with_the_pixels_their_order_and_their_shape() -> None:
    changed = IMAGES.copy()
    changed[17, 3, 3, 1] ^= 1
    keys = {
        cache_key(extractor(), images)
        for images in (IMAGES, changed, IMAGES[::-1], IMAGES[:29], IMAGES.reshape(30, 8, 32, 3))
    }
    assert len(keys) == 5


def test_a_run_that_fails_half_way_leaves_nothing(tmp_path: Path) -> None:
    def fail(_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fill(extractor(), tmp_path, batch=8, progress=fail)
    assert entries(tmp_path) == []
    assert len(fill(extractor(), tmp_path).logits) == 30


def test_what_a_killed_run_left_is_neither_read_nor_kept(tmp_path: Path) -> None:
    key = cache_key(extractor(), IMAGES)
    leftover = tmp_path / f".{key}.killed"
    leftover.mkdir()
    (leftover / "logits.npy").write_bytes(b"half")
    found = extractor()
    cached = fill(found, tmp_path)
    assert shown(found) > 0
    assert np.isfinite(cached.logits).all()
    assert entries(tmp_path) == [key]


def test_what_another_run_is_writing_now_is_left_alone(tmp_path: Path) -> None:
    key = cache_key(extractor(), IMAGES)
    theirs = tmp_path / f".{key}.alive"
    theirs.mkdir()
    handle = os.open(theirs, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        fill(extractor(), tmp_path)
        assert entries(tmp_path) == [theirs.name, key]
    finally:
        os.close(handle)


@pytest.mark.parametrize("moment", ["while it is filled", "before it gets its name"])
def test_of_two_runs_for_one_key_the_faster_one_is_kept(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders: list[int] = []

    def meanwhile() -> None:
        monkeypatch.undo()
        folders.append(fill(extractor(), tmp_path).folder.stat().st_ino)

    def dumps(value: Any) -> str:
        meanwhile()
        return json.dumps(value)

    if moment == "before it gets its name":
        monkeypatch.setattr(
            "qualms_training.fitting.feature_cache.json", SimpleNamespace(dumps=dumps, loads=json.loads)
        )
        ours = fill(extractor(), tmp_path)
    else:
        ours = fill(extractor(), tmp_path, progress=lambda _: meanwhile())
    assert entries(tmp_path) == [ours.folder.name]
    assert folders == [ours.folder.stat().st_ino]


def test_a_folder_without_its_last_file_is_made_again(tmp_path: Path) -> None:
    folder = fill(extractor(), tmp_path).folder
    (folder / "done.json").unlink()
    (folder / "tap0.npy").write_bytes(b"half")
    found = extractor()
    assert np.isfinite(fill(found, tmp_path).taps[0]).all()
    assert shown(found) > 0


@pytest.mark.parametrize("scale", [7e4, 1e-4], ids=["large", "small"])
def test_a_tap_that_half_precision_would_spoil_is_kept_in_single(scale: float, tmp_path: Path) -> None:
    found = extractor(scale=scale, taps=("net.pool2", "stem"), reduce=Reduce("flatten"))
    with torch.inference_mode():
        _, taps = found(torch.from_numpy(IMAGES))
    cached = fill(found, tmp_path, batch=7)
    assert cached.taps[1].dtype == np.float32
    np.testing.assert_allclose(cached.taps[1], taps[1], rtol=1e-6)


def test_a_tap_that_grows_too_large_later_on_is_widened_there(tmp_path: Path) -> None:
    found = extractor(scale=7e4, taps=("stem",), reduce=Reduce("flatten"))
    images = IMAGES.copy()
    images[:7] = 128  # nearly zero once normalised
    with torch.inference_mode():
        _, taps = found(torch.from_numpy(images))
    assert taps[0][:7].abs().max() < 60_000 < taps[0][7:].abs().max()
    cached = fill(found, tmp_path, images, batch=7)
    assert cached.taps[0].dtype == np.float32
    np.testing.assert_allclose(cached.taps[0], taps[0], rtol=2**-11)
    assert sorted(path.name for path in cached.folder.iterdir()) == ["done.json", "logits.npy", "tap0.npy"]


def test_features_that_are_not_numbers_are_refused(tmp_path: Path) -> None:
    found = extractor(taps=("stem",), reduce=Reduce("flatten"))
    found.normalise.scale[1] = float("nan")
    with pytest.raises(ModelError, match="not finite"):
        fill(found, tmp_path)
    assert entries(tmp_path) == []


class NotANumberInside(nn.Module):
    """A base with a broken module that its logits do not depend on."""

    def __init__(self) -> None:
        super().__init__()
        self.broken = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(1)
        self.broken(flat * float("nan"))
        return flat[:, :4]


def test_a_tap_that_is_not_a_number_is_refused_although_the_logits_are_fine(tmp_path: Path) -> None:
    found = Extractor(
        Normalise([0.5] * 3, [0.5] * 3), Tapped(freeze(NotANumberInside()), ["broken"]), Reduce("flatten")
    )
    with pytest.raises(ModelError, match="Tap 'broken' reaches nan"):
        fill(found, tmp_path)
