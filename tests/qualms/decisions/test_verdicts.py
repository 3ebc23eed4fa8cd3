from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from qualms.bundle.manifest import Guarantee, Manifest
from qualms.bundle.runtime import GraphRunner
from qualms.bundle.scores import DIRICHLET_SCORES, as_uncertainty
from qualms.decisions import verdicts as module
from qualms.decisions.flag import p_values
from qualms.decisions.operating_point import DEFAULT_OPERATING_POINT, OperatingPoint, flag_point, trust_point
from qualms.decisions.verdicts import Decider, decide
from qualms.errors import OperatingPointError

STRICT = 1e-6
"""a rate that some hundred calibration images cannot promise"""


@pytest.fixture
def decider(manifest: Manifest) -> Decider:
    return Decider(manifest)


@pytest.fixture(scope="session")
def outputs(runner: GraphRunner, draw_images: Callable[[int, int], NDArray[np.uint8]]) -> dict[str, NDArray[Any]]:
    """Of images like those of the calibration, and of some that are unlike them."""
    odd = np.array([np.full((6, 5, 3), value, np.uint8) for value in (0, 255)])
    return runner(np.concatenate((draw_images(7, 200), odd)))


@pytest.mark.parametrize("score", [None, *DIRICHLET_SCORES])
@pytest.mark.parametrize(("target_fpr", "guarantee"), [(None, None), (0.05, "marginal"), (0.3, "confident")])
def test_flags_p_values_and_trust_are_those_of_the_decision_functions(
    decider: Decider,
    manifest: Manifest,
    outputs: dict[str, NDArray[Any]],
    score: str | None,
    target_fpr: float | None,
    guarantee: Guarantee | None,
) -> None:
    rule = decider.rule(OperatingPoint(score, target_fpr, guarantee))
    verdicts = decide(rule, outputs)
    point, trust = flag_point(manifest, score, target_fpr, guarantee), trust_point(manifest)
    values = outputs[point.score]
    assert rule.flag == point
    np.testing.assert_array_equal(verdicts.flags, point.flags(values))
    calibration = np.sort(as_uncertainty(manifest.calibration.scores[point.score], point.direction))
    np.testing.assert_array_equal(verdicts.p_values, p_values(as_uncertainty(values, point.direction), calibration))
    np.testing.assert_array_equal(verdicts.flags, verdicts.p_values <= point.k / (point.n + 1))
    np.testing.assert_array_equal(verdicts.values, values)
    assert verdicts.accepts is not None
    np.testing.assert_array_equal(verdicts.accepts, trust.accepts(outputs["error_probability"]))
    np.testing.assert_array_equal(verdicts.trust_values, outputs["error_probability"])


def test_some_images_are_flagged_and_some_are_not(decider: Decider, outputs: dict[str, NDArray[Any]]) -> None:
    flags = decide(decider.rule(OperatingPoint(target_fpr=0.3)), outputs).flags
    assert 0 < flags.sum() < len(flags)


def test_a_value_that_is_no_number_is_flagged_and_not_trusted(
    decider: Decider, outputs: dict[str, NDArray[Any]]
) -> None:
    rule = decider.rule(DEFAULT_OPERATING_POINT)
    nowhere = {name: np.full_like(values, np.nan, dtype=np.float32) for name, values in outputs.items()}
    verdicts = decide(rule, nowhere)
    assert verdicts.flags.all()
    assert verdicts.accepts is not None
    assert not verdicts.accepts.any()
    assert set(verdicts.p_values) == {1 / (rule.flag.n + 1)}


def test_a_rule_is_worked_out_once(manifest: Manifest, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float | None] = []

    def count(*arguments: Any) -> Any:
        asked.append(arguments[2])
        return flag_point(*arguments)

    monkeypatch.setattr(module, "flag_point", count)
    decider = Decider(manifest)
    for target in (0.1, 0.2, 0.1, 0.2, 0.1):
        decider.rule(OperatingPoint(target_fpr=target))
    assert asked == [0.1, 0.2]


def test_rules_that_strangers_ask_for_do_not_pile_up(decider: Decider) -> None:
    for step in range(300):
        decider.rule(OperatingPoint(target_fpr=0.3 + step / 1000, guarantee="marginal"))
    assert decider.rule.cache_info().currsize == 256


def test_a_default_risk_that_cannot_be_promised_is_a_refusal_and_one_that_was_asked_for_an_error(
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
    assert decider.rule(OperatingPoint(target_risk=0.2)).trust == replace(trust_point(manifest, 0.2))


@pytest.mark.parametrize(
    ("asked", "blamed"),
    [
        (OperatingPoint(score="surprise"), "score"),
        (OperatingPoint(score="surprise", target_fpr=STRICT), "score"),
        (OperatingPoint(target_fpr=STRICT), "target_fpr"),
        (OperatingPoint(score="entropy", target_fpr=STRICT, guarantee="marginal"), "target_fpr"),
        (OperatingPoint(target_risk=STRICT), "target_risk"),
        (OperatingPoint(target_fpr=0.1, target_risk=STRICT), "target_risk"),
    ],
)
def test_what_cannot_be_supported_is_refused_and_the_parameter_blamed(
    decider: Decider, asked: OperatingPoint, blamed: str
) -> None:
    with pytest.raises(OperatingPointError):
        decider.rule(asked)
    assert decider.blamed(asked) == blamed
