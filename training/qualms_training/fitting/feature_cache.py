"""The feature cache: the frozen base runs once, and its tapped features are memory-mapped ever after.

The key is a digest of all that decides the features: the base's weights, the very pixels it was shown (and so
the data, its order and its preprocessing), the normalisation, the taps and how they are reduced. The base's code is
not among them, so the first images are shown to the base again, and a cache that says otherwise is passed over. One is
written in a folder of a temporary name that is renamed when complete, so a half-written one is never read. Runs
that share a cache begin and finish one at a time, so none removes what another has made or is making.
"""

import fcntl
import hashlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from qualms_training.errors import ModelError
from qualms_training.files import fingerprint
from qualms_training.fitting import probe
from qualms_training.meta.meta_model import Reduce
from qualms_training.meta.normalise import Normalise
from qualms_training.meta.taps import Tapped
from qualms_training.models import identity

FORMAT = 1
_HALF_MAX = 60_000.0
_HALF_TYPICAL = 1e-3
"""half precision has its full eleven bits from 6e-5 on, and values spread well below what is typical"""


@dataclass(frozen=True)
class Features:
    """What the base says about N images."""

    taps: list[NDArray[Any]]
    """(N, D_j) each, float16 or, where that would lose something, float32; memory-mapped"""
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


def is_cached(extractor: Extractor, images: NDArray[np.uint8], root: Path, device: torch.device) -> bool:
    """Whether `root` holds the features of these images."""
    return _is_complete(_place(extractor, images, root, device))


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
    folder = _place(extractor, images, root, device)
    if not _is_complete(folder):
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
    with ExitStack() as stack:
        with _one_at_a_time(folder.parent):
            _sweep(folder)
            temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
            stack.enter_context(_claimed(temporary))
            stack.callback(shutil.rmtree, temporary, ignore_errors=True)
        names = _fill(extractor.to(device).eval(), images, temporary, device, batch, progress)
        (temporary / "done.json").write_text(json.dumps({"taps": names, "images": len(images)}))
        with _one_at_a_time(folder.parent):
            if not _is_complete(folder):  # else another run was faster
                shutil.rmtree(folder, ignore_errors=True)  # left without done.json by something else
                temporary.replace(folder)


def _place(extractor: Extractor, images: NDArray[np.uint8], root: Path, device: torch.device) -> Path:
    """Where these features are or will be: bases of the same weights and other code have places of their own."""
    key = cache_key(extractor, images)
    places = (root / (f"{key}-{number}" if number else key) for number in count())
    return next(folder for folder in places if not _is_complete(folder) or _holds(folder, extractor, images, device))


def _holds(folder: Path, extractor: Extractor, images: NDArray[np.uint8], device: torch.device) -> bool:
    """Whether a complete cache says of the first images what the base says now."""
    kept = open_features(folder)
    found = said(extractor, images[: probe.IMAGES], device)
    return probe.agree(found, [values[: probe.IMAGES] for values in (kept.logits, *kept.taps)])


@torch.inference_mode()
def said(extractor: Extractor, images: NDArray[np.uint8], device: torch.device) -> list[NDArray[np.float32]]:
    """Logits and reduced taps of some images."""
    logits, taps = extractor.to(device).eval()(torch.from_numpy(images).to(device))
    return [values.float().cpu().numpy() for values in (logits, *taps)]


def _is_complete(folder: Path) -> bool:
    return (folder / "done.json").exists()


def _sweep(folder: Path) -> None:
    """Remove what killed runs left half-written for this key, but nothing that another run is writing now."""
    for leftover in folder.parent.glob(f".{folder.name}.*"):
        with suppress(FileNotFoundError), _claimed(leftover) as ours:
            if ours:
                shutil.rmtree(leftover, ignore_errors=True)


@contextmanager
def _claimed(folder: Path) -> Iterator[bool]:
    """Lock a folder, and say whether that worked; the lock goes with the process, however it ends."""
    with _opened(folder) as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


@contextmanager
def _one_at_a_time(root: Path) -> Iterator[None]:
    """Wait for the other runs that are beginning or finishing a cache below `root`."""
    with _opened(root) as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


@contextmanager
def _opened(folder: Path) -> Iterator[int]:
    handle = os.open(folder, os.O_RDONLY)
    try:
        yield handle
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
    names = [f"tap{index}.npy" for index in range(len(extractor.tapped.names))]
    paths = [folder / name for name in names]
    files: list[Any] = []
    for start in range(0, len(images), batch):
        part = slice(start, start + batch)
        logits, taps = extractor(torch.from_numpy(images[part]).to(device))
        if not torch.isfinite(logits).all():
            raise ModelError("The base gives logits that are not finite; check its weights and the normalisation.")
        if not start:
            logits_file = _create(folder / "logits.npy", (len(images), logits.shape[1]), np.float32)
            files = [_create_for(path, len(images), tap) for path, tap in zip(paths, taps, strict=True)]
        logits_file[part] = logits.float().cpu().numpy()
        for index, (name, tap) in enumerate(zip(extractor.tapped.names, taps, strict=True)):
            largest = _largest(name, tap)
            if files[index].dtype == np.float16 and largest > _HALF_MAX:
                files[index] = _widened(paths[index], files[index])
            half = files[index].dtype == np.float16
            files[index][part] = (tap.half() if half else tap.float()).cpu().numpy()
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
    """A file for `count` images' values of a tap, in half precision if those of the first images (N, D) allow it."""
    sizes = first.abs()
    seen = sizes[sizes > 0]
    typical = float(seen.median()) if len(seen) else 1.0
    half = float(sizes.amax()) <= _HALF_MAX and typical >= _HALF_TYPICAL
    return _create(path, (count, first.shape[1]), np.float16 if half else np.float32)


def _widened(path: Path, half: Any) -> Any:
    """The same values in a file of single precision, which takes the place of `half`."""
    path.unlink()
    single = _create(path, half.shape, np.float32)
    single[:] = half
    return single


def _create(path: Path, shape: tuple[int, int], dtype: Any) -> Any:
    return np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=shape)
