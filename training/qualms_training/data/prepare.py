"""Bring a recipe's data to the model's input, all of it through the one preprocessing path."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qualms_training.console import Display
from qualms_training.data import ImageSet, load
from qualms_training.data.noise import corrupt
from qualms_training.data.splits import make_splits, splits_record
from qualms_training.errors import DataError
from qualms_training.recipe import Recipe

CORRUPTED = "corrupted"


def itself(name: str) -> str:
    """What the column of the in-distribution set against itself is called."""
    return f"{name} (itself)"


@dataclass(frozen=True)
class Part:
    """Images as the model takes them, with their labels."""

    images: NDArray[np.uint8]
    """(N, H, W, C)"""
    labels: NDArray[np.int64]
    """(N,)"""


@dataclass(frozen=True)
class PreparedData:
    """The in-distribution data of one run, by split."""

    parts: dict[str, Part]
    """train, validation, fit, calibration and test: disjoint"""
    classes: tuple[str, ...]
    record: dict[str, Any]
    """what provenance keeps: sets, digests, sizes and seed"""


def prepare(recipe: Recipe, seed: int, data_dir: Path | None, display: Display) -> PreparedData:
    """Load, split by `seed` and conform the in-distribution data."""
    recipe.check_seed(seed)
    train, test = (load(recipe.data.id, split, data_dir) for split in ("train", "test"))
    digests = {"train": train.digest(), "test": test.digest()}
    _check_pair(train, test, digests)
    sizes = recipe.data.splits.model_dump()
    if recipe.data.held_out == "train":
        chosen = make_splits(len(train), sizes, seed)
        sources = {name: (train, indices) for name, indices in chosen.items()}
        sources["test"] = (test, np.arange(len(test)))
        splits = [splits_record(chosen, len(train), seed)]
    else:
        seen = make_splits(len(train), {name: sizes[name] for name in ("train", "validation")}, seed)
        unseen = make_splits(len(test), {name: sizes[name] for name in ("fit", "calibration")}, seed)
        rest = np.setdiff1d(np.arange(len(test)), np.concatenate(list(unseen.values())))
        if not len(rest):
            raise DataError(f"{test.title} has {len(test)} images, and fit and calibration leave none to test on.")
        sources = {name: (train, indices) for name, indices in seen.items()}
        sources |= {name: (test, indices) for name, indices in (*unseen.items(), ("test", rest))}
        splits = [splits_record(seen, len(train), seed), splits_record(unseen, len(test), seed)]
    return PreparedData(
        parts={name: _conform(recipe, name, source, indices, display) for name, (source, indices) in sources.items()},
        classes=train.classes,
        record={
            "id": recipe.data.id,
            "held_out": recipe.data.held_out,
            "sha256": digests,
            "splits": splits,
        },
    )


def ood_sets(recipe: Recipe, test: Part, data_dir: Path | None, display: Display) -> dict[str, NDArray[np.uint8]]:
    """The OOD sets (N, H, W, C), the same ones for every seed as long as `test` is the same.

    Half of the in-distribution test set goes the same way, as `<id> (itself)`: whatever tells it from the test
    set is an artefact of this path, so its AUROC has to be 50.
    """
    found = {}
    for name in recipe.data.ood:
        source = load(name, "test", data_dir)
        order = np.random.default_rng(0).permutation(len(source))[: recipe.data.limit]
        found[name] = _conform(recipe, name, source, np.sort(order), display).images
    if recipe.data.corrupted:
        found[CORRUPTED] = corrupt(test.images[: recipe.data.limit], np.random.default_rng(0))
    source = load(recipe.data.id, "test", data_dir)
    half = itself_half(len(source))
    found[itself(recipe.data.id)] = _conform(recipe, recipe.data.id, source, half, display).images
    return found


def itself_half(count: int) -> NDArray[np.int64]:
    """Which of `count` in-distribution test images are shown as strangers."""
    return np.sort(np.random.default_rng(1).permutation(count)[: (count + 1) // 2])


def _check_pair(train: ImageSet, test: ImageSet, digests: dict[str, str]) -> None:
    """Labels must mean the same in both sets, and images of one must not be those of the other."""
    if len(train.classes) < 2 or len(set(train.classes)) < len(train.classes):
        raise DataError(
            f"{train.title} has the classes {', '.join(train.classes)}; at least two are needed, all different."
        )
    if train.classes != test.classes:
        differing = sorted(set(train.classes) ^ set(test.classes)) or ["their order"]
        raise DataError(
            f"{train.title} and its split 'test' must have the same classes; they differ in {', '.join(differing[:5])}."
        )
    if digests["train"] == digests["test"]:
        raise DataError(
            f"{train.title} is also its split 'test', image for image, so nothing would be unseen; "
            "give each a folder or file of its own, such as FOLDER/train/CLASS and FOLDER/test/CLASS."
        )


def _conform(recipe: Recipe, title: str, source: ImageSet, indices: NDArray[np.int64], display: Display) -> Part:
    with display.bar(f"reading {title}", len(indices)) as advance:
        images = source.conformed(recipe.input.spec, indices, advance)
    return Part(images, source.labels[indices])
