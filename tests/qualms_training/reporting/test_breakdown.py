"""Guarantees by encoding and by class, and prediction sets, against counts by hand."""

import numpy as np
import pytest
from numpy.typing import NDArray

from qualms.bundle.calibration_data import AsSent, CalibrationForm
from qualms.bundle.embedded import resolve_model
from qualms.bundle.evaluation_results import EncodingResult
from qualms.bundle.file import Bundle, open_bundle
from qualms.bundle.manifest import Manifest
from qualms.bundle.runtime import GraphRunner
from qualms.decisions.calibration import CalibrationSource
from qualms.decisions.operating_point import OperatingPoint
from qualms.decisions.verdicts import Decider
from qualms.demo.digits import draw_many
from qualms.images.encodings import parse_encoding
from qualms.images.observed import ObservedEncoding
from qualms_training.calibration_run import CalibrationPlan, run_calibration
from qualms_training.console import Display
from qualms_training.data.dataset import Images, Selection
from qualms_training.data.prepare import LabelledSplit
from qualms_training.recipe import REPORTED_ENCODINGS
from qualms_training.reporting.breakdown import (
    Sent,
    class_results,
    encoding_results,
    guarantee_results,
    is_calibrated,
    set_results,
)
from qualms_training.reporting.graph_runs import EvaluationRunner

TARGETS = (0.1, 0.05)


def split(count: int, seed: int, manifest: Manifest) -> LabelledSplit:
    """Drawn digits in a random order of their indices."""
    labels, images = zip(*draw_many(count, seed=seed), strict=True)
    order = np.random.default_rng(seed).permutation(count)
    selection = Selection(Images("drawn", "test", np.stack(images)), order)
    return LabelledSplit(selection.conformed(manifest.input), np.array(labels, np.int64)[order], selection)


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    return open_bundle(resolve_model("demo"))


@pytest.fixture(scope="module")
def runner(bundle: Bundle) -> GraphRunner:
    return GraphRunner(bundle.graph)


@pytest.fixture(scope="module")
def held_out(bundle: Bundle) -> LabelledSplit:
    return split(150, 8, bundle.manifest)


@pytest.fixture(scope="module")
def ood_images(bundle: Bundle) -> dict[str, Selection]:
    """Two OOD sets of different sizes."""
    rng = np.random.default_rng(3)
    sets = {"noise": rng.integers(0, 256, (40, 28, 28), dtype=np.uint8), "grey": np.full((30, 28, 28), 90, np.uint8)}
    return {name: Selection(Images(name, "test", one), np.arange(len(one))) for name, one in sets.items()}


def calibrated(
    bundle: Bundle, runner: GraphRunner, display: Display, form: CalibrationForm, *encodings: str
) -> Manifest:
    """The manifest calibrated on 120 drawn digits as sent, with targets that they support."""
    manifest = bundle.manifest
    operating = manifest.operating.model_copy(update={"target_fpr": 0.05, "target_risk": 0.1})
    trust = manifest.calibration.trust
    plan = CalibrationPlan(
        manifest.input, manifest.scores, 10, operating, manifest.sets, (trust.levels, trust.thresholds)
    )
    source = CalibrationSource("x", "drawn", "0" * 64, as_sent=AsSent(encodings=list(encodings), form=form, seed=0))
    part = split(120, 6, manifest)
    calibration, reference = run_calibration(runner, part.stored, part.labels, plan, source, display)
    update = {"calibration": calibration, "reference": reference, "operating": operating}
    return manifest.model_copy(update=update)


def by_encoding(
    runner: GraphRunner,
    manifest: Manifest,
    test: LabelledSplit,
    ood: dict[str, Selection],
    *encodings: str,
    limit: int = 10_000,
) -> list[EncodingResult]:
    return encoding_results(
        EvaluationRunner(runner, manifest),
        manifest,
        test,
        ood,
        encodings=encodings,
        targets=TARGETS,
        limit=limit,
        display=Display(),
    )


@pytest.mark.slow
@pytest.mark.parametrize("form", ["worst", "by-size"])
def test_the_row_of_an_encoding_has_the_rates_counted_by_hand(
    form: CalibrationForm,
    bundle: Bundle,
    runner: GraphRunner,
    held_out: LabelledSplit,
    ood_images: dict[str, Selection],
    display: Display,
) -> None:
    manifest = calibrated(bundle, runner, display, form, "png", "jpeg:40-60", "resize:2:bilinear")
    rows = by_encoding(runner, manifest, held_out, ood_images, "jpeg:50", "resize:2:bilinear")
    assert [row.encoding for row in rows] == ["jpeg:50", "resize:2:bilinear"]
    decider = Decider(manifest)
    for row, size in zip(rows, ("smaller", "larger"), strict=True):
        encoding = parse_encoding(row.encoding)
        outputs = runner(held_out.stored.received(manifest.input, [encoding], 1).images)
        wrong = outputs["prediction"] != held_out.labels
        assert (row.n, row.calibrated) == (150, True)
        assert row.accuracy == pytest.approx(100 * (1 - wrong.mean()))
        assert [(one.promise, one.target) for one in row.realised] == [
            (promise, target) for target in TARGETS for promise in ("false_alarm_rate", "selective_risk")
        ]
        for one in row.realised:
            if one.promise == "false_alarm_rate":
                threshold = decider.rule(OperatingPoint(target_fpr=one.target), size).flag.threshold
                assert one.realised == pytest.approx((outputs["fused"] > threshold).mean())
                assert one.n == 150
            elif one.target == 0.1:
                rule = decider.rule(OperatingPoint(target_risk=one.target), size)
                assert rule.trust is not None
                accepted = outputs["fused"] < rule.flag.threshold
                accepted &= outputs["predicted_error"] <= rule.trust.threshold
                assert one.n == accepted.sum() > 0
                assert one.realised == pytest.approx(wrong[accepted].mean())
        for found in row.detected:
            threshold = decider.rule(OperatingPoint(target_fpr=found.target), size).flag.threshold
            rates = [
                (runner(one.received(manifest.input, [encoding], 1).images)["fused"] > threshold).mean()
                for one in ood_images.values()
            ]
            assert found.sets == 2
            assert found.realised == pytest.approx(np.mean(rates))


def test_the_limit_holds_for_test_images_and_a_tenth_of_it_for_ood_images(
    bundle: Bundle, runner: GraphRunner, held_out: LabelledSplit, ood_images: dict[str, Selection]
) -> None:
    (row,) = by_encoding(runner, bundle.manifest, held_out, ood_images, "jpeg:50", limit=60)
    first = LabelledSplit(held_out.images[:60], held_out.labels[:60], held_out.stored.first(60))
    few = {name: one.first(6) for name, one in ood_images.items()}
    assert row == by_encoding(runner, bundle.manifest, first, few, "jpeg:50")[0]
    assert row.n == 60
    (one,) = by_encoding(runner, bundle.manifest, held_out, ood_images, "png", limit=1)
    assert one.n == 1


def test_without_ood_sets_nothing_is_detected(bundle: Bundle, runner: GraphRunner, held_out: LabelledSplit) -> None:
    (row,) = by_encoding(runner, bundle.manifest, held_out, {}, "png", limit=20)
    assert row.detected == []
    assert len(row.realised) == 4


def test_images_sent_as_png_have_the_rates_of_the_stored_ones(
    bundle: Bundle, runner: GraphRunner, held_out: LabelledSplit
) -> None:
    (row,) = by_encoding(runner, bundle.manifest, held_out, {}, "png")
    outputs = runner(held_out.images)
    assert row.realised == guarantee_results(Decider(bundle.manifest), Sent(outputs), held_out.labels, TARGETS)


CALIBRATED = {
    ("png", "jpeg:75-95"): {"png", "bmp", "jpeg:95", "jpeg:85", "jpeg:75"},
    ("jpeg:75-95",): {"jpeg:95", "jpeg:85", "jpeg:75"},
    ("resize:1.5-3", "resize:2+jpeg:75-95"): {
        *(f"resize:2:{method}" for method in ("bilinear", "bicubic", "lanczos")),
        "resize:2+jpeg:75",
    },
    ("brightness:0.85-1.15",): {"brightness:0.85", "brightness:1.15"},
    ("resize:2:bicubic",): {"resize:2:bicubic"},
}


def marked(manifest: Manifest) -> set[str]:
    """The encodings that the guarantees include, for images of the size of the drawn digits."""
    images = split(3, 1, manifest).stored
    result = set()
    for text in (*REPORTED_ENCODINGS, "bmp"):
        encoding = parse_encoding(text)
        observed = images.received(manifest.input, [encoding], 0).observed
        if is_calibrated(manifest, encoding, observed):
            result.add(text)
    return result


@pytest.mark.parametrize("form", ["worst", "mixture", "by-size"])
@pytest.mark.parametrize("listed", CALIBRATED, ids=",".join)
def test_an_encoding_is_calibrated_if_the_list_includes_it(
    listed: tuple[str, ...], form: CalibrationForm, bundle: Bundle
) -> None:
    as_sent = AsSent(encodings=list(listed), form=form, seed=0)
    calibration = bundle.manifest.calibration.model_copy(update={"as_sent": as_sent})
    assert marked(bundle.manifest.model_copy(update={"calibration": calibration})) == CALIBRATED[listed]


@pytest.mark.parametrize(
    ("observed", "included"),
    [
        ({}, {"png", "bmp"}),  # bundles of earlier versions
        ({"lossless, smaller size": 5000}, {"png", "bmp"}),
        ({"lossless, same size": 5000}, set()),
        ({"jpeg 80-89, smaller size": 4900, "jpeg 70-79, smaller size": 100}, {"jpeg:85", "jpeg:75"}),
        ({"jpeg 80-89, smaller size": 4970, "jpeg 70-79, smaller size": 30}, {"jpeg:85"}),
    ],
    ids=["not known", "lossless", "another size", "two qualities", "few of one quality"],
)
def test_images_used_as_stored_calibrate_the_encodings_of_at_least_1_percent_of_them(
    observed: dict[str, int], included: set[str], bundle: Bundle
) -> None:
    calibration = bundle.manifest.calibration.model_copy(update={"as_sent": None, "observed": observed})
    assert marked(bundle.manifest.model_copy(update={"calibration": calibration})) == included


def test_the_rows_of_classes_sum_to_all_images_and_all_flags(
    bundle: Bundle, runner: GraphRunner, held_out: LabelledSplit
) -> None:
    manifest = bundle.manifest.model_copy(
        update={"operating": bundle.manifest.operating.model_copy(update={"target_fpr": 0.1})}
    )
    sent, decider = Sent(runner(held_out.images)), Decider(manifest)
    flags = sent.flags(decider, OperatingPoint())
    by_class = sent.flags(decider, OperatingPoint(guarantee="by-class"))
    assert flags is not None
    assert by_class is not None
    assert flags.any()
    rows = class_results(manifest, sent, held_out.labels)
    assert [(row.by, row.label) for row in rows] == [
        (by, label) for by in ("predicted", "true") for label in manifest.classes
    ]
    classes: dict[str, NDArray[np.int64]] = {"predicted": sent.outputs["prediction"], "true": held_out.labels}
    for row in rows:
        inside = classes[row.by] == int(row.label)
        assert (row.target, row.n, row.flagged) == (0.1, inside.sum(), flags[inside].sum())
        assert row.flagged_by_class == by_class[inside].sum()
    for by in classes:
        totals = [(row.n, row.flagged, row.flagged_by_class or 0) for row in rows if row.by == by]
        assert np.sum(totals, axis=0).tolist() == [150, flags.sum(), by_class.sum()]


def test_there_are_no_rows_of_classes_if_the_default_target_is_not_supported(
    bundle: Bundle, runner: GraphRunner, held_out: LabelledSplit
) -> None:
    operating = bundle.manifest.operating.model_copy(update={"target_fpr": 1e-6})
    manifest = bundle.manifest.model_copy(update={"operating": operating})
    assert class_results(manifest, Sent(runner(held_out.images)), held_out.labels) == []


@pytest.mark.slow
def test_the_rows_of_prediction_sets_have_the_shares_counted_by_hand(
    bundle: Bundle, runner: GraphRunner, held_out: LabelledSplit, display: Display
) -> None:
    manifest = calibrated(bundle, runner, display, "by-size", "png", "resize:2:bilinear")
    outputs, labels = runner(held_out.images), held_out.labels
    choices: list[list[str] | None] = [
        None,
        ["smaller"] * 150,
        [*["larger"] * 50, *["smaller"] * 50, *["same"] * 50],
    ]
    for sizes in choices:
        sent = Sent(outputs, None if sizes is None else [ObservedEncoding("png", "lossless", size) for size in sizes])
        rows = set_results(manifest, sent, labels)
        assert [(row.coverage, row.n) for row in rows] == [(0.9, 150), (0.95, 150), (0.99, 150)]
        for row in rows:
            points = [Decider(manifest).rule(OperatingPoint(coverage=row.coverage), size).sets for size in sent.sizes]
            limits = np.array([point.threshold for point in points if point is not None], np.float32)
            contained = -outputs["probabilities"] <= limits[:, None]
            covered, counts = contained[np.arange(150), labels], contained.sum(axis=1)
            assert row.realised == pytest.approx(covered.mean())
            assert row.mean_size == pytest.approx(counts.mean())
            assert row.empty == pytest.approx((counts == 0).mean())
            assert row.worst_class == pytest.approx(min(covered[labels == label].mean() for label in range(10)))


def test_a_coverage_that_is_not_supported_has_no_shares(
    bundle: Bundle, runner: GraphRunner, held_out: LabelledSplit
) -> None:
    calibration = bundle.manifest.calibration
    few = calibration.model_copy(update={"n": 50, "label_scores": np.linspace(-1, 0, 50, dtype=np.float32)})
    few = few.model_copy(update={"wrong": [], "predictions": None, "fingerprints": None})
    few = few.model_copy(update={"scores": {name: values[:50] for name, values in calibration.scores.items()}})
    operating = bundle.manifest.operating.model_copy(update={"target_fpr": 0.1, "target_risk": 0.5})
    manifest = bundle.manifest.model_copy(update={"calibration": few, "operating": operating})
    rows = set_results(manifest, Sent(runner(held_out.images)), held_out.labels)
    assert [row.realised is None for row in rows] == [False, False, True]
    assert (rows[2].mean_size, rows[2].empty, rows[2].worst_class, rows[2].n) == (None, None, None, 150)


def test_a_model_without_scores_for_sets_has_no_rows(
    bundle: Bundle, runner: GraphRunner, held_out: LabelledSplit
) -> None:
    calibration = bundle.manifest.calibration.model_copy(update={"label_scores": None})
    manifest = bundle.manifest.model_copy(update={"calibration": calibration})
    assert set_results(manifest, Sent(runner(held_out.images)), held_out.labels) == []


def test_verdicts_of_a_model_without_sizes_do_not_depend_on_them(
    bundle: Bundle, runner: GraphRunner, held_out: LabelledSplit
) -> None:
    outputs, decider = runner(held_out.images), Decider(bundle.manifest)
    larger = [ObservedEncoding("png", "lossless", "larger")] * 150
    flags = [Sent(outputs, observed).flags(decider, OperatingPoint(target_fpr=0.1)) for observed in (None, larger)]
    assert flags[0] is not None
    assert flags[1] is not None
    np.testing.assert_array_equal(flags[0], flags[1])
