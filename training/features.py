"""The feature cache: the frozen base runs once, and its tapped features are memory-mapped ever after.

The key is a digest of all that decides the features: the base's weights, the very pixels it was shown (and so
the data, its order and its preprocessing), the normalisation, the taps and how they are reduced. A cache is
written in a folder of a temporary name that is renamed when complete, so a half-written one is never read.
"""

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from training.errors import ModelError
from training.files import fingerprint
from training.meta import Reduce
from training.models import identity
from training.normalise import Normalise
from training.taps import Tapped

FORMAT = 1
_HALF_MAX = 60_000.0


@dataclass(frozen=True)
class Features:
    """What the base says about N images."""

    taps: list[NDArray[Any]]
    """(N, D_j) each, float16 or float32, memory-mapped"""
    logits: NDArray[np.float32]
    """(N, K), memory-mapped"""
    folder: Path

    @property
    def bytes(self) -> int:
        """Size on disk."""
        return sum(file.stat().st_size for file in self.folder.iterdir())

    def batch(self, indices: NDArray[np.int64], device: torch.device) -> list[Tensor]:
        """The reduced taps of some images, float32."""
        return [torch.from_numpy(np.asarray(tap[indices], dtype=np.float32)).to(device) for tap in self.taps]


class Extractor(nn.Module):
    """Images to logits and reduced taps: the frozen part of the bundle's graph."""

    def __init__(self, normalise: Normalise, tapped: Tapped, reduce: Reduce) -> None:
        super().__init__()
        self.normalise = normalise
        self.tapped = tapped
        self.reduce = reduce

    def forward(self, images: Tensor) -> tuple[Tensor, list[Tensor]]:
        """uint8 (N, H, W, C) to logits (N, K) and one (N, D_j) a tap."""
        logits, taps = self.tapped(self.normalise(images))
        return logits, [self.reduce(tap) for tap in taps]


def cache_key(extractor: Extractor, images: NDArray[np.uint8]) -> str:
    """Changes with base weights, pixels, normalisation, taps, reduction and the cache's format."""
    pixels = hashlib.sha256(np.ascontiguousarray(images).data).hexdigest()
    return fingerprint(
        FORMAT,
        type(extractor.tapped.base).__qualname__,
        identity(extractor.tapped.base),
        [list(images.shape), pixels],
        [extractor.normalise.scale.tolist(), extractor.normalise.shift.tolist()],
        list(extractor.tapped.names),
        extractor.reduce.key,
    )


def cached_features(
    extractor: Extractor,
    images: NDArray[np.uint8],
    root: Path,
    device: torch.device,
    *,
    batch: int = 256,
    progress: Callable[[int], None] | None = None,
) -> Features:
    """Features of images (N, H, W, C), from `root` if they are there, else computed and put there."""
    folder = root / cache_key(extractor, images)
    if not (folder / "done.json").exists():
        _write(extractor, images, folder, device, batch, progress)
    return open_features(folder)


def open_features(folder: Path) -> Features:
    """Map a complete cache."""
    names = json.loads((folder / "done.json").read_text())["taps"]
    return Features(
        taps=[np.load(folder / name, mmap_mode="r") for name in names],
        logits=np.load(folder / "logits.npy", mmap_mode="r"),
        folder=folder,
    )


def _write(
    extractor: Extractor,
    images: NDArray[np.uint8],
    folder: Path,
    device: torch.device,
    batch: int,
    progress: Callable[[int], None] | None,
) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    _sweep(folder)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        with _claimed(temporary):
            names = _fill(extractor.to(device).eval(), images, temporary, device, batch, progress)
        (temporary / "done.json").write_text(json.dumps({"taps": names, "images": len(images)}))
        if folder.exists():  # left without done.json by something that is not this program
            shutil.rmtree(folder)
        temporary.replace(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _sweep(folder: Path) -> None:
    """Remove what killed runs left half-written for this key, but nothing that another run is writing now."""
    for leftover in folder.parent.glob(f".{folder.name}.*"):
        with suppress(FileNotFoundError), _claimed(leftover) as ours:
            if ours:
                shutil.rmtree(leftover, ignore_errors=True)


@contextmanager
def _claimed(folder: Path) -> Iterator[bool]:
    """Lock a folder, and say whether that worked; the lock goes with the process, however it ends."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(handle)


@torch.inference_mode()
def _fill(
    extractor: Extractor,
    images: NDArray[np.uint8],
    folder: Path,
    device: torch.device,
    batch: int,
    progress: Callable[[int], None] | None,
) -> list[str]:
    """Run the base over everything and write .npy files; their names."""
    first_logits, first_taps = extractor(torch.from_numpy(images[:1]).to(device))
    names = [f"tap{index}.npy" for index in range(len(first_taps))]
    widths = [tap.shape[1] for tap in first_taps]
    # Half precision is harmless for features of ordinary size; the check below makes sure they are.
    files = [
        _create(folder / name, (len(images), width), np.float16) for name, width in zip(names, widths, strict=True)
    ]
    logits_file = _create(folder / "logits.npy", (len(images), first_logits.shape[1]), np.float32)
    largest = [0.0] * len(names)
    for start in range(0, len(images), batch):
        part = slice(start, start + batch)
        logits, taps = extractor(torch.from_numpy(images[part]).to(device))
        if not torch.isfinite(logits).all():
            raise ModelError("The base gives logits that are not finite; check its weights and the normalisation.")
        logits_file[part] = logits.float().cpu().numpy()
        for index, tap in enumerate(taps):
            largest[index] = float(np.maximum(largest[index], float(tap.abs().amax())))  # max() would lose a NaN
            files[index][part] = tap.float().clamp(-_HALF_MAX, _HALF_MAX).half().cpu().numpy()
        if progress:
            progress(len(logits))
    _check_range(largest, extractor.tapped.names)
    for file in [*files, logits_file]:
        file.flush()
    return names


def _create(path: Path, shape: tuple[int, int], dtype: Any) -> Any:
    return np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=shape)


def _check_range(largest: Sequence[float], names: Sequence[str]) -> None:
    for value, name in zip(largest, names, strict=True):
        if not value <= _HALF_MAX:
            raise ModelError(
                f"Tap {name!r} reaches {value:.3g}, and the feature cache holds values up to {_HALF_MAX:,.0f}."
            )
