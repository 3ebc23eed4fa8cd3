"""Recalibrate a bundle, without torch: on the user's own images, with or without labels; on recorded scores of served traffic; or
on the bundle's own calibration images, sent in other ways.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from rich.console import Console
from rich.markup import escape

from qualms.bundle.calibration_data import AsSent, Calibration, CalibrationForm
from qualms.bundle.file import Bundle, open_bundle, write_bundle
from qualms.bundle.manifest import SCHEMA_VERSION, Manifest, OperatingDefaults, Reference, first_problem
from qualms.bundle.parts import Name
from qualms.bundle.runtime import GraphRunner, check_golden
from qualms.bundle.scores import as_uncertainty
from qualms.decisions.calibration import CalibrationSource
from qualms.decisions.calibration_set import CalibrationSet
from qualms.decisions.verdicts import SIZE_TEXTS, guarantee_text
from qualms.errors import DataError, OperatingPointError
from qualms.images.encodings import parse_encodings
from qualms.images.fingerprints import fingerprints, first_of_each
from qualms_training.calibration_run import STORED, CalibrationPlan, run_calibration
from qualms_training.console import Display
from qualms_training.data.dataset import ImageSet, Selection
from qualms_training.data.prepare import check_same_data, prepare
from qualms_training.data.sources.own_images import labels_by_name, read_images, without_labels
from qualms_training.recipe import check_recipe
from qualms_training.reporting.score_records import read_score_log

MAX_TRIM = 0.5
IN_DISTRIBUTION = (
    "The guarantee holds only if these images are in distribution: every OOD image among them raises the threshold, "
    "so that fewer OOD images are detected."
)


@dataclass(frozen=True)
class NewCalibration:
    """What replaces the calibration of a bundle."""

    calibration: Calibration
    reference: Reference
    provenance: dict[str, Any] | None = None
    """the recorded recipe, if it changes"""


def recalibrate(
    model: Path,
    data: str | None,
    out: Path,
    *,
    from_log: Path | None = None,
    data_dir: Path | None = None,
    as_sent: list[str] | None = None,
    form: CalibrationForm | None = None,
    seed: int | None = None,
    unlabelled: bool = False,
    keep_trust: bool = False,
    trim: float | None = None,
    name: str | None = None,
    target_fpr: float | None = None,
    target_risk: float | None = None,
    display: Display | None = None,
) -> Bundle:
    """Write `model` to `out` with another calibration; the graph does not change.

    The images are those of `data`, or the scores those of the file `from_log`; without both, the bundle's own calibration images
    are drawn again. The candidate thresholds of the trust decision stay those of the original fit split, because the new
    images may only test them. The old evaluation is removed, because it used other thresholds. A new `name` distinguishes the
    two models in metrics and dashboards.
    """
    display = display or Display(Console(stderr=True))
    bundle = open_bundle(model)
    manifest = bundle.manifest
    options = Options(
        data, from_log, as_sent or [], form, seed, unlabelled, keep_trust, 0.0 if trim is None else trim, target_risk
    )
    options.check(manifest)
    _check_out(out)
    _check_name(name)
    operating = _operating(manifest.operating, {"target_fpr": target_fpr, "target_risk": target_risk})
    grid = (manifest.calibration.trust.levels, manifest.calibration.trust.thresholds)
    plan = CalibrationPlan(manifest.input, manifest.scores, len(manifest.classes), operating, manifest.sets, grid)
    if from_log is not None:
        new = _from_log(from_log, manifest, plan, options.trim, display)
    elif data is not None:
        new = _from_images(bundle, Path(data), plan, options, display)
    else:
        new = _from_own_split(bundle, plan, options.sent(manifest), data_dir, display)
    options.check_labels(new.calibration)
    labelled = (manifest.labelled_calibration or manifest.calibration) if keep_trust else None
    update: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "name": manifest.name if name is None else name,
        "operating": operating,
        "calibration": new.calibration,
        "labelled_calibration": labelled,
        "reference": new.reference,
        "evaluation": None,
    }
    if new.provenance is not None:
        update["provenance"] = manifest.provenance.model_copy(update={"recipe": new.provenance})
    written = write_bundle(out, bundle.graph, manifest.model_copy(update=update))
    _report(written, manifest, display)
    return written


def _check_out(out: Path) -> None:
    """Raise DataError if the bundle of a run folder would be replaced: `qualms train` would take it for its own product."""
    if out.is_dir():
        raise DataError(f"{out} is a folder; --out names the file to write.")
    if out.exists() and (out.resolve().parent / "stages.json").exists():
        raise DataError(
            f"{out} is the product of a run, and `qualms train` would take the recalibrated file for its own: "
            "write it to another file with --out."
        )


@dataclass(frozen=True)
class Options:
    """The options of a recalibration."""

    data: str | None
    from_log: Path | None
    as_sent: list[str]
    form: CalibrationForm | None
    seed: int | None
    unlabelled: bool
    keep_trust: bool
    trim: float
    target_risk: float | None

    def check(self, manifest: Manifest) -> None:
        """DataError if options contradict each other or the model."""
        if self.data is not None and not self.data.strip():
            raise DataError("DATA is empty; give a folder of images or a NAME-SPLIT.npz file.")
        if self.from_log is not None and self.data is not None:
            raise DataError(
                f"Both the data {self.data!r} and the log {str(self.from_log)!r} are given; calibrate on one of them."
            )
        if self.from_log is not None and (self.as_sent or self.form or self.seed is not None):
            raise DataError(
                "Recorded scores cannot be sent in another encoding; leave out --as-sent, --form and --seed, or --from-log."
            )
        if self.data is None and self.unlabelled:
            raise DataError("--unlabelled needs DATA, a folder of images or a NAME-SPLIT.npz file.")
        if not 0 <= self.trim <= MAX_TRIM:
            raise DataError(f"The share to trim must be from 0 to {MAX_TRIM:g}, not {self.trim:g}.")
        if self.trim and self.data is None and self.from_log is None:
            raise DataError(
                "Only images without labels can be trimmed; give a flat folder, --unlabelled or --from-log."
            )
        sent = self.sent(manifest)
        if sent is None and (self.form is not None or self.seed is not None):
            raise DataError("--form and --seed need encodings: list them with --as-sent.")
        if self.keep_trust and not (manifest.labelled_calibration or manifest.calibration).has_labels:
            raise DataError(
                f"{manifest.name} has no guarantee on errors that could be kept: it was calibrated without labels."
            )

    def sent(self, manifest: Manifest) -> AsSent | None:
        """How the images are sent; EncodingError if one of the encodings is not accepted.

        The bundle's own calibration images are sent as before, unless other encodings or another form are given.
        """
        before = manifest.calibration.as_sent if self.data is None and self.from_log is None else None
        texts = self.as_sent or (before.encodings if before else [])
        if not texts:
            return None
        parse_encodings(texts)
        form = self.form or (before.form if before and not self.as_sent else "worst")
        seed = before.seed if self.seed is None and before and not self.as_sent else self.seed or 0
        return AsSent(encodings=texts, form=form, seed=seed)

    def check_labels(self, calibration: Calibration) -> None:
        """DataError if an option does not fit to images with or without labels."""
        if calibration.has_labels and self.keep_trust:
            raise DataError(
                "--keep-trust is for images without labels; these images have labels, which give a new guarantee."
            )
        if not calibration.has_labels and self.target_risk is not None and not self.keep_trust:
            raise DataError(
                "--target-risk needs labels, and these images have none; leave it out, or keep the earlier guarantee with "
                "--keep-trust."
            )


def _from_images(
    bundle: Bundle, path: Path, plan: CalibrationPlan, options: Options, display: Display
) -> NewCalibration:
    manifest = bundle.manifest
    _check_not_training_set(path, manifest)
    images = without_labels(path, "calibration") if options.unlabelled else read_images(path, "calibration")
    labels = labels_by_name(images, manifest.classes) if isinstance(images, ImageSet) else None
    plan.check_count(len(images))
    with display.bar(f"reading {path}", len(images)) as advance:
        first = first_of_each(fingerprints(images.conformed(manifest.input, progress=advance)))
    if repeated := len(images) - len(first):
        display.note(f"{repeated:,} of the {len(images):,} images are repetitions of others and are left out.")
    plan.check_count(len(first))
    if labels is None:
        display.note(f"{len(first):,} images without labels. {IN_DISTRIBUTION}")
    source = CalibrationSource(
        images.split, images.name, images.digest(), as_sent=options.sent(manifest), trimmed=options.trim or None
    )
    selection, labels = Selection(images, first), None if labels is None else labels[first]
    return NewCalibration(*run_calibration(_runner(bundle), selection, labels, plan, source, display))


def _check_not_training_set(path: Path, manifest: Manifest) -> None:
    """DataError if the images are the training set that the bundle records, also if their labels are to be ignored."""
    try:
        images = read_images(path, "calibration")
    except DataError:  # a folder that is accepted only without labels
        return
    if images.digest() == manifest.provenance.data.get("sha256", {}).get("train"):
        raise DataError(
            f"{images.title} is the training set of {manifest.name}, so thresholds from it would be invalid; "
            "calibrate on images that were not used in training."
        )


def _check_name(name: str | None) -> None:
    if name is None:
        return
    try:
        TypeAdapter(Name).validate_python(name)
    except ValidationError:
        raise DataError(
            f"The name {name!r} is not accepted; use up to 64 lower-case letters, digits, dots, dashes and underscores."
        ) from None


def _from_own_split(
    bundle: Bundle, plan: CalibrationPlan, as_sent: AsSent | None, data_dir: Path | None, display: Display
) -> NewCalibration:
    """The calibration images of the recorded recipe and seed."""
    origin = bundle.manifest.provenance
    recipe = check_recipe(origin.recipe, f"recorded in {bundle.path}")
    data = prepare(recipe, origin.seed, data_dir, display)
    check_same_data(data.record, origin.data)
    split = data.parts["calibration"]
    source = CalibrationSource(
        "calibration", recipe.data.id, data.record["sha256"][recipe.data.held_out], as_sent=as_sent
    )
    calibration, reference = run_calibration(_runner(bundle), split.stored, split.labels, plan, source, display)
    if as_sent is None:
        return NewCalibration(calibration, reference)
    section = recipe.calibration.model_copy(update={"as_sent": as_sent.encodings, "form": as_sent.form})
    changed = recipe.model_copy(update={"calibration": section})
    return NewCalibration(calibration, reference, changed.model_dump(mode="json"))


def _from_log(path: Path, manifest: Manifest, plan: CalibrationPlan, trim: float, display: Display) -> NewCalibration:
    records = read_score_log(path, manifest)
    outputs = records.outputs
    if trim:
        kept = plan.trimmed({STORED: outputs}, trim)
        outputs = {name: values[kept] for name, values in outputs.items()}
    plan.check_count(len(outputs["prediction"]))
    repeated = f" ({records.repeated:,} more were repetitions of the same image)" if records.repeated else ""
    display.note(f"{len(records.fingerprints):,} recorded images{repeated}. {IN_DISTRIBUTION}")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    source = CalibrationSource(
        "served",
        path.name,
        digest,
        observed=records.observed,
        fingerprints=records.fingerprints,
        trimmed=trim or None,
    )
    return NewCalibration(*plan.calibrate({STORED: outputs}, None, source))


def _runner(bundle: Bundle) -> GraphRunner:
    runner = GraphRunner(bundle.graph)
    check_golden(runner, bundle.manifest)
    return runner


def _operating(current: OperatingDefaults, changes: dict[str, float | None]) -> OperatingDefaults:
    """The operating point with the changed values."""
    given = {name: value for name, value in changes.items() if value is not None}
    try:
        return OperatingDefaults.model_validate({**current.model_dump(), **given})
    except ValidationError as error:
        parameter = str(error.errors()[0]["loc"][0])
        raise OperatingPointError(
            f"The operating point is not valid: {first_problem(error)}, not {given[parameter]:g}.", parameter
        ) from None


def _report(bundle: Bundle, before: Manifest, display: Display) -> None:
    manifest = bundle.manifest
    calibration = CalibrationSet(manifest)
    point = calibration.flag_point()
    display.note(
        f"Flag beyond {point.threshold:.6g} of {point.score}: {guarantee_text(point, manifest.calibration)} "
        f"({point.guarantee}, {point.n:,} images)."
    )
    for size in manifest.calibration.sizes:
        sized = CalibrationSet(manifest, size).flag_point()
        display.note(f"For images of {SIZE_TEXTS[size]}: flag beyond {sized.threshold:.6g}.")
    points = calibration.setting_points()
    if len(points) > 1:
        ordered = sorted(points, key=lambda name: float(as_uncertainty(points[name].threshold, point.direction)))
        display.note(
            f"The largest threshold is that of {ordered[-1]}; {ordered[0]} alone would need {points[ordered[0]].threshold:.6g}. "
            "A setting that your clients never send costs detection for nothing."
        )
    display.note(escape(_trust_sentence(manifest, before, calibration)))
    display.note(f"Wrote {escape(str(bundle.path))} ({bundle.digest[:16]}…).")


def _trust_sentence(manifest: Manifest, before: Manifest, calibration: CalibrationSet) -> str:
    kept = manifest.labelled_calibration
    if kept is None and not manifest.calibration.has_labels:
        earlier = before.labelled_calibration or before.calibration
        remedy = (
            f"; --keep-trust keeps the guarantee of the {earlier.n:,} images of {earlier.data}, for images like those"
            if earlier.has_labels
            else ""
        )
        return f"Trust: the guarantee on errors is withdrawn, because the images have no labels{remedy}."
    try:
        trust = calibration.trust_point()
    except OperatingPointError as error:
        return f"No trust threshold: {error}"
    whose = f", kept from the {kept.n:,} images of {kept.data}, for images like those" if kept is not None else ""
    return (
        f"Trust if {trust.condition}: errors ≤ {100 * trust.target_risk:g} % "
        f"of the {100 * trust.accepted:.1f} % accepted{whose}."
    )
