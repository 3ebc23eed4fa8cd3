"""The paper's public data sets, fetched by torchvision and kept as npz, so that nobody converts by hand.

A mirror holds one folder a set, with the files as their publishers name them, and torchvision's
checksums hold there too: MIRROR/mnist/train-images-idx3-ubyte.gz, MIRROR/cifar10/cifar-10-python.tar.gz,
MIRROR/omniglot/images_evaluation.zip, MIRROR/svhn/test_32x32.mat and so on.
"""

import http.client
import os
import socket
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from qualms_training.data.dataset import ImageSet
from qualms_training.data.npz import file_name, write_npz
from qualms_training.data.public_sets import SOURCES
from qualms_training.errors import DataError
from qualms_training.models.torchvision_compat import import_torchvision

NAMES = tuple(SOURCES)
SPLITS = ("train", "test")
_DIGITS = tuple("0123456789")
_SILENCE = 60.0  # seconds without a byte before a server is given up
_FAILURES = (
    OSError,
    RuntimeError,
    ValueError,
    EOFError,
    http.client.HTTPException,
    tarfile.TarError,
    zipfile.BadZipFile,
)


def download(name: str, out: Path, mirror: str | None = None) -> list[Path]:
    """Fetch both splits of a set into `out` as npz files and return their paths.

    Files already there are kept.     `mirror`, or else QUALMS_MIRROR, replaces the publishers' addresses.
    """
    if name not in SOURCES:
        raise DataError(f"Data set {name!r} cannot be downloaded; accepted are {', '.join(NAMES)}.")
    paths = [out / file_name(name, split) for split in SPLITS]
    if all(path.exists() for path in paths):
        return paths
    base = mirror or os.environ.get("QUALMS_MIRROR")
    source = _source(name, base)
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".download-", dir=out) as raw, _patience(_SILENCE):
            for split, path in zip(SPLITS, paths, strict=True):
                if not path.exists():
                    write_npz(out, _read(name, split, source(raw, download=True, **_arguments(name, split))))
    except _FAILURES as error:
        raise DataError(
            f"Data set {name!r} could not be downloaded from {base or 'its publisher'} to {out}: "
            f"{' '.join(str(error).split()).rstrip('.')}; check the network and the folder, "
            "or name a mirror with --mirror or QUALMS_MIRROR."
        ) from error
    return paths


def _source(name: str, mirror: str | None) -> Any:
    """torchvision's class for a set, or a subclass of the same name that looks for files at the mirror."""
    original = getattr(import_torchvision().datasets, SOURCES[name])
    if mirror is None:
        return original
    base = f"{mirror.rstrip('/')}/{name}"
    if name == "omniglot":
        moved: dict[str, Any] = {"download_url_prefix": base}
    elif name == "svhn":
        files = original.split_list.items()
        moved = {"split_list": {split: [f"{base}/{file}", file, md5] for split, (_, file, md5) in files}}
    elif name.startswith("cifar"):
        moved = {"url": f"{base}/{original.filename}"}
    else:
        moved = {"mirrors": [f"{base}/"]}
    return type(original.__name__, (original,), moved)


def _arguments(name: str, split: str) -> dict[str, Any]:
    if name == "svhn":
        return {"split": split}
    return {"background" if name == "omniglot" else "train": split == "train"}


def _read(name: str, split: str, data: Any) -> ImageSet:
    """Bring a torchvision data set to uint8 (N, H, W[, C]) images, int64 labels and class names."""
    if name == "omniglot":
        return _read_omniglot(split, Path(data.target_folder))
    if name == "svhn":
        images, labels = data.data.transpose(0, 2, 3, 1), data.labels
    else:
        images, labels = np.asarray(data.data), data.targets
    classes = _DIGITS if name in ("mnist", "svhn") else tuple(data.classes)
    return ImageSet(name, split, np.ascontiguousarray(images), np.asarray(labels, dtype=np.int64), classes)


def _read_omniglot(split: str, folder: Path) -> ImageSet:
    """Read ALPHABET/CHARACTER/*.png in sorted order; torchvision's own order is the file system's."""
    characters = sorted(folder.glob("*/*"))
    images, labels = [], []
    for label, character in enumerate(characters):
        for path in sorted(character.glob("*.png")):
            with Image.open(path) as image:
                images.append(np.array(image.convert("L")))
            labels.append(label)
    classes = tuple(f"{character.parent.name}/{character.name}" for character in characters)
    return ImageSet("omniglot", split, np.stack(images), np.array(labels, dtype=np.int64), classes)


@contextmanager
def _patience(seconds: float) -> Iterator[None]:
    """Bound how long a silent server is waited for; torchvision itself would wait for ever."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(seconds)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)
