"""The user's own images by path: a folder of class folders, a flat folder without labels, or a NAME-SPLIT.npz file."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from qualms_training.data.dataset import Images, ImageSet
from qualms_training.data.sources.folder import has_images, read_flat_folder, read_folder
from qualms_training.data.sources.npz import read_npz
from qualms_training.errors import DataError, did_you_mean


def read_images(path: Path, split: str) -> Images:
    """The images at `path`; an ImageSet if they have labels."""
    if path.is_dir():
        return read_flat_folder(path, split) if has_images(path) else read_folder(path, split)
    if path.suffix != ".npz" and not path.exists():
        near = [one.name for one in path.parent.iterdir()] if path.parent.is_dir() else []
        raise DataError(
            f"There is no folder {str(path)!r}{did_you_mean(path.name, near)} Images are a folder of class folders, or a "
            "NAME-SPLIT.npz file."
        )
    name, dash, in_name = path.stem.rpartition("-")
    if path.suffix != ".npz" or not dash:
        raise DataError(
            f"Data {str(path)!r} is neither a folder of images, a folder of class folders, nor a NAME-SPLIT.npz file."
        )
    return read_npz(path.parent, name, in_name)


def read_labelled_images(path: Path, split: str) -> ImageSet:
    """The images at `path`; DataError if they have no labels."""
    images = read_images(path, split)
    if not isinstance(images, ImageSet):
        raise DataError(f"Folder {path} has images without class folders, and labels are needed here.")
    return images


def without_labels(path: Path, split: str) -> Images:
    """The images at `path`, wherever they are below it; labels are ignored."""
    if path.is_dir():
        return read_flat_folder(path, split, recursive=True)
    images = read_images(path, split)
    return Images(images.name, images.split, images.images)


def labels_by_name(images: ImageSet, classes: list[str]) -> NDArray[np.int64]:
    """Labels (N,) as indices into a model's classes, matched by name."""
    if unknown := [name for name in images.classes if name not in classes]:
        raise DataError(
            f"{images.title} has the class {unknown[0]!r}, which the model does not have; "
            f"its classes are {', '.join(classes)}."
        )
    return np.array([classes.index(name) for name in images.classes], dtype=np.int64)[images.labels]
