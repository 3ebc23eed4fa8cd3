"""Load and split a recipe's data, and preprocess all of it to the model's input in the same way."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qualms_training.console import Display
from qualms_training.data import DataSource, ImageSet, load, load_ood
from qualms_training.data.class_lists import missing_classes
from qualms_training.data.dataset import Images, Selection
from qualms_training.data.lazy_images import Pixels, first_images
from qualms_training.data.noise import corrupt
from qualms_training.data.splits import make_splits, splits_record
from qualms_training.errors import DataError
from qualms_training.recipe import Recipe

CORRUPTED = "corrupted"
MAX_SHARED = 0.05
"""share of the test images that may be training images too: some well-known data sets have a few"""


def itself(name: str) -> str:
    """The name of the OOD set that is made of the in-distribution test set itself, as a control."""
    return f"{name} (itself)"


@dataclass(frozen=True)
class LabelledSplit:
    """Preprocessed images with their labels."""

    images: Pixels
    """(N, H, W, C), in memory or decoded when they are used"""
    labels: NDArray[np.int64]
    """(N,)"""
    stored: Selection
    """the same images as they are stored"""


@dataclass(frozen=True)
class PreparedData:
    """The in-distribution data of one run."""

    parts: dict[str, LabelledSplit]
    """by split: train, validation, fit, calibration and test, which are disjoint"""
    classes: tuple[str, ...]
    record: dict[str, Any]
    """the data's entry in the provenance: name, digests, split sizes and seed"""


def prepare(recipe: Recipe, seed: int, data_dir: DataSource, display: Display) -> PreparedData:
    """Load the in-distribution data, split them with `seed`, and preprocess them."""
    recipe.check_seed(seed)
    train, test = (load(recipe.data.id, split, data_dir, recipe.data.classes) for split in ("train", "test"))
    if missing := missing_classes(train):
        display.note(
            f"  {len(missing):,} of {len(train.classes):,} classes have no training images: {', '.join(missing[:5])}"
            + (" …" if len(missing) > 5 else "")
        )
    digests = {"train": train.digest(), "test": test.digest()}
    _check_pair(train, test, digests)
    _check_shared(train, test, display)
    sizes = recipe.data.splits.model_dump()
    if recipe.data.held_out == "train":
        splits = make_splits(len(train), sizes, seed)
        sources = {name: (train, indices) for name, indices in splits.items()}
        sources["test"] = (test, np.arange(len(test)))
        records = [splits_record(splits, len(train), seed)]
    else:
        train_splits = make_splits(len(train), {name: sizes[name] for name in ("train", "validation")}, seed)
        test_splits = make_splits(len(test), {name: sizes[name] for name in ("fit", "calibration")}, seed)
        rest = np.setdiff1d(np.arange(len(test)), np.concatenate(list(test_splits.values())))
        if not len(rest):
            raise DataError(f"{test.title} has {len(test)} images, and fit and calibration leave none to test on.")
        sources = {name: (train, indices) for name, indices in train_splits.items()}
        sources |= {name: (test, indices) for name, indices in (*test_splits.items(), ("test", rest))}
        records = [splits_record(train_splits, len(train), seed), splits_record(test_splits, len(test), seed)]
    return PreparedData(
        parts={name: _part(recipe, name, source, indices, display) for name, (source, indices) in sources.items()},
        classes=train.classes,
        record={"id": recipe.data.id, "held_out": recipe.data.held_out, "sha256": digests, "splits": records},
    )


def ood_sets(
    recipe: Recipe,
    test: LabelledSplit,
    data_dir: DataSource,
    display: Display,
    stored: dict[str, Selection] | None = None,
) -> dict[str, Pixels]:
    """The OOD sets, (N, H, W, C) each; they do not depend on the seed if `test` does not.

    The last one, `<id> (itself)`, is half of the in-distribution test set. Its AUROC must be 50 %; any other value is an
    artefact of the way OOD sets are loaded and preprocessed. `stored` are the `stored_ood_sets`, if they are loaded already.
    """
    sets = dict[str, Pixels]()
    for name, selection in (stored or stored_ood_sets(recipe, test, data_dir)).items():
        sets[name] = _pixels(recipe, name, selection, display)
    source = load(recipe.data.id, "test", data_dir, recipe.data.classes)
    half = itself_half(len(source))
    sets[itself(recipe.data.id)] = _part(recipe, recipe.data.id, source, half, display).images
    return sets


def stored_ood_sets(recipe: Recipe, test: LabelledSplit, data_dir: DataSource) -> dict[str, Selection]:
    """The OOD sets as they are stored, without `<id> (itself)`."""
    sets = {}
    for name in recipe.data.ood:
        source = load_ood(name, data_dir)
        order = np.random.default_rng(0).permutation(len(source))[: recipe.data.limit]
        sets[name] = Selection(source, np.sort(order))
    if recipe.data.corrupted:
        images = corrupt(first_images(test.images, recipe.data.limit), np.random.default_rng(0))
        sets[CORRUPTED] = Selection(Images(CORRUPTED, "test", images), np.arange(len(images)))
    return sets


def itself_half(count: int) -> NDArray[np.int64]:
    """Indices of the half of `count` in-distribution test images that serves as an OOD set."""
    return np.sort(np.random.default_rng(1).permutation(count)[: (count + 1) // 2])


def _check_pair(train: ImageSet, test: ImageSet, digests: dict[str, str]) -> None:
    """Raise DataError if the two sets have different classes or the same images."""
    if len(train.classes) < 2 or len(set(train.classes)) < len(train.classes):
        raise DataError(
            f"{train.title} has the classes {', '.join(train.classes)}; at least two are needed, all different."
        )
    if train.classes != test.classes:
        differing = sorted(set(train.classes) ^ set(test.classes)) or ["their order"]
        raise DataError(
            f"{train.title} and its split 'test' must have the same classes; they differ in {', '.join(differing[:5])}. "
            "Give both images of each class, or list all classes of the model (--classes FILE, data.classes in a recipe)."
        )
    if digests["train"] == digests["test"]:
        raise DataError(
            f"{train.title} has the same images as its split 'test', so no image would be unseen; "
            "give each its own folder or file, for example FOLDER/train/CLASS and FOLDER/test/CLASS."
        )


def _check_shared(train: ImageSet, test: ImageSet, display: Display) -> None:
    """DataError if many images of the split `test` are training images too; a note if a few are."""
    shared = int(np.isin(test.stored_fingerprints(), train.stored_fingerprints()).sum())
    if shared > MAX_SHARED * len(test):
        raise DataError(
            f"{shared:,} of the {len(test):,} images of {test.title} are also images of its split 'train', so that they are not "
            "unseen; remove them from one of both."
        )
    if shared:
        display.note(f"  {shared:,} of the {len(test):,} images of {test.title} are also training images")


def _part(recipe: Recipe, title: str, source: ImageSet, indices: NDArray[np.int64], display: Display) -> LabelledSplit:
    selection = Selection(source, indices)
    return LabelledSplit(_pixels(recipe, title, selection, display), source.labels[indices], selection)


def _pixels(recipe: Recipe, title: str, selection: Selection, display: Display) -> Pixels:
    spec = recipe.input.spec
    if selection.source.is_lazy(spec, len(selection)):
        return selection.pixels(spec)
    with display.bar(f"reading {title}", len(selection)) as advance:
        return selection.pixels(spec, advance)


def check_same_data(current: dict[str, Any], recorded: dict[str, Any]) -> None:
    """Raise DataError if the data differ from those of the run, because test images may then be training images."""
    for split, digest in current["sha256"].items():
        if digest != recorded.get("sha256", {}).get(split):
            raise DataError(
                f"Data set {current['id']!r} (split {split!r}) is not the one that the bundle was made with: "
                "its images, labels or classes have changed."
            )
    if current["splits"] != recorded.get("splits"):
        raise DataError(f"Data set {current['id']!r} is not split as it was when the bundle was made.")
