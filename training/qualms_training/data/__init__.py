"""Where a data set's name is turned into images, so that recipes and commands need only the name."""

import os
from pathlib import Path

from qualms_training.data import synthetic
from qualms_training.data.dataset import ImageSet
from qualms_training.data.folder import read_folder
from qualms_training.data.npz import read_npz
from qualms_training.data.public_sets import SOURCES
from qualms_training.errors import DataError

__all__ = ["ImageSet", "load"]

_FOLDER = "folder:"


def load(name: str, split: str, data_dir: Path | None = None) -> ImageSet:
    """Load one split of a set: one we draw, `folder:PATH` of class folders, or `NAME-SPLIT.npz`.

    The npz files are looked for in `data_dir`, or else in the folder that QUALMS_DATA names.
    """
    if name in synthetic.SETS:
        return synthetic.draw(name, split)
    if name.startswith(_FOLDER):
        return read_folder(Path(name.removeprefix(_FOLDER)).expanduser(), split)
    folder = data_dir or os.environ.get("QUALMS_DATA")
    if not folder:
        fetch = f" (`qualms data {name} --out DIR` fills it)" if name in SOURCES else ""
        raise DataError(
            f"Data set {name!r} needs a data folder: name one with --data or QUALMS_DATA{fetch}, "
            f"give folder:PATH for a folder of class folders, or use a set that needs none ({', '.join(synthetic.SETS)})."
        )
    return read_npz(Path(folder).expanduser(), name, split)
