import numpy as np
import pytest

from qualms.bundle.manifest import Guarantee, Manifest
from qualms.decisions.operating_point import OperatingPoint, flag_point, trust_point
from qualms.errors import OperatingPointError

# Flags


def test_the_default_operating_point_is_the_manifests(manifest: Manifest) -> None:
    point = flag_point(manifest)
    assert (point.score, point.target_fpr, point.guarantee, point.n) == (
        "mutual_information",
        0.01,
        "confident",
        400,
    )
    assert point.threshold == manifest.calibration.scores["mutual_information"].max()
    assert point.k == 1


def test_changed_defaults_of_the_manifest_are_used(manifest: Manifest) -> None:
    operating = manifest.operating.model_copy(update={"score": "entropy", "target_fpr": 0.2, "guarantee": "marginal"})
    point = flag_point(manifest.model_copy(update={"operating": operating}))
    assert (point.score, point.target_fpr, point.guarantee, point.k) == ("entropy", 0.2, "marginal", 80)


@pytest.mark.parametrize("score", ["entropy", "max_probability", "precision"])
def test_the_threshold_flags_k_minus_one_calibration_images_in_both_directions(manifest: Manifest, score: str) -> None:
    point = flag_point(manifest, OperatingPoint(score, 0.05, "marginal"))
    assert point.direction == manifest.scores[score].direction
    assert point.k == 20
    values = manifest.calibration.scores[score]
    assert len(np.unique(values)) == len(values)
    assert point.flags(values).sum() == point.k - 1
    most_uncertain = values[-19:] if point.direction == "higher" else values[:19]
    assert point.flags(most_uncertain).all()


def test_a_parameter_changes_only_its_own_default(manifest: Manifest) -> None:
    point = flag_point(manifest, OperatingPoint(target_fpr=0.1))
    assert (point.target_fpr, point.score) == (0.1, "mutual_information")
    point = flag_point(manifest, OperatingPoint(guarantee="marginal"))
    assert (point.guarantee, point.target_fpr) == ("marginal", 0.01)


@pytest.mark.parametrize("score", ["density", ""])
def test_an_unknown_score_is_refused_with_the_accepted_ones(manifest: Manifest, score: str) -> None:
    with pytest.raises(OperatingPointError) as caught:
        flag_point(manifest, OperatingPoint(score))
    assert str(caught.value) == (
        f"The score {score!r} is not one of this model's; accepted are entropy, max_probability, "
        "mutual_information, differential_entropy, precision, log_precision, expected_entropy, "
        "error_probability."
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
    manifest: Manifest, target_fpr: float, guarantee: Guarantee | None, problem: str
) -> None:
    with pytest.raises(OperatingPointError, match=problem):
        flag_point(manifest, OperatingPoint(target_fpr=target_fpr, guarantee=guarantee))


# Trust


def test_the_default_target_risk_is_the_manifests(manifest: Manifest) -> None:
    point = trust_point(manifest)
    assert (point.score, point.direction, point.target_risk) == ("error_probability", "higher", 0.01)
    trust, values = manifest.calibration.trust, manifest.calibration.scores["error_probability"]
    assert point.accepted == (values <= point.threshold).mean()
    assert point.threshold in trust.thresholds
    assert 0.75 < point.accepted <= 1


def test_a_higher_target_risk_accepts_more_images(manifest: Manifest) -> None:
    strict, loose = trust_point(manifest), trust_point(manifest, OperatingPoint(target_risk=0.2))
    assert loose.target_risk == 0.2
    assert loose.accepted > strict.accepted


def test_a_trust_score_with_direction_lower_is_accepted_above_its_threshold(manifest: Manifest) -> None:
    trust = manifest.calibration.trust
    negated = trust.model_copy(update={"thresholds": trust.thresholds - 1})  # error_probability − 1 = −max_probability
    changed = manifest.model_copy(
        update={
            "operating": manifest.operating.model_copy(update={"trust_score": "max_probability"}),
            "calibration": manifest.calibration.model_copy(update={"trust": negated}),
        }
    )
    point = trust_point(changed)
    assert point.direction == "lower"
    assert point.threshold == pytest.approx(1 - trust_point(manifest).threshold)
    assert point.accepts([point.threshold + 0.01, point.threshold - 0.01]).tolist() == [True, False]


@pytest.mark.parametrize("target_risk", [0.0, 0.001])
def test_an_unsupported_target_risk_is_refused(manifest: Manifest, target_risk: float) -> None:
    with pytest.raises(OperatingPointError, match="target risk"):
        trust_point(manifest, OperatingPoint(target_risk=target_risk))
