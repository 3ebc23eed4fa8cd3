"""Figures of merit against hand-made cases and sklearn, and promises against what the test set made of them."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from sklearn.metrics import average_precision_score, roc_auc_score

from qualms.bundle.manifest import Evaluation, Golden, GuaranteeResult, Manifest, Operating, Provenance
from qualms.bundle.scores import DIRICHLET_SCORES, SCORES, as_uncertainty
from qualms.decisions.calibration import calibrate, reference, trust_grid
from qualms.decisions.operating_point import OperatingPoint, flag_point, trust_point
from qualms.images.input_spec import InputSpec
from qualms_training.reporting.evaluation import all_doubts, detection, evaluate

CLASSES = 3
SPECS = {name: SCORES[name] for name in DIRICHLET_SCORES}

Outputs = dict[str, NDArray[Any]]


def graph_outputs(n: int, seed: int, shift: float = 0.0) -> tuple[Outputs, NDArray[np.int64]]:
    """What a graph might say about n images: the more doubtful, the more often wrong; and the true labels."""
    rng = np.random.default_rng(seed)
    hidden = rng.standard_normal(n) + shift
    outputs: Outputs = {
        name: ((-1 if spec.direction == "lower" else 1) * hidden).astype(np.float32) for name, spec in SPECS.items()
    }
    labels = rng.integers(CLASSES, size=n)
    wrong = rng.random(n) < 1 / (1 + np.exp(3 - 2 * hidden))
    said = np.where(wrong, (labels + 1) % CLASSES, labels)
    outputs["prediction"] = said
    base = np.full((n, CLASSES), 0.1)
    base[np.arange(n), said] = 1 + np.exp(-hidden)
    outputs["base_probabilities"] = (base / base.sum(axis=1, keepdims=True)).astype(np.float32)
    return outputs, labels


def manifest(n: int = 2000, **operating: Any) -> Manifest:
    """A manifest calibrated on n images."""
    outputs, labels = graph_outputs(n, seed=1)
    fitted, _ = graph_outputs(1000, seed=2)
    settings = Operating.model_validate({"target_fpr": 0.05, "target_risk": 0.05, **operating})
    grid = trust_grid(as_uncertainty(fitted[settings.trust_score], SPECS[settings.trust_score].direction))
    digest = "0" * 64
    return Manifest(
        name="made",
        version="1",
        classes=["a", "b", "c"],
        input=InputSpec(height=4, width=4),
        scores=SPECS,
        operating=settings,
        calibration=calibrate(
            outputs, labels, SPECS, settings.trust_score, grid, split="x", data="made", data_sha256=digest
        ),
        reference=reference(outputs, SPECS, CLASSES),
        golden=Golden(count=1, input_sha256=digest, outputs={"entropy": np.zeros(1)}),
        provenance=Provenance(
            created="", qualms="", recipe_name="", recipe={}, seed=0, versions={}, base={}, meta={}, data={}
        ),
        graph_sha256=digest,
    )


def found(strangers: dict[str, Outputs] | None = None, targets: tuple[float, ...] = (0.05, 0.01)) -> Evaluation:
    outputs, labels = graph_outputs(4000, seed=3)
    return evaluate(manifest(), "made", labels, outputs, strangers or {}, targets=targets)


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
def test_small_cases_are_what_they_are_by_hand(
    negatives: list[float], positives: list[float], auroc: float, aupr: float, fpr95: float
) -> None:
    assert detection(np.array(negatives), np.array(positives)) == pytest.approx((auroc, aupr, fpr95))


@pytest.mark.parametrize("decimals", [0, 1, 9])
def test_auroc_and_aupr_are_sklearns_with_ties_and_without(decimals: int) -> None:
    rng = np.random.default_rng(4)
    negatives, positives = rng.normal(0, 1, 300).round(decimals), rng.normal(1, 2, 200).round(decimals)
    truth, doubts = np.r_[np.zeros(300), np.ones(200)], np.r_[negatives, positives]
    auroc, aupr, _ = detection(negatives, positives)
    assert auroc == pytest.approx(100 * roc_auc_score(truth, doubts))
    assert aupr == pytest.approx(100 * average_precision_score(truth, doubts))


def fpr95_by_definition(negatives: NDArray[Any], positives: NDArray[Any]) -> float:
    """Over all thresholds that catch 95 % of the positives, the smallest share of negatives caught."""
    thresholds = np.unique(np.r_[negatives, positives])
    shares = [(positives >= t).mean() >= 0.95 for t in thresholds]
    return 100 * min(float((negatives >= t).mean()) for t, good in zip(thresholds, shares, strict=True) if good)


@pytest.mark.parametrize("decimals", [0, 1, 9])
def test_fpr95_is_its_definition_with_ties_and_without(decimals: int) -> None:
    rng = np.random.default_rng(5)
    for size in (20, 37, 200):
        negatives, positives = rng.normal(0, 1, 50).round(decimals), rng.normal(1, 2, size).round(decimals)
        assert detection(negatives, positives)[2] == pytest.approx(fpr95_by_definition(negatives, positives))


def test_fpr95_of_a_small_example_is_exact() -> None:
    positives = np.arange(1.0, 21.0)  # nineteen of twenty lie at 2 or above
    negatives = np.array([0.0, 1.5, 2.0, 2.5, 7.0])
    assert detection(negatives, positives)[2] == pytest.approx(60)


def test_fpr95_finds_its_threshold_among_evenly_tied_scores() -> None:
    """One image of each kind on every value: a straight ROC curve, of which only the ends must not count."""
    values = np.arange(20.0)
    assert detection(values, values)[2] == pytest.approx(95)


def test_in_distribution_against_itself_is_fifty() -> None:
    outputs, labels = graph_outputs(4000, seed=3)
    other, _ = graph_outputs(4000, seed=6)
    result = evaluate(manifest(), "made", labels, outputs, {"again": other}, targets=[0.05])
    assert len(result.ood) == len(DIRICHLET_SCORES) + 2
    for row in result.ood:
        assert row.auroc == pytest.approx(50, abs=2), row.score


def test_every_score_of_the_bundle_and_the_bases_two_tell_strangers_the_right_way_round() -> None:
    far, _ = graph_outputs(1000, seed=7, shift=2.0)
    near, _ = graph_outputs(500, seed=8, shift=1.0)
    result = found({"far": far, "near": near})
    assert [row.data for row in result.ood] == ["far"] * 10 + ["near"] * 10
    assert {row.score for row in result.ood} == {"base_entropy", "base_max_probability", *DIRICHLET_SCORES}
    for row in result.ood:
        assert (row.n_id, row.n_ood) == (4000, 1000 if row.data == "far" else 500)
        assert row.auroc > (85 if row.data == "far" else 70), row.score


def test_doubts_of_the_base_are_its_entropy_and_largest_probability() -> None:
    outputs, _ = graph_outputs(50, seed=9)
    outputs["base_probabilities"][0] = [1, 0, 0]  # whose logarithm must not be taken
    doubts = all_doubts(outputs, manifest(200))
    base = outputs["base_probabilities"].astype(np.float64)
    np.testing.assert_allclose(doubts["base_entropy"][1:], -(base * np.log(base + 1e-300)).sum(axis=1)[1:])
    assert doubts["base_entropy"][0] == 0
    np.testing.assert_allclose(doubts["base_max_probability"], -base.max(axis=1))
    np.testing.assert_allclose(doubts["precision"], -outputs["precision"])
    np.testing.assert_allclose(doubts["entropy"], outputs["entropy"])


def test_errors_are_those_of_the_served_predictions() -> None:
    outputs, labels = graph_outputs(4000, seed=3)
    wrong = outputs["prediction"] != labels
    rows = {row.score: row for row in found().misclassification}
    assert set(rows) == {"base_entropy", "base_max_probability", *DIRICHLET_SCORES}
    assert rows["entropy"].auroc == pytest.approx(100 * roc_auc_score(wrong, outputs["entropy"]))
    assert rows["precision"].aupr == pytest.approx(100 * average_precision_score(wrong, -outputs["precision"]))


def test_without_errors_there_is_no_misclassification_to_report() -> None:
    outputs, _ = graph_outputs(100, seed=3)
    result = evaluate(manifest(200), "made", outputs["prediction"], outputs, {}, targets=[0.05])
    assert result.misclassification == []
    assert result.accuracy == 100


def test_accuracy_before_and_after_and_whether_predictions_are_the_same() -> None:
    outputs, labels = graph_outputs(4000, seed=3)
    accuracy = 100 * float((outputs["prediction"] == labels).mean())
    same = found()
    assert (same.base_accuracy, same.accuracy, same.identical_predictions) == (accuracy, accuracy, True)
    before = outputs["prediction"].copy()
    before[:4] = (labels[:4] + 1) % CLASSES
    before[4:8] = labels[4:8]
    other = evaluate(manifest(), "made", labels, outputs, {}, targets=[], base_predictions=before)
    assert not other.identical_predictions
    assert other.accuracy == accuracy
    assert other.base_accuracy == 100 * float((before == labels).mean())


def test_promises_are_kept_on_images_the_calibration_has_not_seen() -> None:
    rows = {(row.promise, row.target): row for row in found().realised}
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


def test_realised_rates_are_counted_on_flags_and_on_accepted_predictions() -> None:
    outputs, labels = graph_outputs(4000, seed=3)
    made = manifest()
    rows = {row.promise: row for row in evaluate(made, "made", labels, outputs, {}, targets=[0.05]).realised}
    flagged = outputs["mutual_information"] > flag_point(made, OperatingPoint(target_fpr=0.05)).threshold
    accepted = outputs["error_probability"] <= trust_point(made, OperatingPoint(target_risk=0.05)).threshold
    wrong = outputs["prediction"] != labels
    assert rows["false_alarm_rate"].realised == pytest.approx(flagged.mean())
    assert rows["selective_risk"].realised == pytest.approx(wrong[accepted].mean())
    assert rows["selective_risk"].n == accepted.sum()


def test_a_target_the_calibration_cannot_support_is_reported_as_such() -> None:
    outputs, labels = graph_outputs(500, seed=3)
    result = evaluate(manifest(200), "made", labels, outputs, {}, targets=[1e-4])
    assert result.realised == [
        GuaranteeResult(promise="false_alarm_rate", target=1e-4, realised=None, n=0),
        GuaranteeResult(promise="selective_risk", target=1e-4, realised=None, n=0),
    ]


def test_a_base_of_other_classes_has_neither_accuracy_nor_scores() -> None:
    outputs, labels = graph_outputs(500, seed=3)
    outputs["base_probabilities"] = np.full((500, 7), 1 / 7, np.float32)
    served = manifest(200).model_copy(update={"prediction": "meta"})
    result = evaluate(served, "made", labels, outputs, {"far": outputs}, targets=[0.05])
    assert (result.base_accuracy, result.identical_predictions) == (None, None)
    assert result.accuracy == 100 * float((outputs["prediction"] == labels).mean())
    assert {row.score for row in result.ood} == {row.score for row in result.misclassification} == set(DIRICHLET_SCORES)
