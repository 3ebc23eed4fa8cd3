from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from qualms.bundle.calibration_data import AsSent
from qualms.bundle.manifest import Manifest
from qualms.bundle.parts import Guarantee
from qualms.bundle.runtime import GraphRunner
from qualms.bundle.scores import DIRICHLET_SCORES, as_uncertainty
from qualms.decisions.calibration_set import CalibrationSet
from qualms.decisions.flag import choose_flag_point, p_values
from qualms.decisions.operating_point import DEFAULT_OPERATING_POINT, OperatingPoint
from qualms.decisions.verdicts import Decider, decide, guarantee_text
from qualms.errors import OperatingPointError

STRICT = 1e-6
"""a rate that the 400 calibration images cannot support"""


@pytest.fixture
def decider(manifest: Manifest) -> Decider:
    return Decider(manifest)


@pytest.fixture(scope="session")
def outputs(runner: GraphRunner, draw_images: Callable[[int, int], NDArray[np.uint8]]) -> dict[str, NDArray[Any]]:
    """Outputs on images like the calibration images, and on a black and a white image."""
    ood = np.array([np.full((6, 5, 3), value, np.uint8) for value in (0, 255)])
    return runner(np.concatenate((draw_images(7, 200), ood)))


@pytest.mark.parametrize("score", [None, *DIRICHLET_SCORES])
@pytest.mark.parametrize(("target_fpr", "guarantee"), [(None, None), (0.05, "marginal"), (0.3, "confident")])
def test_verdicts_equal_those_of_flag_point_p_values_and_trust_point(
    decider: Decider,
    manifest: Manifest,
    outputs: dict[str, NDArray[Any]],
    score: str | None,
    target_fpr: float | None,
    guarantee: Guarantee | None,
) -> None:
    operating_point = OperatingPoint(score, target_fpr, guarantee, 0.05)
    rule = decider.rule(operating_point)
    verdicts = decide(rule, outputs)
    calibration = CalibrationSet(manifest)
    point, trust = calibration.flag_point(operating_point), calibration.trust_point(operating_point)
    values, trust_values = outputs[point.score], outputs["predicted_error"]
    assert (rule.flag, rule.trust) == (point, trust)
    np.testing.assert_array_equal(verdicts.flags, point.flags(values))
    uncertainty, known = (
        as_uncertainty(v, point.direction) for v in (values, manifest.calibration.scores[point.score])
    )
    np.testing.assert_array_equal(verdicts.p_values, p_values(uncertainty, np.sort(known)))
    np.testing.assert_array_equal(verdicts.flags, verdicts.p_values <= point.k / (point.n + 1))
    np.testing.assert_array_equal(verdicts.values, values)
    assert verdicts.accepts is not None
    np.testing.assert_array_equal(verdicts.accepts, trust.accepts(trust_values) & ~verdicts.flags)
    np.testing.assert_array_equal(verdicts.trust_values, trust_values)


@pytest.mark.parametrize("which", ["manifest", "earlier_manifest"])
def test_a_flagged_image_is_never_accepted(
    request: pytest.FixtureRequest, outputs: dict[str, NDArray[Any]], which: str
) -> None:
    rule = Decider(request.getfixturevalue(which)).rule(OperatingPoint(target_fpr=0.3, target_risk=0.2))
    certain = {**outputs, rule.trust_score: np.zeros_like(outputs[rule.trust_score])}
    verdicts = decide(rule, certain)
    assert 0 < verdicts.flags.sum() < len(verdicts.flags)
    assert verdicts.accepts is not None
    assert verdicts.accepts.tolist() == (~verdicts.flags).tolist()


def test_an_image_at_the_flag_threshold_is_neither_flagged_nor_accepted(decider: Decider) -> None:
    rule = decider.rule(OperatingPoint(target_fpr=0.3, target_risk=0.2))
    threshold = np.float32(rule.flag.threshold)
    values = np.array([np.nextafter(threshold, np.float32(0)), threshold, np.nextafter(threshold, np.float32(9))])
    verdicts = decide(rule, {rule.flag.score: values, rule.trust_score: np.zeros(3, np.float32)})
    assert verdicts.flags.tolist() == [False, False, True]
    assert verdicts.accepts is not None
    assert verdicts.accepts.tolist() == [True, False, False]


def test_some_images_are_flagged_and_some_are_not(decider: Decider, outputs: dict[str, NDArray[Any]]) -> None:
    flags = decide(decider.rule(OperatingPoint(target_fpr=0.3)), outputs).flags
    assert 0 < flags.sum() < len(flags)


def test_nan_scores_are_flagged_and_not_trusted(decider: Decider, outputs: dict[str, NDArray[Any]]) -> None:
    rule = decider.rule(DEFAULT_OPERATING_POINT)
    nan_outputs = {name: np.full_like(values, np.nan, dtype=np.float32) for name, values in outputs.items()}
    verdicts = decide(rule, nan_outputs)
    assert verdicts.flags.all()
    assert verdicts.accepts is not None
    assert not verdicts.accepts.any()
    assert set(verdicts.p_values) == {1 / (rule.flag.n + 1)}


def test_rules_are_cached(decider: Decider) -> None:
    rules = [decider.rule(OperatingPoint(target_fpr=target)) for target in (0.1, 0.2, 0.1, 0.2)]
    assert rules[2] is rules[0]
    assert rules[3] is rules[1]


def test_the_cache_of_rules_is_bounded(decider: Decider) -> None:
    points = [OperatingPoint(target_fpr=0.3 + step / 1000, guarantee="marginal") for step in range(300)]
    rules = [decider.rule(point) for point in points]
    assert decider.rule(points[-1]) is rules[-1]
    assert decider.rule(points[0]) is not rules[0]


def test_an_unsupported_default_risk_is_a_refusal_and_an_unsupported_requested_risk_an_error(
    manifest: Manifest, outputs: dict[str, NDArray[Any]]
) -> None:
    operating = manifest.operating.model_copy(update={"target_risk": STRICT})
    decider = Decider(manifest.model_copy(update={"operating": operating}))
    rule = decider.rule(DEFAULT_OPERATING_POINT)
    assert (rule.trust, rule.target_risk) == (None, STRICT)
    assert rule.refusal is not None
    assert rule.refusal.startswith("A target risk of 1e-06 needs at least")
    assert decide(rule, outputs).accepts is None
    with pytest.raises(OperatingPointError, match="A target risk of 1e-06"):
        decider.rule(OperatingPoint(target_risk=STRICT))
    supported = OperatingPoint(target_risk=0.2)
    assert decider.rule(supported).trust == CalibrationSet(manifest).trust_point(supported)


@pytest.mark.parametrize(
    ("operating_point", "parameter"),
    [
        (OperatingPoint(score="unknown"), "score"),
        (OperatingPoint(score="unknown", target_fpr=STRICT), "score"),
        (OperatingPoint(target_fpr=STRICT), "target_fpr"),
        (OperatingPoint(score="entropy", target_fpr=STRICT, guarantee="marginal"), "target_fpr"),
        (OperatingPoint(target_risk=STRICT), "target_risk"),
        (OperatingPoint(target_fpr=0.1, target_risk=STRICT), "target_risk"),
        (OperatingPoint(target_fpr=0.0), "target_fpr"),
        (OperatingPoint(target_risk=1.0), "target_risk"),
        (OperatingPoint(guarantee="perhaps"), "guarantee"),  # type: ignore[arg-type]
        (OperatingPoint(guarantee="by-class", target_fpr=STRICT), "target_fpr"),
        (OperatingPoint(coverage=1 - STRICT), "coverage"),
        (OperatingPoint(target_risk=STRICT, coverage=1.0), "target_risk"),
    ],
)
def test_the_refused_parameter_is_named(decider: Decider, operating_point: OperatingPoint, parameter: str) -> None:
    with pytest.raises(OperatingPointError) as caught:
        decider.rule(operating_point)
    assert caught.value.parameter == parameter


# The guarantee in words


@pytest.mark.parametrize(
    ("guarantee", "start"),
    [
        ("confident", "at most 2.5 % of in-distribution images are flagged, for 95 % of calibration sets"),
        ("marginal", "at most 2.5 % of in-distribution images are flagged, on average over calibration sets"),
        (
            "by-class",
            "at most 2.5 % of images predicted as one class (or sharing a threshold) are flagged, for 95 % of calibration sets",
        ),
    ],
)
@pytest.mark.parametrize(
    ("as_sent", "whom"),
    [
        (None, "images like the calibration images"),
        (AsSent(encodings=["png"], form="mixture", seed=0), "images sent as png, in the listed shares"),
        (
            AsSent(encodings=["png", "jpeg:75-95", "resize:2"], form="worst", seed=0),
            "images sent as png, jpeg:75-95 or resize:2, in any shares",
        ),
    ],
)
@pytest.mark.parametrize(
    ("trimmed", "end"),
    [(None, ""), (0.0, ""), (0.025, ", if the 2.5 % that were trimmed were all OOD (else up to about 5 %)")],
)
def test_the_text_of_a_guarantee_names_the_rate_the_images_and_the_assumption(
    manifest: Manifest,
    guarantee: Guarantee,
    start: str,
    as_sent: AsSent | None,
    whom: str,
    trimmed: float | None,
    end: str,
) -> None:
    calibration = manifest.calibration.model_copy(update={"as_sent": as_sent, "trimmed": trimmed})
    flag = CalibrationSet(manifest).flag_point(OperatingPoint(target_fpr=0.025, guarantee=guarantee))
    assert guarantee_text(flag, calibration) == f"{start}, for {whom}{end}"


def test_a_rule_has_the_text_of_its_guarantee(worst_manifest: Manifest) -> None:
    rule = Decider(worst_manifest).rule(OperatingPoint(target_fpr=0.05))
    assert rule.guarantee_text == (
        "at most 5 % of in-distribution images are flagged, for 95 % of calibration sets, for images sent as png, jpeg:75 or "
        "brightness:0.9, in any shares"
    )


# Calibration images in several settings


def test_worst_verdicts_are_the_most_lenient_of_the_settings(
    worst_manifest: Manifest,
    manifest: Manifest,
    outputs: dict[str, NDArray[Any]],
    outputs_as_sent: dict[str, dict[str, NDArray[Any]]],
) -> None:
    point = OperatingPoint(target_fpr=0.3)
    together = decide(Decider(worst_manifest).rule(point), outputs)
    alone = []
    for sent in outputs_as_sent.values():
        calibration = manifest.calibration.model_copy(
            update={"scores": {name: sent[name] for name in manifest.scores}, "predictions": sent["prediction"]}
        )
        alone.append(decide(Decider(manifest.model_copy(update={"calibration": calibration})).rule(point), outputs))
    np.testing.assert_array_equal(together.flags, np.all([one.flags for one in alone], axis=0))
    np.testing.assert_array_equal(together.p_values, np.max([one.p_values for one in alone], axis=0))
    assert len({one.flags.sum() for one in alone}) > 1
    assert 0 < together.flags.sum() < len(together.flags)


def test_the_p_values_of_calibration_images_are_listed_by_setting(
    worst_manifest: Manifest, manifest: Manifest, outputs_as_sent: dict[str, dict[str, NDArray[Any]]]
) -> None:
    decider = Decider(worst_manifest)
    values = decider.calibration_p_values()
    assert len(values) == len(outputs_as_sent)
    for one, sent in zip(values, outputs_as_sent.values(), strict=True):
        np.testing.assert_array_equal(one, decide(decider.rule(), sent).p_values)
    (alone,) = Decider(manifest).calibration_p_values()
    np.testing.assert_allclose(np.sort(alone), np.arange(2, 402) / 401)


# Thresholds by class


@pytest.fixture
def by_class_manifest(manifest: Manifest) -> Manifest:
    """A manifest whose default guarantee is by-class, with enough images in every class."""
    operating = manifest.operating.model_copy(update={"guarantee": "by-class", "target_fpr": 0.1})
    calibration = manifest.calibration.model_copy(update={"predictions": np.arange(400, dtype=np.int32) % 3})
    return manifest.model_copy(update={"operating": operating, "calibration": calibration})


def test_by_class_verdicts_are_those_of_the_predicted_class(
    by_class_manifest: Manifest, outputs: dict[str, NDArray[Any]]
) -> None:
    calibration = by_class_manifest.calibration
    rule = Decider(by_class_manifest).rule(OperatingPoint(target_risk=0.2))
    outputs = {**outputs, "prediction": np.arange(len(outputs["prediction"])) % 3}
    verdicts = decide(rule, outputs)
    assert calibration.predictions is not None
    assert rule.classes is not None
    assert rule.trust is not None
    assert verdicts.accepts is not None
    assert len(rule.classes.groups) == 3
    for index in range(3):
        rows, own = outputs["prediction"] == index, calibration.predictions == index
        known = np.sort(calibration.scores["fused"][own]).astype(np.float64)
        flag = choose_flag_point(known, score="fused", direction="higher", target_fpr=0.1, guarantee="confident")
        values = outputs["fused"][rows]
        np.testing.assert_array_equal(verdicts.flags[rows], flag.flags(values))
        np.testing.assert_array_equal(verdicts.p_values[rows], p_values(values.astype(np.float64), known))
        trusted = rule.trust.accepts(outputs["predicted_error"][rows])
        np.testing.assert_array_equal(verdicts.accepts[rows], trusted & (values < flag.threshold))
    assert not (verdicts.accepts & verdicts.flags).any()
    assert verdicts.flags.any()


def test_an_image_at_the_threshold_of_its_class_is_neither_flagged_nor_accepted(by_class_manifest: Manifest) -> None:
    rule = Decider(by_class_manifest).rule(OperatingPoint(target_risk=0.2))
    assert rule.classes is not None
    at = rule.classes.thresholds.astype(np.float32)
    verdicts = decide(rule, {"fused": at, "predicted_error": np.zeros(3, np.float32), "prediction": np.arange(3)})
    assert verdicts.flags.tolist() == 3 * [False]
    assert verdicts.accepts is not None
    assert verdicts.accepts.tolist() == 3 * [False]


def test_nan_scores_are_flagged_by_class(by_class_manifest: Manifest) -> None:
    rule = Decider(by_class_manifest).rule()
    nan = np.full(3, np.nan, np.float32)
    verdicts = decide(rule, {"fused": nan, "predicted_error": nan, "prediction": np.arange(3)})
    assert rule.classes is not None
    assert verdicts.flags.all()
    assert verdicts.p_values.tolist() == [1 / (group.n + 1) for group in rule.classes.groups]


def test_the_p_values_of_calibration_images_by_class_are_those_of_their_class(by_class_manifest: Manifest) -> None:
    (values,) = Decider(by_class_manifest).calibration_p_values()
    predictions = by_class_manifest.calibration.predictions
    assert predictions is not None
    for index in range(3):
        own = values[predictions == index]
        np.testing.assert_allclose(np.sort(own), np.arange(2, len(own) + 2) / (len(own) + 1))


# Without labels


def test_without_labels_the_default_trust_is_refused_and_a_requested_one_an_error(
    unlabelled_manifest: Manifest, manifest: Manifest, outputs: dict[str, NDArray[Any]]
) -> None:
    decider = Decider(unlabelled_manifest)
    rule = decider.rule()
    assert rule.trust is None
    assert rule.refusal is not None
    assert rule.refusal.startswith("The calibration images have no labels, so no error rate can be guaranteed;")
    verdicts, labelled = decide(rule, outputs), decide(Decider(manifest).rule(), outputs)
    assert verdicts.accepts is None
    np.testing.assert_array_equal(verdicts.flags, labelled.flags)
    np.testing.assert_array_equal(verdicts.p_values, labelled.p_values)
    for point, parameter in (
        (OperatingPoint(target_risk=0.1), "target_risk"),
        (OperatingPoint(coverage=0.9), "coverage"),
    ):
        with pytest.raises(OperatingPointError, match="have no labels") as caught:
            decider.rule(point)
        assert caught.value.parameter == parameter


def test_a_kept_calibration_gives_the_verdicts_of_the_labelled_images(
    kept_manifest: Manifest, manifest: Manifest, outputs: dict[str, NDArray[Any]]
) -> None:
    point = OperatingPoint(target_risk=0.05, coverage=0.9)
    kept, labelled = (Decider(one).rule(point) for one in (kept_manifest, manifest))
    assert (kept.trust, kept.sets, kept.refusal) == (labelled.trust, labelled.sets, None)
    accepts = decide(kept, outputs).accepts
    expected = decide(labelled, outputs).accepts
    assert accepts is not None
    assert expected is not None
    np.testing.assert_array_equal(accepts, expected)


# Prediction sets


def test_a_rule_has_prediction_sets_only_if_a_coverage_is_requested(decider: Decider, manifest: Manifest) -> None:
    assert decider.rule().sets is None
    sets = decider.rule(OperatingPoint(coverage=0.9)).sets
    assert sets == CalibrationSet(manifest).set_point(0.9)
    assert sets is not None
    assert (sets.coverage, sets.method.method) == (0.9, "lac")
