"""Download the paper's public data sets with torchvision, and store them as npz files.

A mirror has one folder per data set, with the files under their publishers' names; torchvision verifies its checksums
there too: MIRROR/mnist/train-images-idx3-ubyte.gz, MIRROR/cifar10/cifar-10-python.tar.gz,
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
from qualms_training.data.sources.npz import DOWNLOADABLE, file_name, write_npz
from qualms_training.errors import DataError
from qualms_training.models.libraries.torchvision_compat import import_torchvision

SPLITS = ("train", "test")
_DIGITS = tuple("0123456789")
_TIMEOUT = 60.0  # seconds without a byte from the server
_ERRORS = (
    OSError,
    RuntimeError,
    ValueError,
    EOFError,
    http.client.HTTPException,
    tarfile.TarError,
    zipfile.BadZipFile,
)


def download(name: str, out: Path, mirror: str | None = None) -> list[Path]:
    """Download both splits of a data set to `out` as npz files and return their paths.

    Existing files are not downloaded again. `mirror`, or else QUALMS_MIRROR, replaces the publishers' addresses.
    """
    if name not in DOWNLOADABLE:
        raise DataError(f"Data set {name!r} cannot be downloaded; accepted are {', '.join(DOWNLOADABLE)}.")
    paths = [out / file_name(name, split) for split in SPLITS]
    if all(path.exists() for path in paths):
        return paths
    base = mirror or os.environ.get("QUALMS_MIRROR")
    source = _source(name, base)
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".download-", dir=out) as raw, _socket_timeout(_TIMEOUT):
            for split, path in zip(SPLITS, paths, strict=True):
                if not path.exists():
                    write_npz(out, _read(name, split, source(raw, download=True, **_arguments(name, split))))
    except _ERRORS as error:
        raise DataError(
            f"Data set {name!r} could not be downloaded from {base or 'its publisher'} to {out}: "
            f"{' '.join(str(error).split()).rstrip('.')}; check the network and the folder, "
            "or name a mirror with --mirror or QUALMS_MIRROR."
        ) from error
    return paths


def _source(name: str, mirror: str | None) -> Any:
    """torchvision's class for a data set, or a subclass of the same name that downloads from the mirror."""
    original = getattr(import_torchvision().datasets, DOWNLOADABLE[name])
    if mirror is None:
        return original
    base = f"{mirror.rstrip('/')}/{name}"
    if name == "omniglot":
        addresses: dict[str, Any] = {"download_url_prefix": base}
    elif name == "svhn":
        files = original.split_list.items()
        addresses = {"split_list": {split: [f"{base}/{file}", file, md5] for split, (_, file, md5) in files}}
    elif name.startswith("cifar"):
        addresses = {"url": f"{base}/{original.filename}"}
    else:
        addresses = {"mirrors": [f"{base}/"]}
    return type(original.__name__, (original,), addresses)


def _arguments(name: str, split: str) -> dict[str, Any]:
    if name == "svhn":
        return {"split": split}
    return {"background" if name == "omniglot" else "train": split == "train"}


def _read(name: str, split: str, data: Any) -> ImageSet:
    """Convert a torchvision data set to uint8 (N, H, W[, C]) images, int64 labels and class names."""
    if name == "omniglot":
        return _read_omniglot(split, Path(data.target_folder))
    if name == "svhn":
        images, labels = data.data.transpose(0, 2, 3, 1), data.labels
    else:
        images, labels = np.asarray(data.data), data.targets
    classes = _DIGITS if name in ("mnist", "svhn") else tuple(data.classes)
    return ImageSet(name, split, np.ascontiguousarray(images), np.asarray(labels, dtype=np.int64), classes)


def _read_omniglot(split: str, folder: Path) -> ImageSet:
    """Read ALPHABET/CHARACTER/*.png in sorted order; torchvision uses the file system's order."""
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
def _socket_timeout(seconds: float) -> Iterator[None]:
    """Set a timeout for downloads, because torchvision sets none."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(seconds)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)
