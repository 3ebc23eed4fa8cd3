"""Detection metrics and calibration errors against hand-made cases and sklearn; guarantees against counted rates."""

import io
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from rich.console import Console
from sklearn.metrics import average_precision_score, log_loss, roc_auc_score

from qualms.bundle.evaluation_results import Evaluation, GuaranteeResult
from qualms.bundle.file import open_bundle, write_bundle
from qualms.bundle.manifest import Golden, Manifest, OperatingDefaults, Provenance
from qualms.bundle.scores import SCORES, as_uncertainty
from qualms.decisions.calibration import CalibrationSource, calibrate, reference, trust_grid
from qualms.decisions.calibration_set import CalibrationSet
from qualms.decisions.operating_point import OperatingPoint
from qualms.errors import EncodingError, OperatingPointError
from qualms.images.fingerprints import fingerprints
from qualms.images.input_spec import InputSpec
from qualms_training.console import Display
from qualms_training.data import load
from qualms_training.data.dataset import ImageSet
from qualms_training.data.sources.npz import write_npz
from qualms_training.data.sources.synthetic import draw_shapes
from qualms_training.errors import DataError
from qualms_training.reporting.evaluation import (
    calibration_error,
    check_not_calibrated_on,
    detection,
    evaluate,
    evaluate_bundle,
    negative_log_likelihood,
    uncertainties,
)
from qualms_training.reporting.recalibration import recalibrate

pytestmark = pytest.mark.slow

CLASSES = 3

Outputs = dict[str, NDArray[Any]]


def graph_outputs(n: int, seed: int, shift: float = 0.0) -> tuple[Outputs, NDArray[np.int64]]:
    """Simulated outputs of a graph for n images, more often wrong where more uncertain, and the true labels."""
    rng = np.random.default_rng(seed)
    hidden = rng.standard_normal(n) + shift
    outputs: Outputs = {
        name: ((-1 if spec.direction == "lower" else 1) * hidden).astype(np.float32) for name, spec in SCORES.items()
    }
    outputs["fused"] = (0.7 * hidden + 0.7 * rng.standard_normal(n)).astype(np.float32)
    labels = rng.integers(CLASSES, size=n)
    wrong = rng.random(n) < 1 / (1 + np.exp(3 - 2 * hidden))
    prediction = np.where(wrong, (labels + 1) % CLASSES, labels)
    outputs["prediction"] = prediction
    base = np.full((n, CLASSES), 0.1)
    base[np.arange(n), prediction] = 1 + np.exp(-hidden)
    outputs["base_probabilities"] = (base / base.sum(axis=1, keepdims=True)).astype(np.float32)
    outputs["probabilities"] = ((1 + base) / (1 + base).sum(axis=1, keepdims=True)).astype(np.float32)
    outputs["meta_alpha"] = (2 + base).astype(np.float32)
    return outputs, labels


def manifest(n: int = 2000, **operating: Any) -> Manifest:
    """A manifest calibrated on n images."""
    outputs, labels = graph_outputs(n, seed=1)
    fitted, _ = graph_outputs(1000, seed=2)
    settings = OperatingDefaults.model_validate({"target_fpr": 0.05, "target_risk": 0.05, **operating})
    grid = trust_grid(as_uncertainty(fitted[settings.trust_score], SCORES[settings.trust_score].direction))
    digest = "0" * 64
    return Manifest(
        name="made",
        version="1",
        classes=["a", "b", "c"],
        input=InputSpec(height=4, width=4),
        alpha="joined",
        flag_terms=["entropy"],
        scores=dict(SCORES),
        operating=settings,
        calibration=calibrate(outputs, labels, SCORES, grid, source=CalibrationSource("x", "made", digest)),
        reference=reference([outputs], SCORES, CLASSES),
        golden=Golden(count=1, input_sha256=digest, outputs={"entropy": np.zeros(1)}),
        provenance=Provenance(
            created="", qualms="", recipe_name="", recipe={}, seed=0, versions={}, base={}, meta={}, data={}
        ),
        graph_sha256=digest,
    )


def evaluated(ood: dict[str, Outputs] | None = None, targets: tuple[float, ...] = (0.05, 0.01)) -> Evaluation:
    outputs, labels = graph_outputs(4000, seed=3)
    return evaluate(manifest(), "made", labels, outputs, ood or {}, targets=targets)


@pytest.mark.parametrize(
    ("negatives", "positives", "auroc", "aupr", "fpr95"),
    [
        ([0.0, 1.0], [2.0, 3.0], 100, 100, 0),
        ([2.0, 3.0], [0.0, 1.0], 0, (1 / 3 + 2 / 4) / 2 * 100, 100),
        ([1.0, 1.0], [1.0, 1.0], 50, 50, 100),
        ([0.0, 2.0], [1.0, 3.0], 75, (1 + 2 / 3) / 2 * 100, 50),
    ],
    ids=["apart", "reversed", "tied", "crossed"],
)
def test_metrics_of_small_cases_computed_by_hand(
    negatives: list[float], positives: list[float], auroc: float, aupr: float, fpr95: float
) -> None:
    assert detection(np.array(negatives), np.array(positives)) == pytest.approx((auroc, aupr, fpr95))


@pytest.mark.parametrize("decimals", [0, 1, 9])
def test_auroc_and_aupr_agree_with_sklearn_with_and_without_ties(decimals: int) -> None:
    rng = np.random.default_rng(4)
    negatives, positives = rng.normal(0, 1, 300).round(decimals), rng.normal(1, 2, 200).round(decimals)
    truth, uncertainty = np.r_[np.zeros(300), np.ones(200)], np.r_[negatives, positives]
    auroc, aupr, _ = detection(negatives, positives)
    assert auroc == pytest.approx(100 * roc_auc_score(truth, uncertainty))
    assert aupr == pytest.approx(100 * average_precision_score(truth, uncertainty))


def fpr95_by_definition(negatives: NDArray[Any], positives: NDArray[Any]) -> float:
    """The smallest false-positive rate of all thresholds with a true-positive rate of at least 95 %."""
    thresholds = np.unique(np.r_[negatives, positives])
    return 100 * min(float((negatives >= t).mean()) for t in thresholds if (positives >= t).mean() >= 0.95)


@pytest.mark.parametrize("decimals", [0, 1, 9])
def test_fpr95_agrees_with_its_definition_with_and_without_ties(decimals: int) -> None:
    rng = np.random.default_rng(5)
    for size in (20, 37, 200):
        negatives, positives = rng.normal(0, 1, 50).round(decimals), rng.normal(1, 2, size).round(decimals)
        assert detection(negatives, positives)[2] == pytest.approx(fpr95_by_definition(negatives, positives))


def test_fpr95_of_a_small_example_is_exact() -> None:
    positives = np.arange(1.0, 21.0)  # nineteen of twenty lie at 2 or above
    negatives = np.array([0.0, 1.5, 2.0, 2.5, 7.0])
    assert detection(negatives, positives)[2] == pytest.approx(60)


def test_fpr95_uses_points_on_straight_parts_of_the_roc_curve() -> None:
    values = np.arange(20.0)
    assert detection(values, values)[2] == pytest.approx(95)


def test_auroc_of_the_in_distribution_set_against_itself_is_50() -> None:
    outputs, labels = graph_outputs(4000, seed=3)
    other, _ = graph_outputs(4000, seed=6)
    result = evaluate(manifest(), "made", labels, outputs, {"again": other}, targets=[0.05])
    assert len(result.ood) == len(SCORES) + 2
    for row in result.ood:
        assert row.auroc == pytest.approx(50, abs=2), row.score


def test_every_score_of_bundle_and_base_is_larger_for_ood_images() -> None:
    far, _ = graph_outputs(1000, seed=7, shift=2.0)
    near, _ = graph_outputs(500, seed=8, shift=1.0)
    result = evaluated({"far": far, "near": near})
    assert [row.data for row in result.ood] == ["far"] * (len(SCORES) + 2) + ["near"] * (len(SCORES) + 2)
    assert {row.score for row in result.ood} == {"base_entropy", "base_max_probability", *SCORES}
    for row in result.ood:
        assert (row.n_id, row.n_ood) == (4000, 1000 if row.data == "far" else 500)
        assert row.auroc > (80 if row.data == "far" else 65), row.score


def test_uncertainties_include_entropy_and_largest_probability_of_the_base() -> None:
    outputs, _ = graph_outputs(50, seed=9)
    outputs["base_probabilities"][0] = [1, 0, 0]  # the logarithm of 0 must not be taken
    values = uncertainties(outputs, manifest(200))
    base = outputs["base_probabilities"].astype(np.float64)
    np.testing.assert_allclose(values["base_entropy"][1:], -(base * np.log(base + 1e-300)).sum(axis=1)[1:])
    assert values["base_entropy"][0] == 0
    np.testing.assert_allclose(values["base_max_probability"], -base.max(axis=1))
    np.testing.assert_allclose(values["precision"], -outputs["precision"])
    np.testing.assert_allclose(values["entropy"], outputs["entropy"])


def test_misclassification_uses_the_served_predictions() -> None:
    outputs, labels = graph_outputs(4000, seed=3)
    wrong = outputs["prediction"] != labels
    rows = {row.score: row for row in evaluated().misclassification}
    assert set(rows) == {"base_entropy", "base_max_probability", *SCORES}
    assert rows["entropy"].auroc == pytest.approx(100 * roc_auc_score(wrong, outputs["entropy"]))
    assert rows["precision"].aupr == pytest.approx(100 * average_precision_score(wrong, -outputs["precision"]))


def test_misclassification_is_empty_without_errors() -> None:
    outputs, _ = graph_outputs(100, seed=3)
    result = evaluate(manifest(200), "made", outputs["prediction"], outputs, {}, targets=[0.05])
    assert result.misclassification == []
    assert result.accuracy == 100


def test_accuracy_of_base_and_bundle_and_whether_their_predictions_are_identical() -> None:
    outputs, labels = graph_outputs(4000, seed=3)
    accuracy = 100 * float((outputs["prediction"] == labels).mean())
    same = evaluated()
    assert (same.base_accuracy, same.accuracy, same.identical_predictions) == (accuracy, accuracy, True)
    before = outputs["prediction"].copy()
    before[499] = (before[499] + 1) % CLASSES
    other = evaluate(manifest(), "made", labels, outputs, {}, targets=[], base_predictions=before)
    assert (other.identical_predictions, other.compared) == (False, None)
    assert (other.base_accuracy, other.accuracy) == (accuracy, accuracy)
    for count in (499, 500):
        part = evaluate(manifest(), "made", labels, outputs, {}, targets=[], base_predictions=before[:count])
        assert (part.identical_predictions, part.compared) == (count == 499, count)


def test_guarantees_hold_on_test_images() -> None:
    rows = {(row.promise, row.target): row for row in evaluated().realised}
    assert set(rows) == {(p, t) for p in ("false_alarm_rate", "selective_risk") for t in (0.05, 0.01)}
    for (_, target), row in rows.items():
        if row.realised is not None:
            assert row.realised <= 1.3 * target  # 95 % confidence in the calibration set, and 4,000 test images
    alarms = rows["false_alarm_rate", 0.05]
    assert alarms.n == 4000
    assert alarms.realised == pytest.approx(0.045, abs=0.015)
    risk = rows["selective_risk", 0.05]
    assert risk.realised is not None
    assert 0 < risk.n < 4000


def test_measured_rates_are_counted_on_flags_and_on_predictions_not_flagged_and_accepted() -> None:
    outputs, labels = graph_outputs(4000, seed=3)
    made = manifest(target_fpr=0.2)
    rows = {row.promise: row for row in evaluate(made, "made", labels, outputs, {}, targets=[0.05]).realised}
    calibration, wrong = CalibrationSet(made), outputs["prediction"] != labels
    flagged = outputs["fused"] > calibration.flag_point(OperatingPoint(target_fpr=0.05)).threshold
    assert rows["false_alarm_rate"].realised == pytest.approx(flagged.mean())
    point = OperatingPoint(target_risk=0.05)
    below_trust = outputs["predicted_error"] <= calibration.trust_point(point).threshold
    accepted = below_trust & (outputs["fused"] < calibration.flag_point(point).threshold)
    assert accepted.sum() < below_trust.sum()
    assert rows["selective_risk"].realised == pytest.approx(wrong[accepted].mean())
    assert rows["selective_risk"].n == accepted.sum()


def test_a_target_that_needs_more_calibration_images_is_reported_as_none() -> None:
    outputs, labels = graph_outputs(500, seed=3)
    result = evaluate(manifest(200), "made", labels, outputs, {}, targets=[1e-4])
    assert result.realised == [
        GuaranteeResult(promise="false_alarm_rate", target=1e-4, realised=None, n=0),
        GuaranteeResult(promise="selective_risk", target=1e-4, realised=None, n=0),
    ]


def test_a_base_that_does_not_predict_has_neither_accuracy_nor_scores() -> None:
    outputs, labels = graph_outputs(500, seed=3)
    outputs["base_probabilities"] = np.full((500, 7), 1 / 7, np.float32)
    served = manifest(200).model_copy(update={"prediction": "meta"})
    result = evaluate(served, "made", labels, outputs, {"far": outputs}, targets=[0.05])
    assert (result.base_accuracy, result.identical_predictions) == (None, None)
    assert result.accuracy == 100 * float((outputs["prediction"] == labels).mean())
    assert {row.score for row in result.ood} == {row.score for row in result.misclassification} == set(SCORES)


# Class probabilities


def test_the_calibration_error_of_a_small_example_is_exact() -> None:
    """Two bins: 0.9 and 0.93 with one of two right, and 0.5 with one of two right."""
    probabilities = np.array([[0.9, 0.1], [0.93, 0.07], [0.5, 0.5], [0.5, 0.5]])
    error = calibration_error(probabilities, np.array([0, 1, 0, 1]))
    assert error == pytest.approx(100 * (2 * abs(0.5 - 0.915) + 2 * abs(0.5 - 0.5)) / 4)


def ece_by_definition(probabilities: NDArray[np.float64], labels: NDArray[np.int64]) -> float:
    """15 bins of equal width: the share of the images in a bin times |accuracy − mean confidence|, summed."""
    total = 0.0
    for bin_index in range(15):
        inside = [
            row for row in range(len(labels)) if bin_index / 15 <= probabilities[row].max() < (bin_index + 1) / 15
        ]
        if inside:
            accuracy = np.mean([probabilities[row].argmax() == labels[row] for row in inside])
            confidence = np.mean([probabilities[row].max() for row in inside])
            total += len(inside) / len(labels) * abs(accuracy - confidence)
    return 100 * total


def test_the_calibration_error_equals_its_definition() -> None:
    rng = np.random.default_rng(11)
    probabilities = rng.dirichlet([0.3, 0.5, 1.0], 700)
    labels = rng.integers(3, size=700)
    assert calibration_error(probabilities, labels) == pytest.approx(ece_by_definition(probabilities, labels))


def test_certain_probabilities_are_in_the_last_bin() -> None:
    assert calibration_error(np.array([[1.0, 0.0], [1.0, 0.0]]), np.array([0, 1])) == 50
    assert calibration_error(np.array([[1.0, 0.0], [0.99, 0.01]]), np.array([0, 0])) == pytest.approx(0.5)


def test_the_negative_log_likelihood_agrees_with_sklearn_and_is_finite_for_a_probability_of_zero() -> None:
    rng = np.random.default_rng(12)
    probabilities, labels = rng.dirichlet([1, 2, 3], 200), rng.integers(3, size=200)
    assert negative_log_likelihood(probabilities, labels) == pytest.approx(log_loss(labels, probabilities))
    assert 80 < negative_log_likelihood(np.array([[1.0, 0.0]]), np.array([1])) < 100


def test_class_probabilities_of_alpha_base_and_meta_model_are_evaluated() -> None:
    outputs, labels = graph_outputs(4000, seed=3)
    meta = outputs["meta_alpha"] / outputs["meta_alpha"].sum(axis=1, keepdims=True)
    expected = {"alpha": outputs["probabilities"], "base": outputs["base_probabilities"], "meta_alpha": meta}
    rows = evaluated().probabilities
    assert [row.distribution for row in rows] == list(expected)
    for row in rows:
        probabilities = expected[row.distribution].astype(np.float64)
        assert row.ece == pytest.approx(ece_by_definition(probabilities, labels), rel=1e-4)
        assert row.nll == pytest.approx(-np.log(probabilities[np.arange(4000), labels]).mean())


def test_only_the_distributions_over_the_datas_classes_are_evaluated() -> None:
    outputs, labels = graph_outputs(500, seed=3)
    transfer = manifest(200).model_copy(update={"prediction": "meta"})
    result = evaluate(transfer, "made", labels, outputs, {}, targets=[])
    assert [row.distribution for row in result.probabilities] == ["alpha", "meta_alpha"]
    del outputs["meta_alpha"]
    earlier = manifest(200).model_copy(update={"alpha": "meta"})
    result = evaluate(earlier, "made", labels, outputs, {}, targets=[])
    assert [row.distribution for row in result.probabilities] == ["alpha", "base"]


# Bundle files


def test_evaluate_bundle_reproduces_the_figures_in_the_manifest(tiny_bundle: Path) -> None:
    recorded = open_bundle(tiny_bundle).manifest.evaluation
    assert recorded is not None
    result = evaluate_bundle(tiny_bundle, None)
    for row, expected in zip(result.ood, recorded.ood, strict=True):
        assert (row.data, row.score) == (expected.data, expected.score)
        assert row.auroc == pytest.approx(expected.auroc, abs=0.01)
    assert result.accuracy == pytest.approx(recorded.accuracy)


def test_evaluate_bundle_takes_other_ood_sets(tiny_bundle: Path) -> None:
    result = evaluate_bundle(tiny_bundle, None, ["strokes"])
    assert {row.data for row in result.ood} == {"strokes", "corrupted", "shapes (itself)"}


def change_record(path: Path, change: dict[str, Any]) -> None:
    """Change the data recorded in a bundle's provenance."""
    bundle = open_bundle(path)
    origin = bundle.manifest.provenance
    other = origin.model_copy(update={"data": {**origin.data, **change}})
    write_bundle(path, bundle.graph, bundle.manifest.model_copy(update={"provenance": other}))


@pytest.mark.parametrize("split", ["train", "test"])
def test_evaluate_bundle_with_changed_data_is_an_error(split: str, tiny_bundle: Path) -> None:
    recorded = open_bundle(tiny_bundle).manifest.provenance.data["sha256"]
    change_record(tiny_bundle, {"sha256": {**recorded, split: "0" * 64}})
    with pytest.raises(DataError, match=rf"'shapes' \(split '{split}'\) is not the one that the bundle was made with"):
        evaluate_bundle(tiny_bundle, None)


def test_evaluate_bundle_with_other_splits_is_an_error(tiny_bundle: Path) -> None:
    change_record(tiny_bundle, {"splits": []})
    with pytest.raises(DataError, match="'shapes' is not split as it was"):
        evaluate_bundle(tiny_bundle, None)


# Test images that were calibrated on


def calibrated_on(images: NDArray[np.uint8]) -> Manifest:
    """A manifest with the fingerprints of these images."""
    made = manifest(200)
    calibration = made.calibration.model_copy(update={"fingerprints": fingerprints(images)})
    return made.model_copy(update={"calibration": calibration})


def noise_images(n: int, seed: int) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (n, 4, 4, 3), dtype=np.uint8)


@pytest.mark.parametrize("shared", [0, 1, 3])
def test_a_few_test_images_that_were_calibrated_on_are_counted(shared: int) -> None:
    known, test = noise_images(200, 0), noise_images(300, 1)
    test[:shared] = known[:shared]
    assert check_not_calibrated_on(calibrated_on(known), test, "mine") == shared


@pytest.mark.parametrize("shared", [4, 300])
def test_more_than_one_percent_of_test_images_that_were_calibrated_on_are_refused(shared: int) -> None:
    known, test = noise_images(300, 0), noise_images(300, 1)
    test[:shared] = known[:shared]
    with pytest.raises(
        DataError, match=rf"{shared} of the 300 test images of 'mine' were used to calibrate made; .*other images"
    ) as caught:
        check_not_calibrated_on(calibrated_on(known), test, "mine")
    assert "\n" not in str(caught.value)


def test_repeated_test_images_count_each_time() -> None:
    known, test = noise_images(200, 0), noise_images(300, 1)
    test[:3] = known[0]
    assert check_not_calibrated_on(calibrated_on(known), test, "mine") == 3


def test_a_calibration_without_fingerprints_is_not_checked() -> None:
    assert manifest(200).calibration.fingerprints is None
    assert check_not_calibrated_on(manifest(200), noise_images(20, 0), "mine") == 0


def test_images_of_a_kept_calibration_are_refused_too() -> None:
    """The guarantee on errors and prediction sets come from these images."""
    labelled, unlabelled = (calibrated_on(noise_images(100, seed)).calibration for seed in (0, 1))
    kept = manifest(200).model_copy(
        update={"calibration": unlabelled.model_copy(update={"wrong": None}), "labelled_calibration": labelled}
    )
    for seed in (0, 1):
        with pytest.raises(DataError, match="were used to calibrate"):
            check_not_calibrated_on(kept, noise_images(100, seed), "mine")


def write_shapes(folder: Path, count: int, seed: int) -> Path:
    """New labelled images as an npz file."""
    drawn = draw_shapes(count, seed=seed)
    return write_npz(folder, ImageSet("mine", "test", drawn.images, drawn.labels, drawn.classes))


def test_evaluating_on_the_images_of_the_calibration_is_refused_and_nothing_is_written(
    tiny_bundle: Path, tmp_path: Path
) -> None:
    data = write_shapes(tmp_path, 200, seed=9)
    recalibrate(tiny_bundle, str(data), tiny_bundle)
    before = tiny_bundle.read_bytes()
    with pytest.raises(DataError, match=r"200 of the 200 test images of .*mine-test\.npz' were used to calibrate tiny"):
        evaluate_bundle(tiny_bundle, None, test=data, write=True)
    assert tiny_bundle.read_bytes() == before


def test_calibrating_on_the_test_set_is_found_by_its_pixels(tiny_bundle: Path, tmp_path: Path) -> None:
    drawn = load("shapes", "test")
    folder = tmp_path / "photos"
    folder.mkdir()
    for index, pixels in enumerate(np.asarray(drawn.images)[:300]):
        Image.fromarray(pixels).save(folder / f"{999 - index}.png")
    recalibrate(tiny_bundle, str(folder), tiny_bundle)
    with pytest.raises(DataError, match=r"300 of the 2,000 test images of 'shapes' were used to calibrate tiny"):
        evaluate_bundle(tiny_bundle, None)


# Test images of the user


SILENT = Display(Console(file=io.StringIO(), width=80))


def test_own_test_images_as_npz_and_as_class_folders_give_the_same_results(tiny_bundle: Path, tmp_path: Path) -> None:
    data, drawn = write_shapes(tmp_path, 120, seed=9), draw_shapes(120, seed=9)
    folder = tmp_path / "photos"
    for index, (pixels, label) in enumerate(zip(np.asarray(drawn.images), drawn.labels, strict=True)):
        (folder / drawn.classes[label]).mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(folder / drawn.classes[label] / f"{index:03}.png")
    before = tiny_bundle.read_bytes()
    results = [evaluate_bundle(tiny_bundle, None, test=path, display=SILENT) for path in (data, folder)]
    assert tiny_bundle.read_bytes() == before
    assert [result.test_data for result in results] == [str(data), str(folder)]
    for result in results:
        assert (result.n, result.calibrated_on) == (120, 0)
        assert {row.data for row in result.ood} == {"corrupted"}
        assert [row.realised for row in result.realised] == [row.realised for row in results[0].realised]
        assert result.accuracy == results[0].accuracy
        assert len(result.encodings) == 13
        assert {one.n for one in result.encodings} == {120}
        assert {one.sets for row in result.encodings for one in row.detected} == {1}
    with_ood = evaluate_bundle(tiny_bundle, None, ["strokes"], test=data, display=SILENT)
    assert {row.data for row in with_ood.ood} == {"strokes", "corrupted"}


def test_an_evaluation_can_be_stored_in_the_bundle(tiny_bundle: Path, tmp_path: Path) -> None:
    data = write_shapes(tmp_path, 120, seed=9)
    before = open_bundle(tiny_bundle)
    result = evaluate_bundle(tiny_bundle, None, test=data, write=True, display=SILENT)
    after = open_bundle(tiny_bundle)
    assert after.manifest.evaluation == result != before.manifest.evaluation
    assert after.graph == before.graph
    assert after.manifest.calibration.model_dump_json() == before.manifest.calibration.model_dump_json()


def test_a_few_images_of_the_calibration_are_marked_in_the_evaluation(tiny_bundle: Path, tmp_path: Path) -> None:
    calibrated = write_shapes(tmp_path, 200, seed=9)
    recalibrate(tiny_bundle, str(calibrated), tiny_bundle)
    drawn, known = draw_shapes(200, seed=10), draw_shapes(200, seed=9)
    pixels, labels = np.array(drawn.images), drawn.labels.copy()
    pixels[5:7], labels[5:7] = np.asarray(known.images)[:2], known.labels[:2]
    data = write_npz(tmp_path, ImageSet("other", "test", pixels, labels, drawn.classes))
    printed = io.StringIO()
    result = evaluate_bundle(
        tiny_bundle, None, test=data, write=True, display=Display(Console(file=printed, width=200))
    )
    assert result.calibrated_on == 2
    stored = open_bundle(tiny_bundle).manifest.evaluation
    assert stored is not None
    assert stored.calibrated_on == 2
    assert "2 test images are also calibration images." in printed.getvalue()


def test_the_papers_figures_are_not_printed_beside_those_of_own_test_images(tiny_bundle: Path, tmp_path: Path) -> None:
    bundle = open_bundle(tiny_bundle)
    origin = bundle.manifest.provenance
    recipe = {**origin.recipe, "paper_id": "MNIST", "report_encodings": ["png"]}
    changed = bundle.manifest.model_copy(update={"provenance": origin.model_copy(update={"recipe": recipe})})
    write_bundle(tiny_bundle, bundle.graph, changed)
    printed = io.StringIO()
    data = write_shapes(tmp_path, 120, seed=9)
    evaluate_bundle(tiny_bundle, None, test=data, display=Display(Console(file=printed, width=200)))
    assert "the paper's figure" not in printed.getvalue()


@pytest.mark.parametrize("path", ["flat", "nowhere", "unknown"])
def test_own_test_images_that_cannot_be_used_are_an_error(path: str, tiny_bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "flat").mkdir()
    Image.new("RGB", (16, 16)).save(tmp_path / "flat" / "a.png")
    (tmp_path / "unknown" / "zebra").mkdir(parents=True)
    shutil.copy(tmp_path / "flat" / "a.png", tmp_path / "unknown" / "zebra")
    messages = {"flat": "labels are needed here", "nowhere": "There is no folder", "unknown": "has the class 'zebra'"}
    with pytest.raises(DataError, match=messages[path]):
        evaluate_bundle(tiny_bundle, None, test=tmp_path / path, display=SILENT)


def test_a_bundle_of_the_first_schema_version_can_be_evaluated(earlier_bundle: Path, tmp_path: Path) -> None:
    data = write_shapes(tmp_path, 120, seed=9)
    result = evaluate_bundle(earlier_bundle, None, test=data, write=True, display=SILENT)
    assert result.sets == []
    assert {row.flagged_by_class for row in result.classes} == {None}
    assert [row.calibrated for row in result.encodings][:2] == [True, False]
    assert all(one.realised is not None for row in result.encodings for one in row.realised)
    assert open_bundle(earlier_bundle).manifest.evaluation == result


def test_a_bundle_without_labels_can_be_evaluated(tiny_bundle: Path, tmp_path: Path) -> None:
    data = write_shapes(tmp_path, 200, seed=9)
    recalibrate(tiny_bundle, str(data), tiny_bundle, unlabelled=True)
    test = write_npz(tmp_path, ImageSet("other", "test", *_drawn(120, 10)))
    result = evaluate_bundle(tiny_bundle, None, test=test, display=SILENT)
    rates = {(row.promise, row.target): row.realised for row in result.realised}
    assert rates["false_alarm_rate", 0.05] is not None
    assert rates["selective_risk", 0.05] is None
    assert result.sets == []


def test_prediction_sets_of_a_kept_calibration_are_evaluated(tiny_bundle: Path, tmp_path: Path) -> None:
    data = write_shapes(tmp_path, 200, seed=9)
    recalibrate(tiny_bundle, str(data), tiny_bundle, unlabelled=True, keep_trust=True)
    test = write_npz(tmp_path, ImageSet("other", "test", *_drawn(120, 10)))
    result = evaluate_bundle(tiny_bundle, None, test=test, display=SILENT)
    assert [row.coverage for row in result.sets] == [0.9, 0.95, 0.99]
    assert all(row.realised is not None for row in result.sets)


def _drawn(count: int, seed: int) -> tuple[NDArray[np.uint8], NDArray[np.int64], tuple[str, ...]]:
    drawn = draw_shapes(count, seed=seed)
    return np.asarray(drawn.images), drawn.labels, drawn.classes


def test_evaluate_bundle_takes_other_encodings(tiny_bundle: Path) -> None:
    result = evaluate_bundle(tiny_bundle, None, encodings=["jpeg:80", "resize:1.75:bilinear"])
    assert [row.encoding for row in result.encodings] == ["jpeg:80", "resize:1.75:bilinear"]
    with pytest.raises(EncodingError, match="'jpg:80' is unknown"):
        evaluate_bundle(tiny_bundle, None, encodings=["jpg:80"])


def test_evaluate_bundle_takes_other_coverages_and_refuses_those_that_need_more_images(tiny_bundle: Path) -> None:
    result = evaluate_bundle(tiny_bundle, None, encodings=["png"], coverages=[0.8])
    assert [row.coverage for row in result.sets] == [0.8]
    with pytest.raises(OperatingPointError, match="needs at least 9,999 labelled calibration images; there are 1,000"):
        evaluate_bundle(tiny_bundle, None, coverages=[0.9999])
