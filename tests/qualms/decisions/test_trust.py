import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from qualms.bundle.scores import Direction
from qualms.decisions.binomial import binomial_cdf, upper_bound
from qualms.decisions.trust import RiskEvidence, TrustPoint, choose_trust_point, count_accepted
from qualms.errors import OperatingPointError

Floats = npt.NDArray[np.float64]

TENTHS: Floats = np.arange(1, 11) / 10
HUNDREDTHS: Floats = np.arange(1, 101) / 100


def evidence(
    accepted: list[int],
    errors: list[int],
    n: int,
    levels: Floats = TENTHS,
    thresholds: Floats | None = None,
    joint: bool = True,
) -> RiskEvidence:
    """Evidence from counts; the thresholds default to the levels."""
    return RiskEvidence(
        levels * n,
        levels if thresholds is None else thresholds,
        np.array(accepted, dtype=np.int64),
        np.array(errors, dtype=np.int64),
        n,
        joint,
    )


def draw(
    rng: np.random.Generator,
    n: int,
    error: Callable[[Floats], Floats],
    levels: Floats,
    thresholds: Floats | None = None,
) -> RiskEvidence:
    """Evidence from n images with uniform uncertainty u, wrong with probability error(u)."""
    thresholds = levels if thresholds is None else thresholds
    uncertainty = np.sort(rng.random(n))
    accepted, errors = count_accepted(uncertainty, rng.random(n) < error(uncertainty), thresholds)
    return RiskEvidence(levels * n, thresholds, accepted, errors, n, joint=True)


def risk_threshold(counts: RiskEvidence, target_risk: float) -> float:
    """The threshold of a score with direction "higher"."""
    return choose_trust_point([counts], score="score", direction="higher", target_risk=target_risk).threshold


# Counting


def test_images_at_the_threshold_are_counted_as_accepted() -> None:
    uncertainty = np.array([0.1, 0.2, 0.2, 0.3, 0.9])
    wrong = np.array([False, True, False, True, True])
    accepted, errors = count_accepted(uncertainty, wrong, np.array([0.05, 0.1, 0.2, 0.5, 1.0]))
    assert accepted.tolist() == [0, 1, 3, 4, 5]
    assert errors.tolist() == [0, 0, 1, 2, 3]


def test_counts_equal_their_definition() -> None:
    rng = np.random.default_rng(0)
    uncertainty, wrong = np.sort(rng.integers(0, 6, 200)).astype(float), rng.random(200) < 0.3
    thresholds = np.array([-1.0, 0.0, 0.5, 2.0, 2.0, 9.0])
    accepted, errors = count_accepted(uncertainty, wrong, thresholds)
    assert accepted.tolist() == [int((uncertainty <= t).sum()) for t in thresholds]
    assert errors.tolist() == [int(wrong[uncertainty <= t].sum()) for t in thresholds]


def test_no_images_give_counts_of_zero() -> None:
    accepted, errors = count_accepted(np.array([]), np.array([], bool), TENTHS)
    assert accepted.tolist() == errors.tolist() == [0] * 10


# The test sequence


def test_the_last_threshold_before_the_first_failure_is_returned() -> None:
    threshold = risk_threshold(
        evidence([100, 200, 300, 400, 500, 600, 700, 800, 900, 1000], [0, 0, 1, 4, 9, 40, 60, 80, 90, 99], 1000),
        target_risk=0.05,
    )
    assert threshold == 0.5


def test_passes_after_the_first_failure_are_ignored() -> None:
    accepted = [100, 200, 300, 400, 500, 600, 700, 800, 900, 1000]
    failing_at_the_fifth = evidence(accepted, [0, 0, 0, 0, 26, 26, 26, 26, 26, 26], 1000)
    assert binomial_cdf(26, 1000, 0.05) < 0.001
    assert risk_threshold(failing_at_the_fifth, target_risk=0.05) == 0.4


def test_the_last_threshold_is_returned_if_all_pass() -> None:
    accepted = [100, 200, 300, 400, 500, 600, 700, 800, 900, 1000]
    assert risk_threshold(evidence(accepted, [0] * 10, 1000), target_risk=0.01) == 1.0


def test_a_threshold_passes_iff_its_clopper_pearson_bound_is_within_the_target() -> None:
    for errors in range(12):
        bound = upper_bound(errors, 400)
        one_level = evidence([400], [errors], 400, levels=np.array([1.0]))
        assert risk_threshold(one_level, bound * 1.0001) == 1.0
        with pytest.raises(OperatingPointError):
            risk_threshold(one_level, bound * 0.9999)


def test_the_first_tested_level_does_not_depend_on_the_counts() -> None:
    """Stricter levels are skipped because of their expected size, whether they would fail or pass."""
    accepted = [100, 200, 300, 400, 500, 600, 700, 800, 900, 1000]
    failing_below = evidence(accepted, [90, 2, 2, 2, 99, 99, 99, 99, 99, 99], 1000)
    assert risk_threshold(failing_below, target_risk=0.05) == 0.4
    passing_below = evidence(accepted, [0, 30, 30, 30, 99, 99, 99, 99, 99, 99], 1000)
    with pytest.raises(OperatingPointError):
        risk_threshold(passing_below, target_risk=0.05)


# Refusals


def test_a_small_calibration_set_is_refused_with_the_risk_it_can_support() -> None:
    with pytest.raises(OperatingPointError) as refusal:
        risk_threshold(evidence([20] * 10, [0] * 10, 200), target_risk=0.01)
    assert str(refusal.value) == (
        "A target risk of 0.01 needs at least 299 accepted calibration images without an error; "
        "the loosest threshold accepts about 200 of 200, which support 0.015 at best."
    )


@pytest.mark.parametrize(("joint", "which"), [(True, " that are not flagged"), (False, "")])
def test_too_many_errors_are_refused_with_the_risk_bound(joint: bool, which: str) -> None:
    counts = evidence([100, 200, 300, 400, 500, 600, 700, 800, 900, 1000], [12] * 10, 1000, joint=joint)
    with pytest.raises(OperatingPointError) as refusal:
        risk_threshold(counts, target_risk=0.05)
    assert str(refusal.value) == (
        "A target risk of 0.05 is not supported by the 1,000 calibration images: 12 of the 200 least "
        f"uncertain ones{which} are misclassified, so the risk is at most 0.095 with 95% confidence."
    )


def test_a_threshold_that_accepts_no_image_is_refused() -> None:
    with pytest.raises(OperatingPointError, match="0 of the 0 least uncertain"):
        risk_threshold(evidence([0] * 10, [0] * 10, 1000), target_risk=0.05)


@pytest.mark.parametrize("target_risk", [5e-324, 1e-12])
def test_an_extremely_small_target_is_refused(target_risk: float) -> None:
    with pytest.raises(OperatingPointError, match="needs at least"):
        risk_threshold(evidence([1000] * 10, [0] * 10, 1000), target_risk)


def test_an_empty_calibration_set_is_refused() -> None:
    with pytest.raises(OperatingPointError, match="support 1 at best"):
        risk_threshold(evidence([0] * 10, [0] * 10, 0), target_risk=0.05)


@pytest.mark.parametrize("target_risk", [0.0, 1.0, -0.5, math.nan, math.inf])
def test_a_target_outside_the_open_unit_interval_is_refused(target_risk: float) -> None:
    with pytest.raises(OperatingPointError, match="strictly between 0 and 1"):
        risk_threshold(evidence([100] * 10, [0] * 10, 1000), target_risk)


# Trust points


def test_the_threshold_of_a_trust_point_is_a_raw_value_of_the_score() -> None:
    counts = evidence(
        [100, 200, 300, 400, 500, 600, 700, 800, 900, 1000],
        [0, 0, 1, 4, 9, 40, 60, 80, 90, 99],
        1000,
        thresholds=-TENTHS[::-1],
    )
    trust = choose_trust_point([counts], score="max_probability", direction="lower", target_risk=0.05)
    assert trust == TrustPoint("max_probability", "lower", 0.05, threshold=0.6, accepted=0.5, joint=True)
    assert trust.accepts([0.7, 0.6, 0.59]).tolist() == [True, True, False]
    assert trust.condition == "not flagged and max_probability ≥ 0.6"


@pytest.mark.parametrize("direction", ["higher", "lower"])
def test_non_finite_values_are_not_trusted(direction: Direction) -> None:
    trust = TrustPoint("score", direction, 0.05, threshold=0.0, accepted=0.5, joint=True)
    assert not trust.accepts([math.nan, math.inf, -math.inf]).any()


def test_equal_thresholds_accept_the_same_images() -> None:
    thresholds = np.array([0.1, 0.2, 0.3, 0.3, 0.3, 0.6, 0.7, 0.8, 0.9, 1.0])
    counts = evidence([100, 200, 500, 500, 500, 600, 700, 800, 900, 999], [0] * 5 + [500] * 5, 1000, TENTHS, thresholds)
    trust = choose_trust_point([counts], score="entropy", direction="higher", target_risk=0.05)
    assert (trust.threshold, trust.accepted) == (0.3, 0.5)
    assert trust.condition == "not flagged and entropy ≤ 0.3"


# Simulations of the guarantee. The seeds are fixed; four standard errors are allowed.


def chosen(counts: RiskEvidence, target_risk: float) -> float:
    """The chosen threshold, or 0 (accept nothing, which is safe) if the target is refused."""
    try:
        return risk_threshold(counts, target_risk)
    except OperatingPointError:
        return 0.0


def looks_good(counts: RiskEvidence, target_risk: float) -> float:
    """Unsound rule: the loosest threshold whose error rate on the calibration set is within the target."""
    good = counts.errors <= target_risk * counts.accepted
    return float(counts.thresholds[good][-1]) if good.any() else 0.0


def passes_alone(counts: RiskEvidence, target_risk: float) -> float:
    """Unsound rule: the loosest threshold that passes its test, without a correction for multiple tests."""
    pairs = zip(counts.errors, counts.accepted, strict=True)
    good = np.array([binomial_cdf(int(e), int(m), target_risk) <= 0.05 for e, m in pairs])
    return float(counts.thresholds[good][-1]) if good.any() else 0.0


def cliff(uncertainty: Floats) -> Floats:
    """No errors up to 0.6; the risk of accepting up to 0.8 is 0.05001, and of accepting all 0.24."""
    return np.select([uncertainty <= 0.6, uncertainty <= 0.8], [0.0, 0.05001 * 4], default=1.0)


def slope(uncertainty: Floats) -> Floats:
    """Errors that increase with uncertainty; the risk of accepting up to t is 0.1 t³."""
    return 0.4 * uncertainty**3


def flat(uncertainty: Floats) -> Floats:
    """A constant error rate slightly above a target of 0.05."""
    return np.full_like(uncertainty, 0.0501)


def rare(uncertainty: Floats) -> Floats:
    """Errors only among the most uncertain tenth."""
    return np.where(uncertainty > 0.9, 0.1, 0.0)


def test_the_guarantee_is_met_and_tight_at_a_cliff() -> None:
    """0.8 is the first unsafe threshold, and only slightly unsafe; all thresholds before it pass."""
    rng = np.random.default_rng(1)
    target_risk, draws = 0.05, 4_000
    levels = np.array([0.2, 0.4, 0.6, 0.8, 1.0])
    ours, unsound = np.zeros(draws), np.zeros(draws)
    for i in range(draws):
        counts = draw(rng, 2_000, cliff, levels)
        ours[i], unsound[i] = chosen(counts, target_risk), looks_good(counts, target_risk)
    assert 0.03 < (ours >= 0.8).mean() <= 0.05 + 4 * math.sqrt(0.05 * 0.95 / draws)
    assert (unsound >= 0.8).mean() > 0.4, "the simulation must detect an unsound rule"


def test_the_guarantee_is_met_with_many_thresholds_from_a_fit_split() -> None:
    rng = np.random.default_rng(2)
    target_risk, draws = 0.02, 2_000
    safe_up_to = (target_risk / 0.1) ** (1 / 3)
    ours, unsound = np.zeros(draws), np.zeros(draws)
    for i in range(draws):
        counts = draw(rng, 1_500, slope, HUNDREDTHS, np.quantile(rng.random(1_000), HUNDREDTHS))
        ours[i], unsound[i] = chosen(counts, target_risk), looks_good(counts, target_risk)
    assert (ours > safe_up_to).mean() <= 0.05 + 4 * math.sqrt(0.05 * 0.95 / draws)
    assert (unsound > safe_up_to).mean() > 0.4, "the simulation must detect an unsound rule"
    assert ours.mean() > 0.75 * safe_up_to, "the rule must not be safe merely because it accepts almost nothing"


@pytest.mark.slow
def test_the_guarantee_is_met_with_a_useless_score() -> None:
    """Every threshold is unsafe, so every returned threshold violates the guarantee."""
    rng = np.random.default_rng(3)
    target_risk, draws = 0.05, 2_000
    ours, unsound = np.zeros(draws), np.zeros(draws)
    for i in range(draws):
        counts = draw(rng, 1_000, flat, TENTHS)
        ours[i], unsound[i] = chosen(counts, target_risk), passes_alone(counts, target_risk)
    assert 0.01 < (ours > 0).mean() <= 0.05 + 4 * math.sqrt(0.05 * 0.95 / draws)
    assert (unsound > 0).mean() > 0.1, "the simulation must detect an unsound rule"


@pytest.mark.parametrize(("n", "target_risk"), [(400, 0.01), (1_000, 0.01), (5_000, 0.01), (5_000, 0.005)])
def test_a_good_classifier_is_rarely_refused(n: int, target_risk: float) -> None:
    """If errors occur only among the most uncertain images, a refusal can only happen at the first tested level."""
    rng = np.random.default_rng(4)
    refused = [
        chosen(draw(rng, n, rare, HUNDREDTHS, np.quantile(rng.random(n), HUNDREDTHS)), target_risk) == 0.0
        for _ in range(200)
    ]
    assert np.mean(refused) <= 0.1
