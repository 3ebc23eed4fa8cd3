"""Detection with the reduced distance of many classes: `python -m qualms_training.bench.many_classes --out DIR`.

Above `density.MANY_CLASSES` classes, the distance keeps fewer directions and means of a lower rank. The data sets at hand have
at most 100 classes, so each of 99 classes of CIFAR-100 is divided by k-means of its small images into ten. On a frozen
EfficientNet-Lite0 the meta-model predicts these 990 classes, once with each form of the distance; all else is the same.
"""

import argparse
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.table import Table
from sklearn.cluster import KMeans

from qualms.bundle.file import open_bundle
from qualms_training.console import Display
from qualms_training.data import ImageSet, load
from qualms_training.data.sources.given_sets import GivenSets
from qualms_training.meta import density
from qualms_training.own_model.options import FitOptions, InputOptions
from qualms_training.own_model.planning import plan_recipe
from qualms_training.run import pick_device, train_recipe

MODEL = "qualms_training.models.efficientnet:lite0"
OOD = ("cifar10", "svhn", "fashion_mnist", "tiny_imagenet")
CLASSES, PARTS = 99, 10
SMALL = 8
"""side of the images that are clustered"""
SCORES = ("distance", "fused", "mutual_information")
FULL, REDUCED = "full", "reduced"


def divided(data_dir: Path | None) -> dict[tuple[str, str], ImageSet]:
    """CIFAR-100 without its last class, each other class divided into PARTS."""
    train, test = load("cifar100", "train", data_dir), load("cifar100", "test", data_dir)
    labels = {split: np.full(len(images), -1) for split, images in (("train", train), ("test", test))}
    for label in range(CLASSES):
        members = train.labels == label
        clusters = KMeans(PARTS, n_init=1, random_state=0).fit(_small(train)[members])
        labels["train"][members] = label * PARTS + clusters.labels_
        others = test.labels == label
        labels["test"][others] = label * PARTS + clusters.predict(_small(test)[others])
    names = tuple(f"class{number:04}" for number in range(CLASSES * PARTS))
    sets = {}
    for split, images in (("train", train), ("test", test)):
        kept = np.flatnonzero(labels[split] >= 0)
        sets["divided", split] = ImageSet("divided", split, np.asarray(images.images)[kept], labels[split][kept], names)
    return sets


def _small(images: ImageSet) -> NDArray[np.float64]:
    """Images (N, H, W, C) as rows of their means over squares."""
    pixels = np.asarray(images.images)
    side = pixels.shape[1] // SMALL
    squares = pixels.reshape(len(pixels), SMALL, side, SMALL, side, -1)
    return np.asarray(squares.mean(axis=(2, 4), dtype=np.float64)).reshape(len(pixels), -1)


def compare(out: Path, data_dir: Path | None, epochs: int, display: Display) -> None:
    """Fit one bundle with each form, and print the AUROC of both by OOD set."""
    sets = GivenSets(divided(data_dir), data_dir)
    options = FitOptions(
        model=MODEL,
        weights="included",
        weights_saw="other-data",
        data="divided",
        name="many-classes",
        ood=OOD,
        input=InputOptions(height=32, width=32),
        epochs=epochs,
    )
    recipe = plan_recipe(options, sets, display)
    limit, results = density.MANY_CLASSES, {}
    for form, many in ((FULL, CLASSES * PARTS), (REDUCED, limit)):
        density.MANY_CLASSES = many
        train_recipe(
            recipe,
            out=out / form,
            cache=out / "cache",
            data_dir=sets,
            seeds=[0],
            device=pick_device("auto"),
            display=display,
        )
        results[form] = open_bundle(out / form / "seed-0" / "model.onnx")
    density.MANY_CLASSES = limit
    table = Table("score", "OOD set", FULL, REDUCED, "difference", title="AUROC in %", title_justify="left")
    auroc = {
        form: {(row.score, row.data): row.auroc for row in bundle.manifest.evaluation.ood}
        for form, bundle in results.items()
        if bundle.manifest.evaluation is not None
    }
    for score in SCORES:
        for ood in (*OOD, "corrupted"):
            wide, narrow = (auroc[form][score, ood] for form in (FULL, REDUCED))
            table.add_row(score, ood, f"{wide:.2f}", f"{narrow:.2f}", f"{narrow - wide:+.2f}")
    display.console.print(table)
    sizes = {form: bundle.path.stat().st_size / 1e6 for form, bundle in results.items()}
    display.note(f"Bundles: {sizes[FULL]:.1f} MB {FULL}, {sizes[REDUCED]:.1f} MB {REDUCED}.")


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for both runs")
    parser.add_argument("--data", type=Path, help="folder of NAME-SPLIT.npz files; by default that of QUALMS_DATA")
    parser.add_argument("--epochs", type=int, default=5, help="epochs of the meta-models")
    arguments = parser.parse_args()
    compare(arguments.out, arguments.data, arguments.epochs, Display())


if __name__ == "__main__":
    main()
