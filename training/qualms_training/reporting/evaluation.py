"""Evaluate a bundle: every score on every OOD set and on misclassified images, with the graph and preprocessing of the service."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.metrics import average_precision_score, roc_auc_score, roc_curve

from qualms.bundle.evaluation_results import ErrorResult, Evaluation, GuaranteeResult, OodResult, ProbabilityResult
from qualms.bundle.file import open_bundle
from qualms.bundle.manifest import Manifest
from qualms.bundle.runtime import GraphRunner, Outputs, check_golden
from qualms.bundle.scores import as_uncertainty
from qualms.decisions.operating_point import OperatingPoint
from qualms.decisions.verdicts import Decider, decide
from qualms.errors import OperatingPointError
from qualms_training.console import Display
from qualms_training.data.prepare import ood_sets, prepare
from qualms_training.errors import DataError, RecipeError
from qualms_training.recipe import check_recipe
from qualms_training.reporting.report import accuracy_line, all_grids, to_rich

ECE_BINS = 15

Uncertainties = dict[str, NDArray[np.float64]]
"""Uncertainty (N,) by score; larger means more uncertain."""


def evaluate_bundle(
    model: Path, data_dir: Path | None, ood: list[str] | None = None, display: Display | None = None
) -> Evaluation:
    """Evaluate a bundle file on its recipe's test set and on the sets `ood` (default: the recipe's); print the tables.

    The splits are drawn again from the recorded recipe and seed, so the test images are those held out in training.
    """
    display = display or Display()
    bundle = open_bundle(model)
    origin = bundle.manifest.provenance
    recipe = check_recipe(origin.recipe, f"recorded in {model}")
    if ood:
        recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update={"ood": ood})})
    runner = GraphRunner(bundle.graph)
    check_golden(runner, bundle.manifest)
    data = prepare(recipe, origin.seed, data_dir, display)
    _check_same_data(data.record, origin.data)
    if list(data.classes) != bundle.manifest.classes:
        raise RecipeError(f"The classes of data set {recipe.data.id!r} are not those of the bundle.")
    test = data.parts["test"]
    outputs, ood_outputs = run_graph(runner, test.images, ood_sets(recipe, test, data_dir, display), display)
    result = evaluate(bundle.manifest, recipe.data.id, test.labels, outputs, ood_outputs, targets=recipe.report_targets)
    for grid in all_grids([result], recipe.paper_id):
        display.console.print(to_rich(grid))
    display.note(accuracy_line([result]))
    return result


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
    base_predictions: NDArray[np.int64] | None = None,
) -> Evaluation:
    """Results from the graph's outputs for the test set `name` and for the OOD sets.

    `base_predictions` are the classes that the base predicts outside the graph; by default, those of the graph's base.
    They are not used if the meta-model predicts.
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
    prediction = outputs["prediction"]
    decider = Decider(manifest)
    return Evaluation(
        test_data=name,
        n=len(labels),
        base_accuracy=None if base_predictions is None else 100 * float((base_predictions == labels).mean()),
        accuracy=100 * float((prediction == labels).mean()),
        identical_predictions=None if base_predictions is None else bool((prediction == base_predictions).all()),
        ood=ood,
        misclassification=_misclassification(uncertainty, prediction != labels),
        realised=[
            result(decider, outputs, labels, target)
            for target in targets
            for result in (_false_alarm_rate, _selective_risk)
        ],
        probabilities=_probabilities(manifest, outputs, labels),
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


def _false_alarm_rate(decider: Decider, outputs: Outputs, _: NDArray[np.int64], target: float) -> GuaranteeResult:
    """The share of test images that are flagged at a target false-alarm rate."""
    try:
        flags = decide(decider.rule(OperatingPoint(target_fpr=target)), outputs).flags
    except OperatingPointError:
        return GuaranteeResult(promise="false_alarm_rate", target=target, realised=None, n=0)
    return GuaranteeResult(promise="false_alarm_rate", target=target, realised=float(flags.mean()), n=len(flags))


def _selective_risk(decider: Decider, outputs: Outputs, labels: NDArray[np.int64], target: float) -> GuaranteeResult:
    """The error rate among test images that are not flagged by default, and accepted at a target risk."""
    try:
        accepted = decide(decider.rule(OperatingPoint(target_risk=target)), outputs).accepts
    except OperatingPointError:
        return GuaranteeResult(promise="selective_risk", target=target, realised=None, n=0)
    assert accepted is not None  # if a requested risk is not supported, the rule is an error
    wrong = outputs["prediction"] != labels
    risk = float(wrong[accepted].mean()) if accepted.any() else 0.0
    return GuaranteeResult(promise="selective_risk", target=target, realised=risk, n=int(accepted.sum()))


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


def _check_same_data(current: dict[str, Any], recorded: dict[str, Any]) -> None:
    """Raise DataError if the data differ from those of the run, because test images may then be training images."""
    for split, digest in current["sha256"].items():
        if digest != recorded.get("sha256", {}).get(split):
            raise DataError(
                f"Data set {current['id']!r} (split {split!r}) is not the one that the bundle was made with: "
                "its images, labels or classes have changed."
            )
    if current["splits"] != recorded.get("splits"):
        raise DataError(f"Data set {current['id']!r} is not split as it was when the bundle was made.")
