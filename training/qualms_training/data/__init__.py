"""Data sets by name: drawn by our own code, read from class folders, or read from npz files."""

import os
from pathlib import Path

from qualms_training.data import synthetic
from qualms_training.data.dataset import ImageSet
from qualms_training.data.folder import read_folder
from qualms_training.data.npz import DOWNLOADABLE, read_npz
from qualms_training.errors import DataError

__all__ = ["ImageSet", "load"]

_FOLDER = "folder:"


def load(name: str, split: str, data_dir: Path | None = None) -> ImageSet:
    """Load one split of a data set.

    `name` is a synthetic set, `folder:PATH` for a folder of class folders, or the NAME of files NAME-SPLIT.npz in
    `data_dir` (default: the folder in the environment variable QUALMS_DATA).
    """
    if name in synthetic.SETS:
        return synthetic.draw(name, split)
    if name.startswith(_FOLDER):
        return read_folder(Path(name.removeprefix(_FOLDER)).expanduser(), split)
    folder = data_dir or os.environ.get("QUALMS_DATA")
    if not folder:
        download = f" (`qualms data {name} --out DIR` fills it)" if name in DOWNLOADABLE else ""
        raise DataError(
            f"Data set {name!r} needs a data folder: name one with --data or QUALMS_DATA{download}, "
            f"give folder:PATH for a folder of class folders, or use a synthetic set ({', '.join(synthetic.SETS)})."
        )
    return read_npz(Path(folder).expanduser(), name, split)
