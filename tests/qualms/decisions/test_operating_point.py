import numpy as np
import pytest

from qualms.bundle.manifest import Manifest
from qualms.bundle.parts import Guarantee
from qualms.bundle.scores import as_uncertainty
from qualms.decisions.binomial import binomial_cdf
from qualms.decisions.calibration_set import CalibrationSet
from qualms.decisions.operating_point import OperatingPoint
from qualms.errors import OperatingPointError


@pytest.fixture
def calibration(manifest: Manifest) -> CalibrationSet:
    return CalibrationSet(manifest)


# Flags


def test_the_default_operating_point_is_the_manifests(manifest: Manifest, calibration: CalibrationSet) -> None:
    point = calibration.flag_point()
    assert (point.score, point.target_fpr, point.guarantee, point.n) == ("fused", 0.01, "confident", 400)
    assert point.threshold == manifest.calibration.scores["fused"].max()
    assert point.k == 1


def test_changed_defaults_of_the_manifest_are_used(manifest: Manifest) -> None:
    operating = manifest.operating.model_copy(update={"score": "entropy", "target_fpr": 0.2, "guarantee": "marginal"})
    point = CalibrationSet(manifest.model_copy(update={"operating": operating})).flag_point()
    assert (point.score, point.target_fpr, point.guarantee, point.k) == ("entropy", 0.2, "marginal", 80)


@pytest.mark.parametrize("score", ["entropy", "max_probability", "precision"])
def test_the_threshold_flags_k_minus_one_calibration_images_in_both_directions(manifest: Manifest, score: str) -> None:
    point = CalibrationSet(manifest).flag_point(OperatingPoint(score, 0.05, "marginal"))
    assert point.direction == manifest.scores[score].direction
    assert point.k == 20
    values = manifest.calibration.scores[score]
    assert len(np.unique(values)) == len(values)
    assert point.flags(values).sum() == point.k - 1
    most_uncertain = np.sort(as_uncertainty(values, point.direction))[-19:]
    assert point.flags(as_uncertainty(most_uncertain, point.direction)).all()


def test_a_parameter_changes_only_its_own_default(calibration: CalibrationSet) -> None:
    point = calibration.flag_point(OperatingPoint(target_fpr=0.1))
    assert (point.target_fpr, point.score) == (0.1, "fused")
    point = calibration.flag_point(OperatingPoint(guarantee="marginal"))
    assert (point.guarantee, point.target_fpr) == ("marginal", 0.01)


@pytest.mark.parametrize("score", ["density", ""])
def test_an_unknown_score_is_refused_with_the_accepted_ones(calibration: CalibrationSet, score: str) -> None:
    with pytest.raises(OperatingPointError) as caught:
        calibration.flag_point(OperatingPoint(score))
    assert str(caught.value) == (
        f"The score {score!r} is not one of this model's; accepted are entropy, max_probability, "
        "mutual_information, differential_entropy, precision, log_precision, expected_entropy, "
        "error_probability, predicted_error, meta_mutual_information, fused."
    )


@pytest.mark.parametrize(
    ("target_fpr", "guarantee", "problem"),
    [
        (0.0, None, "must lie strictly between 0 and 1"),
        (0.001, None, "needs at least 2,995 calibration images; there are 400"),
        (0.05, "", "The guarantee '' is unknown"),
    ],
)
def test_unsupported_parameters_are_refused_and_not_replaced_by_the_default(
    calibration: CalibrationSet, target_fpr: float, guarantee: Guarantee | None, problem: str
) -> None:
    point = OperatingPoint(target_fpr=target_fpr, guarantee=guarantee)
    with pytest.raises(OperatingPointError, match=problem):
        calibration.flag_point(point)
    with pytest.raises(OperatingPointError, match=problem):
        calibration.trust_point(point)


# Trust


def test_the_default_target_risk_is_the_manifests(manifest: Manifest, calibration: CalibrationSet) -> None:
    point = calibration.trust_point()
    assert (point.score, point.direction, point.target_risk) == ("predicted_error", "higher", 0.01)
    assert point.joint
    trust, values = manifest.calibration.trust, manifest.calibration.scores
    below = values["fused"] < calibration.flag_point().threshold
    assert point.accepted == (below & (values["predicted_error"] <= point.threshold)).mean()
    assert point.threshold in trust.thresholds
    assert 0.75 < point.accepted <= 1


@pytest.mark.parametrize(
    "point",
    [
        OperatingPoint(target_risk=0.05),
        OperatingPoint("precision", 0.1, "marginal", 0.02),
        OperatingPoint("max_probability", 0.3, "confident", 0.05),
    ],
)
def test_the_threshold_is_the_last_that_passes_on_images_below_the_flag_threshold(
    manifest: Manifest, calibration: CalibrationSet, point: OperatingPoint
) -> None:
    flag, values = calibration.flag_point(point), manifest.calibration.scores
    below = ~flag.flags(values[flag.score]) & (values[flag.score] != flag.threshold)
    wrong = np.isin(np.arange(manifest.calibration.n), manifest.calibration.wrong or [])
    assert point.target_risk is not None
    passed = None
    for level, threshold in zip(manifest.calibration.trust.levels, manifest.calibration.trust.thresholds, strict=True):
        if level < 0.9:  # errors are among the most uncertain images, so all stricter levels without one pass
            continue
        accepted = below & (values["predicted_error"] <= threshold)
        if binomial_cdf(int(wrong[accepted].sum()), int(accepted.sum()), point.target_risk) > 0.05:
            break
        passed = threshold
    assert calibration.trust_point(point).threshold == passed


def test_a_higher_target_risk_accepts_more_images(calibration: CalibrationSet) -> None:
    strict, loose = calibration.trust_point(), calibration.trust_point(OperatingPoint(target_risk=0.2))
    assert loose.target_risk == 0.2
    assert loose.accepted > strict.accepted


def test_a_higher_false_alarm_rate_leaves_fewer_images_to_accept(calibration: CalibrationSet) -> None:
    few, many = (calibration.trust_point(OperatingPoint(target_fpr=rate, target_risk=0.05)) for rate in (0.5, 0.05))
    assert few.accepted < 0.6 < many.accepted


def test_a_trust_score_with_direction_lower_is_accepted_above_its_threshold(manifest: Manifest) -> None:
    scores = manifest.calibration.scores
    negated = {"scores": {**scores, "max_probability": -scores["predicted_error"]}}
    changed = manifest.model_copy(
        update={
            "operating": manifest.operating.model_copy(update={"trust_score": "max_probability"}),
            "calibration": manifest.calibration.model_copy(update=negated),
        }
    )
    point = CalibrationSet(changed).trust_point()
    assert point.direction == "lower"
    assert point.threshold == -CalibrationSet(manifest).trust_point().threshold
    assert point.accepts([point.threshold + 0.01, point.threshold - 0.01]).tolist() == [True, False]


@pytest.mark.parametrize("target_risk", [0.0, 0.001])
def test_an_unsupported_target_risk_is_refused(calibration: CalibrationSet, target_risk: float) -> None:
    with pytest.raises(OperatingPointError, match="target risk"):
        calibration.trust_point(OperatingPoint(target_risk=target_risk))


def test_if_almost_all_images_are_flagged_the_target_risk_is_refused(calibration: CalibrationSet) -> None:
    """The expected number of accepted images follows from the targets and n."""
    with pytest.raises(OperatingPointError, match="the loosest threshold accepts about 4 of 400"):
        calibration.trust_point(OperatingPoint(target_fpr=0.99, guarantee="marginal", target_risk=0.05))


def test_images_that_all_have_the_same_flag_score_are_not_accepted(manifest: Manifest) -> None:
    scores = {**manifest.calibration.scores, "fused": np.ones(400, np.float32)}
    tied = manifest.model_copy(update={"calibration": manifest.calibration.model_copy(update={"scores": scores})})
    with pytest.raises(OperatingPointError, match="0 of the 0 least uncertain ones that are not flagged"):
        CalibrationSet(tied).trust_point()


# Earlier bundles: sorted scores, and counts of the trust score


def test_the_counts_of_an_earlier_bundle_are_used_for_every_flag(earlier_manifest: Manifest) -> None:
    calibration, trust = CalibrationSet(earlier_manifest), earlier_manifest.calibration.trust
    points = [calibration.trust_point(OperatingPoint(target_fpr=rate, target_risk=0.05)) for rate in (0.01, 0.5)]
    assert points[0] == points[1]
    assert not points[0].joint
    assert trust.accepted is not None
    assert points[0].accepted * 400 in trust.accepted
    values = earlier_manifest.calibration.scores["error_probability"]
    assert points[0].accepted == (values <= points[0].threshold).mean()
