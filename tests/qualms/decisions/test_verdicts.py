from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from qualms.bundle.manifest import Manifest
from qualms.bundle.parts import Guarantee
from qualms.bundle.runtime import GraphRunner
from qualms.bundle.scores import DIRICHLET_SCORES, as_uncertainty
from qualms.decisions.calibration_set import CalibrationSet
from qualms.decisions.flag import p_values
from qualms.decisions.operating_point import DEFAULT_OPERATING_POINT, OperatingPoint
from qualms.decisions.verdicts import Decider, decide
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
    for step in range(300):
        decider.rule(OperatingPoint(target_fpr=0.3 + step / 1000, guarantee="marginal"))
    assert decider.rule.cache_info().currsize == 256


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
    ],
)
def test_the_refused_parameter_is_named(decider: Decider, operating_point: OperatingPoint, parameter: str) -> None:
    with pytest.raises(OperatingPointError):
        decider.rule(operating_point)
    assert decider.refused_parameter(operating_point) == parameter
