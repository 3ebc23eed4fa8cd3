"""The user's own data: a folder with one folder of images per class, or a flat folder of images without labels.

`qualms_training.data.layout` determines which folders are splits.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from qualms_training.data.dataset import Images, ImageSet
from qualms_training.errors import DataError

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")
_SIDECARS = ("thumbs.db", "desktop.ini")  # written by file managers; ignored like hidden files


def read_folder(root: Path, split: str) -> ImageSet:
    """List the images of ROOT/SPLIT/CLASS/… if that exists, else of ROOT/CLASS/…; they are decoded when needed.

    Classes and files are sorted by name, so the same folder always has the same labels and order.
    """
    check_folder(root)
    return read_class_folders(root / split if has_folders(root / split) else root, root.name, split)


def read_class_folders(top: Path, name: str, split: str) -> ImageSet:
    """List the images of TOP/CLASS/…, as a data set with a name and a split."""
    classes = _class_folders(top)
    paths, labels = [], []
    for label, folder in enumerate(classes):
        check_name(folder)
        images = list(_images(folder))
        if not images:
            raise DataError(f"Class folder {folder} has no images; remove it or add images ({', '.join(SUFFIXES)}).")
        paths += images
        labels += [label] * len(images)
    names = tuple(folder.name for folder in classes)
    return ImageSet(name, split, tuple(paths), np.array(labels, dtype=np.int64), names)


def check_folder(root: Path) -> None:
    """DataError if there is no such folder."""
    check_name(root)
    if not root.is_dir():
        raise DataError(f"Data folder {root} does not exist; a folder with one folder of images per class is needed.")


def check_name(path: Path) -> None:
    """DataError if a path is not UTF-8, in which manifests and recipes are written."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise DataError(
            f"The name of folder {str(path)!r} is not UTF-8, as names from old archives may be; rename it."
        ) from None


def has_images(root: Path) -> bool:
    """Whether the folder itself holds image files, so that they have no labels."""
    return any(entry.is_file() and entry.suffix.lower() in SUFFIXES for entry in _visible(root))


def read_flat_folder(root: Path, split: str, *, recursive: bool = False) -> Images:
    """List the images of ROOT, without labels, sorted by name; with `recursive`, also those of all folders below it.

    Without `recursive`, a folder within ROOT is an error: its images would silently be left out.
    """
    entries = sorted(root.rglob("*")) if recursive else list(_visible(root))
    paths = []
    for entry in entries:
        hidden = any(part.startswith(".") for part in entry.relative_to(root).parts) or entry.name.lower() in _SIDECARS
        if entry.is_dir() and not recursive:
            raise DataError(
                f"Folder {root} holds both images and the folder {entry.name}; accepted are images alone (no labels) or "
                "class folders alone. With --unlabelled, all images in it and below it are used without labels."
            )
        if hidden or entry.is_dir():
            continue
        if entry.suffix.lower() not in SUFFIXES:
            raise DataError(f"File {entry} does not have the suffix of an image; accepted are {', '.join(SUFFIXES)}.")
        paths.append(entry)
    if not paths:
        raise DataError(f"Folder {root} has no images; accepted are {', '.join(SUFFIXES)} files.")
    return Images(root.name or str(root), split, tuple(paths))


def _class_folders(top: Path) -> list[Path]:
    folders = []
    for entry in _visible(top):
        if entry.is_dir():
            folders.append(entry)
        elif entry.suffix.lower() in SUFFIXES:
            raise DataError(f"Image {entry} belongs to no class; images are accepted only in class folders.")
    if not folders:
        raise DataError(
            f"Data folder {top} has no class folders; one folder of images per class is needed (or, where labels are not, "
            "images directly in the folder)."
        )
    return folders


def _images(folder: Path) -> Iterator[Path]:
    for entry in _visible(folder):
        if entry.is_dir():
            raise DataError(
                f"Class folder {folder} holds the folder {entry.name}; "
                "accepted are FOLDER/CLASS/IMAGE and FOLDER/SPLIT/CLASS/IMAGE with the splits train, val and test."
            )
        if entry.suffix.lower() not in SUFFIXES:
            raise DataError(f"File {entry} does not have the suffix of an image; accepted are {', '.join(SUFFIXES)}.")
        yield entry


def _visible(folder: Path) -> Iterator[Path]:
    for entry in sorted(folder.iterdir(), key=lambda path: path.name):
        if not entry.name.startswith(".") and entry.name.lower() not in _SIDECARS:
            yield entry


def has_folders(folder: Path) -> bool:
    """Whether there is such a folder with folders in it."""
    return folder.is_dir() and any(entry.is_dir() for entry in _visible(folder))
