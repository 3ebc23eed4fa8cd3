"""The splits of a user's folder: those it has, or a division of its images if it has none.

Understood are ROOT/SPLIT/CLASS/IMAGE, where SPLIT is train, val or test or a usual synonym, and ROOT/CLASS/IMAGE. A folder
with the name of a split is one only if it holds class folders, so that a class may be called "train".
"""

import hashlib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from qualms.bundle.parts import Guarantee
from qualms_training.data.dataset import ImageSet
from qualms_training.data.sources.folder import check_folder, has_folders, read_class_folders
from qualms_training.data.split_sizes import HeldOut, Sizes, plan_sizes
from qualms_training.errors import DataError

Role: TypeAlias = Literal["train", "validation", "test"]
NAMES: dict[Role, tuple[str, ...]] = {
    "train": ("train", "training"),
    "validation": ("val", "valid", "validation", "dev"),
    "test": ("test", "testing", "eval"),
}
"""folder names of each split, in any case"""
POOLED = "#val+test"
"""at the end of a folder's name: validation and test images together are held out"""
SPLITS = ("train", "test")
ENOUGH_TEST = 2_000
"""test images from which on the validation images are not needed for calibration"""


@dataclass(frozen=True)
class FolderLayout:
    """Where the images of a folder are."""

    root: Path
    parts: dict[Role, Path]
    """the split folders; none if the class folders are in `root` itself"""
    pooled: bool = False
    """whether the validation images belong to the split `test`"""

    @property
    def undivided(self) -> Path | None:
        """The only folder of class folders, whose images are divided into two splits; None if there are several."""
        if len(self.parts) > 1:
            return None
        return next(iter(self.parts.values()), self.root)

    def sources(self, split: str) -> list[Path]:
        """The folders of class folders that make up the split `train` or `test`."""
        if self.undivided is not None:
            return [self.undivided]
        roles: list[Role] = ["train", "validation"] if split == "train" else ["test", "validation"]
        chosen = next(role for role in roles if role in self.parts)
        both = self.pooled and split == "test" and "train" in self.parts
        return [self.parts["validation"], self.parts["test"]] if both else [self.parts[chosen]]

    def with_pooled(self) -> "FolderLayout":
        """The layout in which validation and test images together are the split `test`."""
        return FolderLayout(self.root, self.parts, pooled=True)

    @property
    def id(self) -> str:
        """The name by which `qualms_training.data.load` reads the folder."""
        return f"folder:{self.root}{POOLED if self.pooled else ''}"

    def read(self, split: str) -> ImageSet:
        """The images of the split `train` or `test`, which share none."""
        if split not in SPLITS:
            raise DataError(f"Folder {self.root} has no split {split!r}; accepted are {' and '.join(SPLITS)}.")
        sets = [read_class_folders(folder, self.root.name, split) for folder in self.sources(split)]
        if self.undivided is not None:
            return _divided(sets[0], split)
        return sets[0] if len(sets) == 1 else _joined(sets)


def find_layout(root: Path) -> FolderLayout:
    """The layout of a folder; `root` may end in `#val+test` (see `POOLED`)."""
    if root.name.endswith(POOLED) and not root.is_dir():
        layout = find_layout(root.with_name(root.name.removesuffix(POOLED)))
        if not {"train", "validation", "test"} <= layout.parts.keys():
            raise DataError(f"Folder {layout.root} lacks one of train, val and test, which {POOLED!r} needs.")
        return layout.with_pooled()
    check_folder(root)
    parts: dict[Role, Path] = {}
    for role, names in NAMES.items():
        found = sorted(entry for entry in root.iterdir() if entry.name.lower() in names and has_folders(entry))
        if len(found) > 1:
            listed = " and ".join(entry.name for entry in found)
            raise DataError(
                f"Folder {root} has both {listed}, which mean the same split; rename or remove one of them."
            )
        if found:
            parts[role] = found[0]
    if len(parts) == 1:
        _check_alone(root, next(iter(parts.values())))
    return FolderLayout(root, parts)


def _check_alone(root: Path, part: Path) -> None:
    """DataError if another folder beside the only split may be a split: held-out images must not be taken from seen ones."""
    names = [name for names in NAMES.values() for name in names]
    for entry in sorted(root.iterdir()):
        if entry == part or entry.name.startswith(".") or not entry.is_dir():
            continue
        if has_folders(entry):
            raise DataError(
                f"Folder {root} has the split {part.name} and the folder {entry.name}, which has class folders and not the name "
                "of a split; name it train, val or test, or move it away."
            )
        if entry.name.lower() in names:
            raise DataError(
                f"Folder {root} has the split {part.name}, and {entry.name} without class folders; put its images into class "
                "folders, or move it away."
            )


@dataclass(frozen=True)
class SplitPlan:
    """How a recipe uses a folder: `data.id`, `data.held_out` and `data.splits`, and why."""

    id: str
    held_out: HeldOut
    splits: dict[str, int]
    """sizes of train, validation, fit and calibration"""
    test: int
    """number of test images"""
    explanation: list[str]
    """sentences: where each split comes from, and why"""


def plan_splits(
    layout: FolderLayout,
    *,
    weights_saw: Literal["all", "other-data"],
    target_fpr: float = 0.01,
    guarantee: Guarantee = "confident",
) -> SplitPlan:
    """Choose splits for a base that was trained on the training images (`all`) or on none of the images (`other-data`).

    DataError if there are too few images for the guarantee.
    """
    unpooled = layout.read("test")
    if {"train", "validation", "test"} <= layout.parts.keys() and len(unpooled) < ENOUGH_TEST:
        layout = layout.with_pooled()
    counts = len(layout.read("train")), len(layout.read("test"))
    sources = [" and ".join(map(str, layout.sources(split))) for split in SPLITS]
    titles = (f"Folder {sources[0]}", f"Folder {sources[1]}")
    if layout.undivided is not None:
        titles = (f"The first half of folder {sources[0]}", f"The second half of folder {sources[0]}")

    def sizes(held_out: HeldOut) -> Sizes:
        return plan_sizes(*counts, held_out=held_out, target_fpr=target_fpr, guarantee=guarantee, titles=titles)

    chosen = None
    if weights_saw == "other-data" and layout.undivided is None:
        with suppress(DataError):  # fewer training images than needed: the test images may be enough
            chosen = sizes("train")
    chosen = chosen or sizes("test")
    explanation = [*_explain_sources(layout, weights_saw, chosen, len(unpooled)), _explain_sizes(chosen, counts[0])]
    return SplitPlan(layout.id, chosen.held_out, chosen.splits, chosen.test, explanation)


def _explain_sources(layout: FolderLayout, weights_saw: str, sizes: Sizes, unpooled: int) -> list[str]:
    train, test = (" and ".join(map(str, layout.sources(split))) for split in SPLITS)
    if layout.undivided is not None:
        sentences = [
            f"{train} has no split folders, so the images of each class are divided in two by a hash of their names: one half for "
            "train and validation, the other for fit, calibration and test."
        ]
        if weights_saw == "all":
            sentences.append(
                "The calibration is valid only if the base was not trained on these images; if it was, put images that it has not "
                "seen into a folder val or test. If it has seen none of them, add --weights-saw other-data."
            )
        return sentences
    if sizes.held_out == "train":
        sentences = [
            f"The base was not trained on these images, so train, validation, fit and calibration images come from {train}, "
            f"and all images of {test} are test images."
        ]
    else:
        reason = (
            f"The base may have seen {train}" if weights_saw == "all" else f"{train} has too few images for all splits"
        )
        sentences = [
            f"{reason}, so fit, calibration and test images come from {test}; train and validation images come from {train}."
        ]
    if layout.pooled:
        sentences.append(
            f"{layout.parts['test']} alone has {unpooled:,} images, so {layout.parts['validation']} is added to it."
        )
    elif len(layout.parts) == len(NAMES):
        sentences.append(
            f"{layout.parts['validation']} is not used: the base may have been chosen with it, and "
            f"{layout.parts['test']} is large enough."
        )
    return sentences


def _explain_sizes(sizes: Sizes, available: int) -> str:
    splits = sizes.splits
    used = sum(splits.values()) if sizes.held_out == "train" else splits["train"] + splits["validation"]
    left = f" ({available - used:,} more are not used)" if used < available else ""
    return (
        f"{splits['train']:,} images train the meta-model{left}, {splits['validation']:,} stop its training, "
        f"{splits['fit']:,} fit the distribution of scores, {splits['calibration']:,} set thresholds and {sizes.test:,} test them."
    )


def _divided(images: ImageSet, split: str) -> ImageSet:
    """The larger half of each class as `train`, the other as `test`; adding images moves few others."""
    assert isinstance(images.images, tuple)  # images of a folder are paths
    keys = [_key(images.classes[label], path) for path, label in zip(images.images, images.labels, strict=True)]
    chosen = list[int]()
    for label in range(len(images.classes)):
        members = sorted(np.flatnonzero(images.labels == label).tolist(), key=keys.__getitem__)
        count = len(members) // 2
        chosen += members[count:] if split == "train" else members[:count]
    if not chosen:
        raise DataError(f"{images.title} has {len(images)} images and no split folders; each class needs two or more.")
    return _subset(images, np.sort(np.array(chosen, dtype=np.int64)))


def _key(label: str, path: Path) -> bytes:
    return hashlib.sha256(f"{label}/{path.name}".encode(errors="surrogateescape")).digest()


def _subset(images: ImageSet, indices: NDArray[np.int64]) -> ImageSet:
    assert isinstance(images.images, tuple)  # images of a folder are paths
    paths = tuple(images.images[index] for index in indices.tolist())
    return ImageSet(images.name, images.split, paths, images.labels[indices], images.classes)


def _joined(sets: list[ImageSet]) -> ImageSet:
    """Several sets of files as one, with all of their classes."""
    classes = sorted({name for images in sets for name in images.classes})
    paths = [path for images in sets if isinstance(images.images, tuple) for path in images.images]
    labels = [np.array([classes.index(name) for name in images.classes])[images.labels] for images in sets]
    return ImageSet(sets[0].name, sets[0].split, tuple(paths), np.concatenate(labels), tuple(classes))
