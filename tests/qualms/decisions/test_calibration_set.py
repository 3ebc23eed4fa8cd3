"""Operating points of calibrations in several settings, by class, without labels, and with kept labels."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from qualms.bundle.manifest import Manifest
from qualms.bundle.scores import as_uncertainty
from qualms.decisions.binomial import binomial_cdf
from qualms.decisions.calibration_set import CalibrationSet
from qualms.decisions.flag import choose_flag_point
from qualms.decisions.operating_point import OperatingPoint
from qualms.decisions.prediction_sets import choose_set_point
from qualms.errors import OperatingPointError

BY_CLASS = OperatingPoint(target_fpr=0.05, guarantee="by-class", target_risk=0.1)
OutputsAsSent = Mapping[str, Mapping[str, NDArray[Any]]]


# Flags


@pytest.mark.parametrize("score", ["fused", "entropy", "max_probability"])
@pytest.mark.parametrize("guarantee", ["confident", "marginal"])
def test_the_worst_threshold_is_the_largest_of_the_settings_for_every_score(
    worst_manifest: Manifest, outputs_as_sent: OutputsAsSent, score: str, guarantee: Any
) -> None:
    direction = worst_manifest.scores[score].direction
    thresholds = [
        choose_flag_point(
            np.sort(as_uncertainty(outputs[score], direction)),
            score=score,
            direction=direction,
            target_fpr=0.05,
            guarantee=guarantee,
        ).threshold
        for outputs in outputs_as_sent.values()
    ]
    point = CalibrationSet(worst_manifest).flag_point(OperatingPoint(score, 0.05, guarantee))
    assert as_uncertainty(point.threshold, direction) == max(as_uncertainty(thresholds, direction))
    assert len(set(thresholds)) > 1
    assert point.n == 400


def test_there_is_one_sample_per_setting(worst_manifest: Manifest, manifest: Manifest) -> None:
    samples = CalibrationSet(worst_manifest).samples
    assert [sample.encoding for sample in samples] == ["png", "jpeg:75", "brightness:0.9"]
    assert all(set(sample.uncertainty) == {"fused", "predicted_error"} for sample in samples)
    (alone,) = CalibrationSet(manifest).samples
    assert alone.encoding is None
    assert set(alone.uncertainty) == set(manifest.scores)
    assert alone.wrong is not None
    assert np.flatnonzero(alone.wrong).tolist() == manifest.calibration.wrong


def test_only_the_guarantee_by_class_has_thresholds_by_class(manifest: Manifest) -> None:
    calibration = CalibrationSet(manifest)
    assert calibration.class_flags() is None
    assert calibration.class_flags(OperatingPoint(guarantee="marginal")) is None
    flags = calibration.class_flags(BY_CLASS)
    assert flags is not None
    assert calibration.flag_point(BY_CLASS) == flags.point


def test_the_default_guarantee_of_a_manifest_may_be_by_class(manifest: Manifest) -> None:
    operating = manifest.operating.model_copy(update={"guarantee": "by-class", "target_fpr": 0.05})
    calibration = CalibrationSet(manifest.model_copy(update={"operating": operating}))
    assert calibration.class_flags() is not None
    assert calibration.flag_point().guarantee == "by-class"
    assert calibration.class_flags(OperatingPoint(guarantee="confident")) is None


@pytest.mark.parametrize(("which", "score"), [("earlier_manifest", None), ("worst_manifest", "entropy")])
def test_by_class_needs_predictions_that_are_paired_with_the_score(
    request: pytest.FixtureRequest, which: str, score: str | None
) -> None:
    calibration = CalibrationSet(request.getfixturevalue(which))
    with pytest.raises(OperatingPointError, match="needs the predicted classes of the calibration images") as caught:
        calibration.flag_point(OperatingPoint(score, 0.05, "by-class"))
    assert caught.value.parameter == "guarantee"


def test_unlabelled_images_support_flags_by_class(unlabelled_manifest: Manifest, manifest: Manifest) -> None:
    point = OperatingPoint(target_fpr=0.05, guarantee="by-class")
    assert CalibrationSet(unlabelled_manifest).flag_point(point) == CalibrationSet(manifest).flag_point(point)


# Trust


def test_the_worst_trust_threshold_passes_the_test_of_every_setting_and_the_next_one_does_not(
    worst_manifest: Manifest,
) -> None:
    calibration, target = CalibrationSet(worst_manifest), 0.05
    point = OperatingPoint(target_risk=target)
    flag, trust = calibration.flag_point(point), calibration.trust_point(point)
    thresholds = worst_manifest.calibration.trust.thresholds
    position = int(np.searchsorted(thresholds, np.float32(trust.threshold), side="right"))

    def tails(threshold: float) -> list[float]:
        values = []
        for sample in calibration.samples:
            assert sample.wrong is not None
            below = sample.uncertainty["fused"] < flag.threshold
            accepted = below & (sample.uncertainty["predicted_error"] <= threshold)
            values.append(binomial_cdf(int(sample.wrong[accepted].sum()), int(accepted.sum()), target))
        return values

    assert max(tails(trust.threshold)) <= 0.05
    assert position == len(thresholds) or max(tails(thresholds[position])) > 0.05


def test_one_setting_with_many_errors_decides_the_worst_trust_threshold(worst_manifest: Manifest) -> None:
    settings = worst_manifest.calibration.settings
    order = np.argsort(settings[1].scores["predicted_error"])
    errors = np.sort(order[200::3]).tolist()
    bad = settings[1].model_copy(update={"wrong": errors})
    parts = {"settings": [settings[0], bad, settings[2]]}
    changed = worst_manifest.model_copy(update={"calibration": worst_manifest.calibration.model_copy(update=parts)})
    point = OperatingPoint(target_risk=0.05)
    before, after = (CalibrationSet(one).trust_point(point) for one in (worst_manifest, changed))
    assert after.threshold < before.threshold
    assert after.accepted < 0.7 < before.accepted


def test_the_refusal_of_a_target_risk_names_the_setting_that_fails(worst_manifest: Manifest) -> None:
    settings = worst_manifest.calibration.settings
    bad = settings[1].model_copy(update={"wrong": list(range(400))})
    parts = {"settings": [settings[0], bad, settings[2]]}
    changed = worst_manifest.model_copy(update={"calibration": worst_manifest.calibration.model_copy(update=parts)})
    with pytest.raises(OperatingPointError, match="not flagged, sent as jpeg:75, are misclassified") as caught:
        CalibrationSet(changed).trust_point(OperatingPoint(target_risk=0.05))
    assert caught.value.parameter == "target_risk"


def test_by_class_trust_counts_images_below_the_threshold_of_their_class(manifest: Manifest) -> None:
    calibration = CalibrationSet(manifest)
    flags, trust = calibration.class_flags(BY_CLASS), calibration.trust_point(BY_CLASS)
    (sample,) = calibration.samples
    assert flags is not None
    assert sample.predictions is not None
    below = sample.uncertainty["fused"] < flags.limits(sample.predictions)
    accepted = below & (sample.uncertainty["predicted_error"] <= trust.threshold)
    assert trust.accepted == accepted.mean()
    assert trust.joint


def test_trust_of_a_score_without_pairs_in_the_settings_is_refused(worst_manifest: Manifest) -> None:
    with pytest.raises(OperatingPointError) as caught:
        CalibrationSet(worst_manifest).trust_point(OperatingPoint("entropy", 0.05))
    assert str(caught.value) == (
        "The error rate of predictions that are not flagged by entropy cannot be guaranteed, because the calibration has "
        "paired scores of fused, predicted_error only."
    )
    assert caught.value.parameter == "target_risk"


# Without labels


def test_without_labels_trust_and_prediction_sets_are_refused(unlabelled_manifest: Manifest) -> None:
    calibration = CalibrationSet(unlabelled_manifest)
    with pytest.raises(OperatingPointError) as caught:
        calibration.trust_point()
    assert str(caught.value) == (
        "The calibration images have no labels, so no error rate can be guaranteed; calibrate on labelled images, or keep an "
        "earlier guarantee with --keep-trust."
    )
    assert caught.value.parameter == "target_risk"
    with pytest.raises(OperatingPointError) as caught:
        calibration.set_point(0.9)
    assert str(caught.value).startswith(
        "The calibration images have no labels, so no coverage of prediction sets can be guaranteed; calibrate on"
    )
    assert caught.value.parameter == "coverage"


def test_the_guarantees_of_a_kept_calibration_are_used(kept_manifest: Manifest, manifest: Manifest) -> None:
    kept, before = CalibrationSet(kept_manifest), CalibrationSet(manifest)
    point = OperatingPoint(target_risk=0.05)
    assert kept.trust_point(point) == before.trust_point(point)
    assert kept.set_point(0.9) == before.set_point(0.9)


def test_the_kept_trust_guarantee_uses_the_flag_of_the_new_calibration(
    kept_manifest: Manifest, manifest: Manifest
) -> None:
    scores = {**manifest.calibration.scores, "fused": manifest.calibration.scores["fused"] * np.float32(0.5)}
    calibration = kept_manifest.calibration.model_copy(update={"scores": scores})
    stricter = CalibrationSet(kept_manifest.model_copy(update={"calibration": calibration}))
    point = OperatingPoint(target_fpr=0.05, target_risk=0.1)
    flag, trust = stricter.flag_point(point), stricter.trust_point(point)
    assert flag.threshold == pytest.approx(CalibrationSet(manifest).flag_point(point).threshold / 2)
    values = manifest.calibration.scores
    accepted = (values["fused"] < flag.threshold) & (values["predicted_error"] <= trust.threshold)
    assert trust.accepted == accepted.mean()


# Prediction sets


def test_prediction_sets_of_the_form_worst_use_the_largest_threshold(worst_manifest: Manifest) -> None:
    scores = [one.label_scores for one in worst_manifest.calibration.settings]
    present = [one for one in scores if one is not None]
    point = CalibrationSet(worst_manifest).set_point(0.9)
    assert point == choose_set_point(present, 0.9, worst_manifest.sets)
    assert point.threshold == max(choose_set_point([one], 0.9, worst_manifest.sets).threshold for one in present)


def test_an_earlier_bundle_has_no_prediction_sets(earlier_manifest: Manifest) -> None:
    with pytest.raises(OperatingPointError) as caught:
        CalibrationSet(earlier_manifest).set_point(0.9)
    assert str(caught.value) == (
        "This model was calibrated with an earlier version and has no scores for prediction sets; recalibrate it."
    )
    assert caught.value.parameter == "coverage"


def test_a_coverage_that_the_images_do_not_support_is_refused_with_the_needed_number(manifest: Manifest) -> None:
    with pytest.raises(OperatingPointError) as caught:
        CalibrationSet(manifest).set_point(0.999)
    assert str(caught.value) == "A coverage of 0.999 needs at least 999 labelled calibration images; there are 400."
