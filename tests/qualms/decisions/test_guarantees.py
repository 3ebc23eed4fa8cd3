"""Simulations of all guarantees through the rules that requests use: many calibration sets from one known population.

Calibration sets are drawn with replacement from a finite population, so the true rates of a rule are exact averages over the
population. The seeds are fixed; four standard errors are allowed.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray

from qualms.bundle.calibration_data import Calibration, TrustGrid
from qualms.bundle.manifest import Manifest
from qualms.bundle.parts import Guarantee
from qualms.decisions.calibration import trust_grid
from qualms.decisions.operating_point import OperatingPoint
from qualms.decisions.trust import RiskEvidence, choose_trust_point, count_accepted
from qualms.decisions.verdicts import Decider, Rule, decide
from qualms.errors import OperatingPointError

FLAG, TRUST = "fused", "predicted_error"
N = 1_000
"""calibration images"""
FIT = 500
"""images of the fit split"""


@dataclass(frozen=True)
class Images:
    """Flag score, trust score and whether the prediction is wrong, each (M,)."""

    flag: NDArray[np.float32]
    trust: NDArray[np.float32]
    wrong: NDArray[np.bool_]

    def draw(self, rng: np.random.Generator, count: int) -> "Images":
        rows = rng.integers(0, len(self.flag), count)
        return Images(self.flag[rows], self.trust[rows], self.wrong[rows])

    @property
    def outputs(self) -> dict[str, NDArray[np.float32]]:
        return {FLAG: self.flag, TRUST: self.trust}


Calibrate = Callable[[Images, Images], Decider]


@pytest.fixture
def calibrate(manifest: Manifest) -> Calibrate:
    """(fit split, calibration split) → the decisions of a bundle that was calibrated on them."""

    def make(fit: Images, calibration: Images) -> Decider:
        levels, thresholds = trust_grid(fit.trust)
        part = Calibration(
            n=len(calibration.flag),
            split="calibration",
            data="drawn",
            data_sha256="0" * 64,
            scores=dict(calibration.outputs),
            wrong=np.flatnonzero(calibration.wrong).tolist(),
            trust=TrustGrid(levels=levels, thresholds=thresholds),
        )
        return Decider(manifest.model_copy(update={"calibration": part}))

    return make


def rule_or_none(decider: Decider, point: OperatingPoint) -> Rule | None:
    """The rule, or None if the target risk is refused, which accepts nothing and is safe."""
    try:
        return decider.rule(point)
    except OperatingPointError:
        return None


def risk(population: Images, accepted: NDArray[np.bool_]) -> float:
    """The true error rate of the accepted images, 0 if there are none."""
    return float(population.wrong[accepted].mean()) if accepted.any() else 0.0


def noise(share: float, draws: int) -> float:
    return 4 * math.sqrt(share * (1 - share) / draws)


# Correlated scores


def correlated(rng: np.random.Generator, size: int = 20_000) -> Images:
    """Flag score, trust score and errors that are all positively correlated, with about 5 % errors."""
    shared, own_flag, own_trust = rng.normal(size=(3, size))
    flag, trust = 0.6 * shared + 0.8 * own_flag, 0.8 * shared + 0.6 * own_trust
    wrong = rng.random(size) < 1 / (1 + np.exp(4.5 - 1.2 * trust - 0.8 * flag))
    return Images(flag.astype(np.float32), trust.astype(np.float32), wrong)


@pytest.mark.parametrize("guarantee", ["marginal", "confident"])
@pytest.mark.parametrize(("target_fpr", "target_risk"), [(0.01, 0.02), (0.1, 0.02), (0.5, 0.02)])
def test_flag_and_joint_risk_hold_for_correlated_scores(
    calibrate: Calibrate, guarantee: Guarantee, target_fpr: float, target_risk: float
) -> None:
    rng, draws = np.random.default_rng(1), 500
    population = correlated(rng)
    point = OperatingPoint(FLAG, target_fpr, guarantee, target_risk)
    rates, risks, shares = (np.zeros(draws) for _ in range(3))
    for i in range(draws):
        decider = calibrate(population.draw(rng, FIT), population.draw(rng, N))
        flag = decider.rule(OperatingPoint(FLAG, target_fpr, guarantee)).flag
        rates[i] = flag.flags(population.flag).mean()
        rule = rule_or_none(decider, point)
        if rule is not None:
            verdicts = decide(rule, population.outputs)
            assert verdicts.accepts is not None
            assert not (verdicts.accepts & verdicts.flags).any()
            risks[i], shares[i] = risk(population, verdicts.accepts), verdicts.accepts.mean()
    if guarantee == "marginal":
        assert rates.mean() <= target_fpr + 4 * rates.std() / math.sqrt(draws)
    else:
        assert (rates > target_fpr).mean() <= 0.05 + noise(0.05, draws)
    assert (risks > target_risk).mean() <= 0.05 + noise(0.05, draws)
    assert shares.mean() > 0.4 * (1 - target_fpr), "the rule must not be safe merely because it accepts almost nothing"


# The joint test at its limit


def cliff(rng: np.random.Generator, size: int = 20_000) -> Images:
    """Two groups. In the first, errors begin at a trust score of 0.6, and the risk up to 0.8 is 5.2 %.

    The second, 30 % of the images, has higher flag scores and no errors, so it hides the errors of the first one.
    """
    second = np.arange(size) >= 0.7 * size
    trust = np.where(second, 0.8 * rng.random(size), rng.random(size))
    wrong = np.zeros(size, bool)
    middle, last = (np.flatnonzero(~second & (trust > low) & (trust <= low + 0.2)) for low in (0.6, 0.8))
    up_to_middle = np.count_nonzero(~second & (trust <= 0.8))
    wrong[rng.permutation(middle)[: math.ceil(0.052 * up_to_middle)]] = True
    wrong[last] = True
    return Images((second + rng.random(size)).astype(np.float32), trust.astype(np.float32), wrong)


def test_the_joint_risk_is_met_and_tight_and_a_test_that_ignores_the_flag_is_not(calibrate: Calibrate) -> None:
    """The flag removes the second group; up to 0.8, the rest is slightly unsafe, and all images together are safe."""
    rng, draws, target_risk = np.random.default_rng(2), 800, 0.05
    population, thresholds = cliff(rng), np.array([0.2, 0.4, 0.6, 0.8, 1.0], np.float32)
    fit = Images(population.flag[:0], np.repeat(thresholds, 20), population.wrong[:0])
    point = OperatingPoint(FLAG, 0.35, "marginal", target_risk)
    joint, ignoring = np.zeros(draws), np.zeros(draws)
    for i in range(draws):
        calibration = population.draw(rng, N)
        decider = calibrate(fit, calibration)
        rule = rule_or_none(decider, point)
        if rule is not None:
            accepts = decide(rule, population.outputs).accepts
            assert accepts is not None
            joint[i] = risk(population, accepts)
        flag = decider.rule(OperatingPoint(FLAG, 0.35, "marginal")).flag
        threshold = threshold_of_all_images(calibration, thresholds, target_risk)
        ignoring[i] = risk(population, (population.flag < flag.threshold) & (population.trust <= threshold))
    assert 0.01 < (joint > target_risk).mean() <= 0.05 + noise(0.05, draws)
    assert (ignoring > target_risk).mean() > 0.5, "the simulation must detect a test that ignores the flag"


def threshold_of_all_images(images: Images, thresholds: NDArray[np.float32], target_risk: float) -> float:
    """The trust threshold of a test that counts flagged images too; 0 if it is refused."""
    order = np.argsort(images.trust)
    accepted, errors = count_accepted(images.trust[order], images.wrong[order], thresholds)
    expected = np.arange(1, len(thresholds) + 1) / len(thresholds) * len(order)
    evidence = RiskEvidence(expected, thresholds.astype(np.float64), accepted, errors, len(order), joint=False)
    try:
        return choose_trust_point([evidence], score=TRUST, direction="higher", target_risk=target_risk).threshold
    except OperatingPointError:
        return 0.0


def test_accepting_flagged_images_would_break_the_joint_risk(calibrate: Calibrate) -> None:
    """Flagged images that are wrong with a low trust score, as turned digits are: the flag alone excludes them."""
    rng, draws, target_risk = np.random.default_rng(3), 200, 0.02
    size = 20_000
    odd = np.arange(size) < 0.04 * size
    flag = np.where(odd, 2, 0) + rng.random(size)
    population = Images(flag.astype(np.float32), rng.random(size).astype(np.float32), odd)
    point = OperatingPoint(FLAG, 0.06, "marginal", target_risk)
    joint, with_flagged = np.ones(draws), np.ones(draws)
    for i in range(draws):
        rule = calibrate(population.draw(rng, FIT), population.draw(rng, N)).rule(point)
        verdicts = decide(rule, population.outputs)
        assert rule.trust is not None
        assert verdicts.accepts is not None
        joint[i] = risk(population, verdicts.accepts)
        with_flagged[i] = risk(population, rule.trust.accepts(population.trust))
    assert (joint > target_risk).mean() <= 0.05
    assert (with_flagged > target_risk).all()


def test_the_joint_risk_holds_if_many_images_have_exactly_the_flag_threshold(calibrate: Calibrate) -> None:
    """4 % of the images share the highest flag score and are wrong; they are not flagged, and must not be accepted."""
    rng, draws, target_risk = np.random.default_rng(4), 200, 0.02
    size = 20_000
    tied = np.arange(size) < 0.04 * size
    flag = np.where(tied, 1, rng.random(size))
    population = Images(flag.astype(np.float32), rng.random(size).astype(np.float32), tied)
    point = OperatingPoint(FLAG, 0.01, "marginal", target_risk)
    joint, not_flagged = np.ones(draws), np.ones(draws)
    for i in range(draws):
        rule = calibrate(population.draw(rng, FIT), population.draw(rng, N)).rule(point)
        verdicts = decide(rule, population.outputs)
        assert rule.trust is not None
        assert verdicts.accepts is not None
        assert verdicts.accepts.mean() > 0.5
        joint[i] = risk(population, verdicts.accepts)
        not_flagged[i] = risk(population, rule.trust.accepts(population.trust) & ~verdicts.flags)
    assert (joint > target_risk).mean() <= 0.05
    assert (not_flagged > target_risk).mean() > 0.9
