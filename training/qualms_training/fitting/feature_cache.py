"""The feature cache: the frozen base runs once over each set of images, and later uses memory-map its outputs.

The key is a digest of everything that determines the features except the base's code: its weights, the pixels (and so
the data, their order and their preprocessing), the normalisation, the taps and their reduction. To detect a change of
the code, the base is run on the first images again, and a cache entry with other outputs is skipped. Entries are
written to a temporary folder that is renamed when it is complete, so a half-written entry is never read. While one run
writes the entry of a key, other runs that need the same key wait and then read it.
"""

import hashlib
import json
import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from filelock import FileLock
from numpy.typing import NDArray
from torch import Tensor

from qualms.bundle.runtime import Images, batch_size
from qualms_training.data.lazy_images import LazyImages, Pixels
from qualms_training.errors import ModelError
from qualms_training.files import fingerprint
from qualms_training.fitting import probe
from qualms_training.meta.extractor import Extractor
from qualms_training.models import identity

FORMAT = 1
_MAX_HALF = 60_000.0
"""largest absolute value of a tap that is stored in half precision"""
_MIN_HALF_MEDIAN = 1e-3
"""smallest median of such a tap: half precision has all of its eleven bits from 6e-5 on, and half of the values are below
the median"""


@dataclass(frozen=True)
class Features:
    """Outputs of the frozen base for N images."""

    taps: list[NDArray[Any]]
    """(N, D_j) each, memory-mapped; float16, or float32 where half precision would lose information"""
    logits: NDArray[np.float32]
    """(N, K), memory-mapped"""
    folder: Path

    @property
    def bytes(self) -> int:
        """Size on disk."""
        return sum(file.stat().st_size for file in self.folder.iterdir())

    def batch(self, indices: NDArray[np.int64], device: torch.device) -> list[Tensor]:
        """The reduced taps of the images at `indices`, float32."""
        return [torch.from_numpy(np.asarray(tap[indices], dtype=np.float32)).to(device) for tap in self.taps]


RunBatches: TypeAlias = Callable[[Extractor, Pixels, int, torch.device], Iterator[tuple[Tensor, list[Tensor]]]]
"""(extractor, images, images in a batch, device) to the logits and taps of each batch, in order"""


def cache_key(extractor: Extractor, images: Pixels) -> str:
    """Digest of the base's weights, pixels, normalisation, taps, reduction and the format of the cache."""
    pixels = images.digest() if isinstance(images, LazyImages) else _digest(images)
    return fingerprint(
        FORMAT,
        type(extractor.tapped.base).__qualname__,
        identity(extractor.tapped.base),
        [list(images.shape), pixels],
        [extractor.normalise.scale.tolist(), extractor.normalise.shift.tolist()],
        list(extractor.tapped.names),
        extractor.reduce.key,
    )


def _digest(images: NDArray[np.uint8]) -> str:
    return hashlib.sha256(np.ascontiguousarray(images).data).hexdigest()


def cached_features(
    extractor: Extractor,
    images: Pixels,
    root: Path,
    device: torch.device,
    *,
    batch: int | None = None,
    progress: Callable[[int], None] | None = None,
    before_filling: Callable[[], None] | None = None,
    run: RunBatches | None = None,
) -> Features:
    """Features of images (N, H, W, C), read from the cache at `root`, or computed and added to it.

    `before_filling` is called before the base runs over all images; an exception that it raises prevents this.
    `progress` is called with the size of each batch, which is `batch_size(images)` unless it is given. Images are read by
    slices, one batch at a time. `run` runs the base over the batches, by default on this machine.
    """
    batch = batch or batch_size(images)
    key = cache_key(extractor, images)
    folder = _entry(key, extractor, images, root, device)
    if not _is_complete(folder):
        if before_filling:
            before_filling()
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(root / f"{key}.lock"):
            folder = _entry(key, extractor, images, root, device)  # another run may have filled it in the meantime
            if not _is_complete(folder):
                frozen = extractor.to(device).eval()
                batches = (run or run_locally)(frozen, images, batch, device)
                _fill(folder, len(images), lambda path: _write_arrays(frozen, batches, len(images), path, progress))
    return _open(folder)


def _entry(key: str, extractor: Extractor, images: Images, root: Path, device: torch.device) -> Path:
    """The folder of these features: the first numbered one that is missing or has the outputs of this base's code."""
    folders = (root / (f"{key}-{number}" if number else key) for number in count())
    return next(folder for folder in folders if not _is_complete(folder) or _matches(folder, extractor, images, device))


def _is_complete(folder: Path) -> bool:
    return (folder / "done.json").exists()


def _matches(folder: Path, extractor: Extractor, images: Images, device: torch.device) -> bool:
    """Whether a complete entry holds the outputs that the base has now for the first images."""
    cached = _open(folder)
    saved = [values[: probe.IMAGES] for values in (cached.logits, *cached.taps)]
    return probe.agree(probe.outputs(extractor, images[: probe.IMAGES], device), saved)


def _open(folder: Path) -> Features:
    names = json.loads((folder / "done.json").read_text())["taps"]
    return Features(
        taps=[np.load(folder / name, mmap_mode="r") for name in names],
        logits=np.load(folder / "logits.npy", mmap_mode="r"),
        folder=folder,
    )


def _fill(folder: Path, count: int, write_arrays: Callable[[Path], list[str]]) -> None:
    """Write a complete entry for `count` images. The caller holds the lock of its key."""
    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)  # left by a run that was killed
    partial.mkdir()
    try:
        names = write_arrays(partial)
        (partial / "done.json").write_text(json.dumps({"taps": names, "images": count}))
        shutil.rmtree(folder, ignore_errors=True)  # a folder without done.json is not a complete entry
        partial.replace(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@torch.inference_mode()
def run_locally(
    extractor: Extractor, images: Images, batch: int, device: torch.device
) -> Iterator[tuple[Tensor, list[Tensor]]]:
    """Logits (N, K) and taps (N, D_j) of each batch of images, computed on this machine."""
    for start in range(0, len(images), batch):
        yield extractor(torch.from_numpy(images[start : start + batch]).to(device))


@torch.inference_mode()
def _write_arrays(
    extractor: Extractor,
    batches: Iterator[tuple[Tensor, list[Tensor]]],
    count: int,
    folder: Path,
    progress: Callable[[int], None] | None,
) -> list[str]:
    """Write the batches of `count` images as .npy files; returns the file names of the taps."""
    names = [f"tap{index}.npy" for index in range(len(extractor.tapped.names))]
    paths = [folder / name for name in names]
    files: list[Any] = []
    start = 0
    for logits, taps in batches:
        part = slice(start, start + len(logits))
        if not torch.isfinite(logits).all():
            raise ModelError("The base returns logits that are not finite; check its weights and the normalisation.")
        if not start:
            logits_file = _create(folder / "logits.npy", (count, logits.shape[1]), np.float32)
            files = [_create_for(path, count, tap) for path, tap in zip(paths, taps, strict=True)]
        logits_file[part] = logits.float().cpu().numpy()
        for index, (name, tap) in enumerate(zip(extractor.tapped.names, taps, strict=True)):
            largest = _largest(name, tap)
            if files[index].dtype == np.float16 and largest > _MAX_HALF:
                files[index] = _widened(paths[index], files[index])
            half = files[index].dtype == np.float16
            files[index][part] = (tap.half() if half else tap.float()).cpu().numpy()
        start += len(logits)
        if progress:
            progress(len(logits))
    for file in [*files, logits_file]:
        file.flush()
    return names


def _largest(name: str, tap: Tensor) -> float:
    """The largest absolute value of a tap, which must be finite."""
    largest = float(tap.abs().amax())
    if not math.isfinite(largest):
        raise ModelError(f"Tap {name!r} reaches {largest}; check the base's weights and the normalisation.")
    return largest


def _create_for(path: Path, count: int, first: Tensor) -> Any:
    """A file for the tap of `count` images, in half precision if the values of the first images (N, D) allow it."""
    sizes = first.abs()
    nonzero = sizes[sizes > 0]
    typical = float(nonzero.median()) if len(nonzero) else 1.0
    half = float(sizes.amax()) <= _MAX_HALF and typical >= _MIN_HALF_MEDIAN
    return _create(path, (count, first.shape[1]), np.float16 if half else np.float32)


def _widened(path: Path, half: Any) -> Any:
    """Replace the file of `half` by one with the same values in single precision."""
    path.unlink()
    single = _create(path, half.shape, np.float32)
    single[:] = half
    return single


def _create(path: Path, shape: tuple[int, int], dtype: Any) -> Any:
    return np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=shape)
