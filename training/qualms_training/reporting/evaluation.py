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
from qualms.images.observed import ObservedEncoding
from qualms_training.console import Display
from qualms_training.data.dataset import Selection
from qualms_training.data.lazy_images import Pixels
from qualms_training.data.prepare import LabelledSplit, check_same_data, ood_sets, prepare, stored_ood_sets
from qualms_training.data.sources.own_images import labels_by_name, read_labelled_images
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
from qualms_training.reporting.graph_runs import EvaluationRunner, pixel_fingerprints, softmax_scores
from qualms_training.reporting.saved import check_out, ood_name, save_evaluation
from qualms_training.reporting.served import served_result
from qualms_training.reporting.summary import print_report

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
    out: Path | None = None,
    show_all: bool = False,
    display: Display | None = None,
) -> Evaluation:
    """Evaluate a bundle file on its recipe's test set and on the sets `ood` (default: the recipe's), and print a summary.

    The splits are drawn again from the recorded recipe and seed, so the test images are those held out in training. With `test`,
    a folder of class folders or a NAME-SPLIT.npz file, the labelled images there are used instead, and no OOD sets but those of
    `ood` and corrupted images. `encodings` replace those of the recipe, and `coverages` the usual ones of prediction sets;
    OperatingPointError if the calibration does not support one of them. With `write`, the evaluation is stored in the bundle.
    One of `ood` may be the path of a folder of images. With `out`, the summary and all tables are written to out.md and the
    results to out.json; with `show_all`, all tables are printed.
    """
    parse_encodings(encodings or [])
    display = display or Display()
    check_out(out)
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
        names = [ood_name(name, data_dir) for name in ood or []]
        recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update={"ood": names})})
    graph = GraphRunner(bundle.graph)
    check_golden(graph, manifest)
    runner = EvaluationRunner(graph, manifest)
    if test is None:
        split, name = _recorded_test_split(manifest, recipe, data_dir, display), recipe.data.id
    else:
        split, name = _own_test_split(test, manifest, display), str(test)
    seen = check_not_calibrated_on(manifest, split.images, name)
    sets = stored_ood_sets(recipe, split, data_dir)
    images = (
        ood_sets(recipe, split, data_dir, display, sets)
        if test is None
        else {key: selection.pixels(manifest.input) for key, selection in sets.items()}
    )
    outputs, ood_outputs = run_graph(runner, split.images, images, display)
    result = evaluate(
        manifest,
        name,
        split.labels,
        outputs,
        ood_outputs,
        targets=recipe.report_targets,
        coverages=coverages or SET_COVERAGES,
        **observed_encodings(manifest, split, sets),
    )
    del outputs, ood_outputs
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
    paper_id = recipe.paper_id if test is None else None
    print_report([result], paper_id, display, show_all=show_all)
    if out is not None:
        title = f"{manifest.name} {manifest.version}, evaluated on {name}"
        display.note(f"Wrote {escape(' and '.join(map(str, save_evaluation(out, title, result, paper_id))))}.")
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
        return LabelledSplit(selection.pixels(manifest.input, advance), labels, selection)


def observed_encodings(manifest: Manifest, test: LabelledSplit, ood: Mapping[str, Selection]) -> dict[str, Any]:
    """Arguments of `evaluate`: the encodings of all images as stored, if the thresholds of the model depend on their size."""
    if not manifest.calibration.sizes:
        return {}
    return {
        "observed": test.stored.observed(manifest.input),
        "ood_observed": {name: selection.observed(manifest.input) for name, selection in ood.items()},
    }


def check_not_calibrated_on(manifest: Manifest, images: Pixels, name: str) -> int:
    """The number of test images (N, H, W, C) that are also calibration images; DataError if they are more than 1 % of them.

    A few are possible without a mistake, because data sets have duplicates.
    """
    kept = manifest.labelled_calibration
    parts = [manifest.calibration.fingerprints, None if kept is None else kept.fingerprints]
    known = [part for part in parts if part is not None]
    if not known:
        return 0
    seen = int(np.isin(pixel_fingerprints(images), np.concatenate(known)).sum())
    if seen > MAX_SEEN * len(images):
        raise DataError(
            f"{seen:,} of the {len(images):,} test images of {name!r} were used to calibrate {manifest.name}; the measured "
            "rates would be too good: evaluate on other images."
        )
    return seen


def run_graph(
    runner: EvaluationRunner, test: Pixels, ood: Mapping[str, Pixels], display: Display
) -> tuple[Outputs, dict[str, Outputs]]:
    """The graph's outputs for the test images and its scores for each OOD set, with a progress bar."""
    with display.bar("evaluating", len(test) + sum(map(len, ood.values()))) as advance:
        outputs = runner.with_probabilities(test, advance)
        return outputs, {name: runner.scores(images, advance) for name, images in ood.items()}


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
    ood_observed: Mapping[str, Sequence[ObservedEncoding]] | None = None,
) -> Evaluation:
    """Results from the graph's outputs for the test set `name` and for the OOD sets.

    `base_predictions` are the classes that the base predicts outside the graph for the first images of the test set; by default,
    those of the graph's base are compared with the served ones. They are not used if the meta-model predicts. `observed` and
    `ood_observed` are the encodings of the images, for models whose thresholds depend on their size.
    """
    uncertainty = uncertainties(outputs, manifest)
    ood = []
    for data, ood_output in ood_outputs.items():
        ood_uncertainty = uncertainties(ood_output, manifest)
        ood += [_ood_result(data, score, uncertainty[score], ood_uncertainty[score]) for score in uncertainty]
    prediction, sent = outputs["prediction"], Sent(outputs, observed)
    base_accuracy, identical, compared = None, None, None
    if manifest.prediction == "base":
        in_graph = _predicted_by_base(outputs)
        base_accuracy = 100 * float((in_graph == labels).mean())
        expected = in_graph if base_predictions is None else base_predictions
        identical = bool((prediction[: len(expected)] == expected).all())
        compared = len(expected) if len(expected) < len(labels) else None
    return Evaluation(
        test_data=name,
        n=len(labels),
        base_accuracy=base_accuracy,
        accuracy=100 * float((prediction == labels).mean()),
        identical_predictions=identical,
        compared=compared,
        ood=ood,
        misclassification=_misclassification(uncertainty, prediction != labels),
        realised=guarantee_results(Decider(manifest), sent, labels, targets),
        probabilities=_probabilities(manifest, outputs, labels),
        classes=class_results(manifest, sent, labels),
        sets=set_results(manifest, sent, labels, coverages),
        served=served_result(
            manifest,
            sent,
            labels,
            {name: Sent(one, (ood_observed or {}).get(name)) for name, one in ood_outputs.items()},
        ),
    )


def uncertainties(outputs: Outputs, manifest: Manifest) -> Uncertainties:
    """Every score of the bundle and, if the base predicts, two scores of the base's softmax, as uncertainty."""
    scores = {name: as_uncertainty(outputs[name], spec.direction) for name, spec in manifest.scores.items()}
    return scores if manifest.prediction == "meta" else {**softmax_scores(outputs), **scores}


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


def _predicted_by_base(outputs: Outputs) -> NDArray[np.int64]:
    """The class of the largest base probability (N,); among equal ones, the served class if it is one of them."""
    probabilities, served = outputs["base_probabilities"], outputs["prediction"]
    is_largest = probabilities[np.arange(len(served)), served] == probabilities.max(axis=1)
    return np.where(is_largest, served, probabilities.argmax(axis=1))
