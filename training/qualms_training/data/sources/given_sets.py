"""Data sets that are objects in Python: they are given where a data folder is, and loaded by name like all others."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from qualms_training.data.dataset import Images


@dataclass(frozen=True)
class GivenSets:
    """Image sets by name and split, and the data folder for all other names.

    An OOD set has the split `test`.
    """

    sets: Mapping[tuple[str, str], Images]
    data_dir: Path | None = field(default=None)

    def find(self, name: str, split: str) -> Images | None:
        """The set with a name and a split; None if it is not among them."""
        return self.sets.get((name, split))
