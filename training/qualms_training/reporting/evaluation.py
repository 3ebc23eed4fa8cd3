"""Evaluate a bundle: every score on every OOD set and on misclassified images, with the graph and preprocessing of the service."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.markup import escape
from sklearn.metrics import average_precision_score, roc_auc_score, roc_curve

from qualms.bundle.evaluation_results import ErrorResult, Evaluation, OodResult, ProbabilityResult
from qualms.bundle.file import open_bundle, write_bundle
from qualms.bundle.manifest import Manifest
from qualms.bundle.runtime import GraphRunner, Outputs, check_golden
from qualms.bundle.scores import as_uncertainty
from qualms.decisions.operating_point import OperatingPoint
from qualms.decisions.verdicts import Decider
from qualms.images.encodings import parse_encodings
from qualms.images.fingerprints import fingerprints
from qualms.images.observed import ObservedEncoding
from qualms_training.console import Display
from qualms_training.data.dataset import Selection
from qualms_training.data.own_images import labels_by_name, read_labelled_images
from qualms_training.data.prepare import LabelledSplit, check_same_data, ood_sets, prepare, stored_ood_sets
from qualms_training.errors import DataError, RecipeError
from qualms_training.recipe import Recipe, check_recipe
from qualms_training.reporting.breakdown import (
    SET_COVERAGES,
    Sent,
    class_results,
    encoding_results,
    guarantee_results,
    set_results,
)
from qualms_training.reporting.report import accuracy_line, all_grids, to_rich

MAX_SEEN = 0.01
"""largest share of test images that may also be calibration images"""
ECE_BINS = 15

Uncertainties = dict[str, NDArray[np.float64]]
"""Uncertainty (N,) by score; larger means more uncertain."""


def evaluate_bundle(
    model: Path,
    data_dir: Path | None,
    ood: list[str] | None = None,
    *,
    test: Path | None = None,
    encodings: Sequence[str] | None = None,
    coverages: Sequence[float] | None = None,
    write: bool = False,
    display: Display | None = None,
) -> Evaluation:
    """Evaluate a bundle file on its recipe's test set and on the sets `ood` (default: the recipe's); print the tables.

    The splits are drawn again from the recorded recipe and seed, so the test images are those held out in training. With `test`,
    a folder of class folders or a NAME-SPLIT.npz file, the labelled images there are used instead, and no OOD sets but those of
    `ood` and corrupted images. `encodings` replace those of the recipe, and `coverages` the usual ones of prediction sets;
    OperatingPointError if the calibration does not support one of them. With `write`, the evaluation is stored in the bundle.
    """
    parse_encodings(encodings or [])
    display = display or Display()
    bundle = open_bundle(model)
    if write and test is not None and (model.resolve().parent / "stages.json").exists():
        raise DataError(
            f"{model} is the product of a run, whose report has the recipe's test set: copy the file to store an evaluation on "
            "other images."
        )
    manifest = bundle.manifest
    for coverage in coverages or []:
        Decider(manifest).rule(OperatingPoint(coverage=coverage))
    recipe = check_recipe(manifest.provenance.recipe, f"recorded in {model}")
    if ood or test is not None:
        recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update={"ood": ood or []})})
    runner = GraphRunner(bundle.graph)
    check_golden(runner, manifest)
    if test is None:
        split, name = _recorded_test_split(manifest, recipe, data_dir, display), recipe.data.id
    else:
        split, name = _own_test_split(test, manifest, display), str(test)
    seen = check_not_calibrated_on(manifest, split.images, name)
    sets = stored_ood_sets(recipe, split, data_dir)
    images = (
        ood_sets(recipe, split, data_dir, display, sets)
        if test is None
        else {key: selection.conformed(manifest.input) for key, selection in sets.items()}
    )
    outputs, ood_outputs = run_graph(runner, split.images, images, display)
    observed = split.stored.observed(manifest.input) if manifest.calibration.sizes else None
    result = evaluate(
        manifest,
        name,
        split.labels,
        outputs,
        ood_outputs,
        targets=recipe.report_targets,
        coverages=coverages or SET_COVERAGES,
        observed=observed,
    )
    by_encoding = encoding_results(
        runner,
        manifest,
        split,
        sets,
        encodings=encodings or recipe.report_encodings,
        targets=recipe.report_targets,
        limit=recipe.report_limit,
        display=display,
    )
    result = result.model_copy(update={"encodings": by_encoding, "calibrated_on": seen})
    for grid in all_grids([result], recipe.paper_id if test is None else None):
        display.console.print(to_rich(grid))
    display.note(accuracy_line([result]))
    if write:
        write_bundle(model, bundle.graph, manifest.model_copy(update={"evaluation": result}))
        display.note(f"Wrote the evaluation to {escape(str(model))}.")
    return result


def _recorded_test_split(manifest: Manifest, recipe: Recipe, data_dir: Path | None, display: Display) -> LabelledSplit:
    data = prepare(recipe, manifest.provenance.seed, data_dir, display)
    check_same_data(data.record, manifest.provenance.data)
    if list(data.classes) != manifest.classes:
        raise RecipeError(f"The classes of data set {recipe.data.id!r} are not those of the bundle.")
    return data.parts["test"]


def _own_test_split(path: Path, manifest: Manifest, display: Display) -> LabelledSplit:
    images = read_labelled_images(path, "test")
    labels, selection = labels_by_name(images, manifest.classes), Selection(images, np.arange(len(images)))
    with display.bar(f"reading {path}", len(images)) as advance:
        return LabelledSplit(selection.conformed(manifest.input, advance), labels, selection)


def check_not_calibrated_on(manifest: Manifest, images: NDArray[np.uint8], name: str) -> int:
    """The number of test images (N, H, W, C) that are also calibration images; DataError if they are more than 1 % of them.

    A few are possible without a mistake, because data sets have duplicates.
    """
    kept = manifest.labelled_calibration
    parts = [manifest.calibration.fingerprints, None if kept is None else kept.fingerprints]
    known = [part for part in parts if part is not None]
    if not known:
        return 0
    seen = int(np.isin(fingerprints(images), np.concatenate(known)).sum())
    if seen > MAX_SEEN * len(images):
        raise DataError(
            f"{seen:,} of the {len(images):,} test images of {name!r} were used to calibrate {manifest.name}; the measured "
            "rates would be too good: evaluate on other images."
        )
    return seen


def run_graph(
    runner: GraphRunner, test: NDArray[np.uint8], ood: Mapping[str, NDArray[np.uint8]], display: Display
) -> tuple[Outputs, dict[str, Outputs]]:
    """The graph's outputs for the test images and for each OOD set, with a progress bar."""
    with display.bar("evaluating", len(test) + sum(map(len, ood.values()))) as advance:
        outputs = runner(test, progress=advance)
        return outputs, {name: runner(images, progress=advance) for name, images in ood.items()}


def evaluate(
    manifest: Manifest,
    name: str,
    labels: NDArray[np.int64],
    outputs: Outputs,
    ood_outputs: Mapping[str, Outputs],
    *,
    targets: Sequence[float],
    coverages: Sequence[float] = SET_COVERAGES,
    base_predictions: NDArray[np.int64] | None = None,
    observed: Sequence[ObservedEncoding] | None = None,
) -> Evaluation:
    """Results from the graph's outputs for the test set `name` and for the OOD sets.

    `base_predictions` are the classes that the base predicts outside the graph; by default, those of the graph's base.
    They are not used if the meta-model predicts. `observed` are the encodings of the test images, for models
    whose thresholds depend on their size.
    """
    uncertainty = uncertainties(outputs, manifest)
    ood = []
    for ood_name, ood_output in ood_outputs.items():
        ood_uncertainty = uncertainties(ood_output, manifest)
        ood += [_ood_result(ood_name, score, uncertainty[score], ood_uncertainty[score]) for score in uncertainty]
    if manifest.prediction == "meta":
        base_predictions = None
    elif base_predictions is None:
        base_predictions = outputs["base_probabilities"].argmax(axis=1)
    prediction, sent = outputs["prediction"], Sent(outputs, observed)
    return Evaluation(
        test_data=name,
        n=len(labels),
        base_accuracy=None if base_predictions is None else 100 * float((base_predictions == labels).mean()),
        accuracy=100 * float((prediction == labels).mean()),
        identical_predictions=None if base_predictions is None else bool((prediction == base_predictions).all()),
        ood=ood,
        misclassification=_misclassification(uncertainty, prediction != labels),
        realised=guarantee_results(Decider(manifest), sent, labels, targets),
        probabilities=_probabilities(manifest, outputs, labels),
        classes=class_results(manifest, sent, labels),
        sets=set_results(manifest, sent, labels, coverages),
    )


def uncertainties(outputs: Outputs, manifest: Manifest) -> Uncertainties:
    """Every score of the bundle and, if the base predicts, two scores of the base's softmax, as uncertainty."""
    scores = {name: as_uncertainty(outputs[name], spec.direction) for name, spec in manifest.scores.items()}
    if manifest.prediction == "meta":
        return scores
    base = outputs["base_probabilities"].astype(np.float64)
    logarithms = np.log(np.maximum(base, np.finfo(np.float32).tiny))
    return {"base_entropy": -(base * logarithms).sum(axis=1), "base_max_probability": -base.max(axis=1), **scores}


def detection(negatives: NDArray[Any], positives: NDArray[Any]) -> tuple[float, float, float]:
    """AUROC, AUPR and FPR at 95 % TPR, in percent, of an uncertainty that should be larger for the positives."""
    uncertainty = np.concatenate([negatives, positives])
    is_positive = np.arange(len(uncertainty)) >= len(negatives)
    # The default drops points on straight parts of the curve, and the point with 95 % TPR may be one of them.
    fpr, tpr, _ = roc_curve(is_positive, uncertainty, drop_intermediate=False)
    return (
        100 * float(roc_auc_score(is_positive, uncertainty)),
        100 * float(average_precision_score(is_positive, uncertainty)),
        100 * float(fpr[np.searchsorted(tpr, 0.95)]),
    )


def _ood_result(name: str, score: str, id_values: NDArray[Any], ood_values: NDArray[Any]) -> OodResult:
    auroc, aupr, fpr95 = detection(id_values, ood_values)
    counts = {"n_id": len(id_values), "n_ood": len(ood_values)}
    return OodResult(data=name, score=score, auroc=auroc, aupr=aupr, fpr95=fpr95, **counts)


def _misclassification(uncertainty: Uncertainties, wrong: NDArray[np.bool_]) -> list[ErrorResult]:
    if not 0 < wrong.sum() < len(wrong):
        return []
    results = {score: detection(values[~wrong], values[wrong]) for score, values in uncertainty.items()}
    return [ErrorResult(score=score, auroc=auroc, aupr=aupr) for score, (auroc, aupr, _) in results.items()]


def _probabilities(manifest: Manifest, outputs: Outputs, labels: NDArray[np.int64]) -> list[ProbabilityResult]:
    """Calibration quality of α/α₀ and, where the graph has them for the data's classes, of the other distributions."""
    probabilities = {"alpha": outputs["probabilities"].astype(np.float64)}
    if manifest.prediction == "base":
        probabilities["base"] = outputs["base_probabilities"].astype(np.float64)
    if manifest.alpha == "joined":
        meta_alpha = outputs["meta_alpha"].astype(np.float64)
        probabilities["meta_alpha"] = meta_alpha / meta_alpha.sum(axis=1, keepdims=True)
    return [
        ProbabilityResult.model_validate(
            {
                "distribution": name,
                "ece": calibration_error(values, labels),
                "nll": negative_log_likelihood(values, labels),
            }
        )
        for name, values in probabilities.items()
    ]


def calibration_error(probabilities: NDArray[np.float64], labels: NDArray[np.int64]) -> float:
    """Expected calibration error in percent of probabilities (N, K) for labels (N,).

    The images are put into bins of equal width by their largest probability; the error is the mean over the images of the
    difference between the accuracy and the mean largest probability in their bin.
    """
    largest = probabilities.max(axis=1)
    bins = np.minimum((largest * ECE_BINS).astype(np.int64), ECE_BINS - 1)
    surplus = (probabilities.argmax(axis=1) == labels) - largest
    return 100 * float(np.abs(np.bincount(bins, surplus, ECE_BINS)).sum()) / len(labels)


def negative_log_likelihood(probabilities: NDArray[np.float64], labels: NDArray[np.int64]) -> float:
    """Mean of −log of the true class's probability, in nats, for probabilities (N, K) and labels (N,)."""
    true_class = probabilities[np.arange(len(labels)), labels]
    return float(-np.log(np.maximum(true_class, np.finfo(np.float32).tiny)).mean())
