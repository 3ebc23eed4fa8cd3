"""Recalibrate a bundle on the user's own images, without torch."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError
from rich.console import Console

from qualms.bundle.file import Bundle, open_bundle, write_bundle
from qualms.bundle.manifest import Manifest, OperatingDefaults, first_problem
from qualms.bundle.runtime import GraphRunner, check_golden
from qualms.decisions.calibration import calibrate, reference
from qualms.decisions.flag import rank
from qualms.decisions.calibration_set import CalibrationSet
from qualms.errors import DataError, OperatingPointError
from qualms_training.console import Display
from qualms_training.data import ImageSet
from qualms_training.data.folder import read_folder
from qualms_training.data.npz import read_npz


def recalibrate(
    model: Path,
    data: str,
    out: Path,
    *,
    name: str | None = None,
    target_fpr: float | None = None,
    target_risk: float | None = None,
    display: Display | None = None,
) -> Bundle:
    """Write `model` to `out` with thresholds calibrated on `data`; the graph does not change.

    The candidate thresholds of the trust decision stay those of the original fit split, because the new images may only
    test them. The old evaluation is removed, because it used other thresholds. A new `name` distinguishes the two
    models in metrics and dashboards.
    """
    display = display or Display(Console(stderr=True))
    bundle = open_bundle(model)
    manifest = bundle.manifest
    images = _read(Path(data))
    digest = _unseen_digest(images, manifest)
    labels = _labels(images, manifest.classes)
    operating = _operating(manifest.operating, {"target_fpr": target_fpr, "target_risk": target_risk})
    rank(len(labels), operating.target_fpr, operating.guarantee)
    runner = GraphRunner(bundle.graph)
    check_golden(runner, manifest)
    with display.bar(f"reading {data}", len(images)) as advance:
        pixels = images.conformed(manifest.input, progress=advance)
    with display.bar("calibrating", len(images)) as advance:
        outputs = runner(pixels, progress=advance)
    trust = manifest.calibration.trust
    update = {
        "name": name or manifest.name,
        "operating": operating,
        "calibration": calibrate(
            outputs,
            labels,
            manifest.scores,
            (trust.levels, trust.thresholds),
            split=images.split,
            data=images.name,
            data_sha256=digest,
        ),
        "reference": reference(outputs, manifest.scores, len(manifest.classes)),
        "evaluation": None,
    }
    written = write_bundle(out, bundle.graph, manifest.model_copy(update=update))
    _report(written, display)
    return written


def _read(path: Path) -> ImageSet:
    """Read an npz file, or a folder of class folders."""
    if path.is_dir():
        return read_folder(path, "calibration")
    name, dash, split = path.stem.rpartition("-")
    if path.suffix != ".npz" or not dash:
        raise DataError(
            f"Calibration data {str(path)!r} is neither a folder of class folders nor a NAME-SPLIT.npz file."
        )
    return read_npz(path.parent, name, split)


def _unseen_digest(images: ImageSet, manifest: Manifest) -> str:
    """The digest of the images; DataError if they are the training set that the bundle records."""
    digest = images.digest()
    if digest == manifest.provenance.data.get("sha256", {}).get("train"):
        raise DataError(
            f"{images.title} is the training set of {manifest.name}, so thresholds from it would be invalid; "
            "calibrate on images that were not used in training."
        )
    return digest


def _operating(current: OperatingDefaults, changes: dict[str, float | None]) -> OperatingDefaults:
    """The operating point with the changed values."""
    given = {name: value for name, value in changes.items() if value is not None}
    try:
        return OperatingDefaults.model_validate({**current.model_dump(), **given})
    except ValidationError as error:
        raise OperatingPointError(f"The operating point is not valid: {first_problem(error)}.") from None


def _labels(images: ImageSet, classes: list[str]) -> NDArray[np.int64]:
    """Labels (N,) as indices into the model's classes, matched by name."""
    if unknown := [name for name in images.classes if name not in classes]:
        raise DataError(
            f"{images.title} has the class {unknown[0]!r}, which the model does not have; "
            f"its classes are {', '.join(classes)}."
        )
    return np.array([classes.index(name) for name in images.classes], dtype=np.int64)[images.labels]


def _report(bundle: Bundle, display: Display) -> None:
    calibration = CalibrationSet(bundle.manifest)
    point = calibration.flag_point()
    display.note(
        f"Flag beyond {point.threshold:.6g} of {point.score}: false alarms ≤ {100 * point.target_fpr:g} % "
        f"({point.guarantee}, {point.n:,} images)."
    )
    try:
        trust = calibration.trust_point()
        display.note(
            f"Trust if {trust.condition}: errors ≤ {100 * trust.target_risk:g} % "
            f"of the {100 * trust.accepted:.1f} % accepted."
        )
    except OperatingPointError as error:
        display.note(f"No trust threshold: {error}")
    display.note(f"Wrote {bundle.path} ({bundle.digest[:16]}…).")
