"""Data sets by name: drawn by our own code, read from class folders, read from npz files, or given as objects."""

import os
from pathlib import Path
from typing import TypeAlias

from qualms_training.data.class_lists import in_class_order
from qualms_training.data.dataset import Images, ImageSet
from qualms_training.data.layout import find_layout
from qualms_training.data.sources import synthetic
from qualms_training.data.sources.folder import check_folder, has_images, read_class_folders, read_flat_folder
from qualms_training.data.sources.given_sets import GivenSets
from qualms_training.data.sources.npz import DOWNLOADABLE, read_npz
from qualms_training.errors import DataError

__all__ = ["DataSource", "ImageSet", "load", "load_ood"]

_FOLDER = "folder:"
DataSource: TypeAlias = Path | GivenSets | None
"""the folder of npz files, or objects in Python; None for the folder in QUALMS_DATA"""


def load(name: str, split: str, data_dir: DataSource = None, classes: list[str] | None = None) -> ImageSet:
    """Load one split, `train` or `test`, of a data set with labels.

    `name` is a synthetic set, `folder:PATH` for a folder of class folders (see `qualms_training.data.layout`), the NAME of files
    NAME-SPLIT.npz in `data_dir`, or the name of one of the given sets. Labels are indices into `classes` if they are given,
    else in the order of the data set.
    """
    images = _load(name, split, data_dir)
    return images if classes is None else in_class_order(images, classes)


def load_ood(name: str, data_dir: DataSource = None) -> Images:
    """Load an OOD set: the split `test`, or all images of a folder without splits; labels are not needed."""
    if isinstance(data_dir, GivenSets) and (given := data_dir.find(name, "test")) is not None:
        return given
    if not name.startswith(_FOLDER):
        return load(name, "test", data_dir)
    root = _folder(name)
    check_folder(root)
    if has_images(root):
        return read_flat_folder(root, "test")
    layout = find_layout(root)
    if layout.undivided is not None:
        return read_class_folders(layout.undivided, root.name, "test")
    return layout.read("test")


def _load(name: str, split: str, data_dir: DataSource) -> ImageSet:
    if isinstance(data_dir, GivenSets):
        given = data_dir.find(name, split)
        if given is None:
            return _load(name, split, data_dir.data_dir)
        if not isinstance(given, ImageSet):
            raise DataError(f"{given.title} has no labels, and labels are needed here.")
        return given
    if name in synthetic.SETS:
        return synthetic.draw(name, split)
    if name.startswith(_FOLDER):
        return find_layout(_folder(name)).read(split)
    folder = data_dir or os.environ.get("QUALMS_DATA")
    if not folder:
        download = f" (`qualms data {name} --out DIR` fills it)" if name in DOWNLOADABLE else ""
        raise DataError(
            f"There is no folder {name!r}, and a data set of this name needs a data folder: name one with --data or "
            f"QUALMS_DATA{download}, give folder:PATH for a folder of class folders, "
            f"or use a synthetic set ({', '.join(synthetic.SETS)})."
        )
    return read_npz(Path(folder).expanduser(), name, split)


def _folder(name: str) -> Path:
    return Path(name.removeprefix(_FOLDER)).expanduser()
