import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from qualms.bundle.scores import Direction
from qualms.decisions.binomial import binomial_cdf, upper_bound
from qualms.decisions.trust import RiskEvidence, TrustPoint, choose_trust_point, risk_threshold, tally
from qualms.errors import OperatingPointError

Floats = npt.NDArray[np.float64]

TENTHS: Floats = np.arange(1, 11) / 10
HUNDREDTHS: Floats = np.arange(1, 101) / 100


def evidence(
    accepted: list[int], errors: list[int], n: int, levels: Floats = TENTHS, thresholds: Floats | None = None
) -> RiskEvidence:
    """Evidence from counts; the thresholds are the levels if not given."""
    return RiskEvidence(
        levels,
        levels if thresholds is None else thresholds,
        np.array(accepted, dtype=np.int64),
        np.array(errors, dtype=np.int64),
        n,
    )


def draw(
    rng: np.random.Generator,
    n: int,
    error: Callable[[Floats], Floats],
    levels: Floats,
    thresholds: Floats | None = None,
) -> RiskEvidence:
    """Evidence from n images with uniform doubt u, wrong with probability error(u)."""
    thresholds = levels if thresholds is None else thresholds
    doubts = rng.random(n)
    accepted, errors = tally(doubts, rng.random(n) < error(doubts), thresholds)
    return RiskEvidence(levels, thresholds, accepted, errors, n)


# Counting


def test_tally_accepts_up_to_and_including_the_threshold() -> None:
    doubts = np.array([0.3, 0.1, 0.2, 0.2, 0.9])
    wrong = np.array([True, False, True, False, True])
    accepted, errors = tally(doubts, wrong, np.array([0.05, 0.1, 0.2, 0.5, 1.0]))
    assert accepted.tolist() == [0, 1, 3, 4, 5]
    assert errors.tolist() == [0, 0, 1, 2, 3]


def test_tally_never_accepts_what_is_not_a_finite_number() -> None:
    doubts = np.array([math.nan, -math.inf, math.inf, 0.5])
    accepted, errors = tally(doubts, np.array([True, True, True, False]), np.array([0.4, 0.6]))
    assert accepted.tolist() == [0, 1]
    assert errors.tolist() == [0, 0]


def test_tally_follows_its_definition() -> None:
    rng = np.random.default_rng(0)
    doubts, wrong = rng.integers(0, 6, 200).astype(float), rng.random(200) < 0.3
    thresholds = np.array([0.0, 0.5, 2.0, 2.0, 9.0])
    accepted, errors = tally(doubts, wrong, thresholds)
    assert accepted.tolist() == [int((doubts <= t).sum()) for t in thresholds]
    assert errors.tolist() == [int(wrong[doubts <= t].sum()) for t in thresholds]


# The walk


def test_the_last_threshold_before_the_first_failure_is_returned() -> None:
    found = risk_threshold(
        evidence([100, 200, 300, 400, 500, 600, 700, 800, 900, 1000], [0, 0, 1, 4, 9, 40, 60, 80, 90, 99], 1000),
        target_risk=0.05,
    )
    assert found == 0.5


def test_a_pass_beyond_the_first_failure_does_not_count() -> None:
    accepted = [100, 200, 300, 400, 500, 600, 700, 800, 900, 1000]
    failing_at_the_fifth = evidence(accepted, [0, 0, 0, 0, 26, 26, 26, 26, 26, 26], 1000)
    assert binomial_cdf(26, 1000, 0.05) < 0.001
    assert risk_threshold(failing_at_the_fifth, target_risk=0.05) == 0.4


def test_all_is_accepted_where_all_passes() -> None:
    accepted = [100, 200, 300, 400, 500, 600, 700, 800, 900, 1000]
    assert risk_threshold(evidence(accepted, [0] * 10, 1000), target_risk=0.01) == 1.0


def test_passing_means_that_the_clopper_pearson_bound_is_within_the_target() -> None:
    for errors in range(12):
        bound = upper_bound(errors, 400)
        one_level = evidence([400], [errors], 400, levels=np.array([1.0]))
        assert risk_threshold(one_level, bound * 1.0001) == 1.0
        with pytest.raises(OperatingPointError):
            risk_threshold(one_level, bound * 0.9999)


def test_the_start_does_not_look_at_the_calibration_images() -> None:
    """Levels too strict to pass are skipped by their nominal size, though here they would fail, or pass."""
    accepted = [100, 200, 300, 400, 500, 600, 700, 800, 900, 1000]
    hopeless_below = evidence(accepted, [90, 2, 2, 2, 99, 99, 99, 99, 99, 99], 1000)
    assert risk_threshold(hopeless_below, target_risk=0.05) == 0.4
    fine_below = evidence(accepted, [0, 30, 30, 30, 99, 99, 99, 99, 99, 99], 1000)
    with pytest.raises(OperatingPointError):
        risk_threshold(fine_below, target_risk=0.05)


# Refusals


def test_a_set_too_small_for_the_target_is_refused_with_what_it_could_support() -> None:
    with pytest.raises(OperatingPointError) as refusal:
        risk_threshold(evidence([20] * 10, [0] * 10, 200), target_risk=0.01)
    assert str(refusal.value) == (
        "A target risk of 0.01 needs at least 299 accepted calibration images without an error, and of 200 "
        "the laxest threshold accepts about 200, which support 0.015 at best."
    )


def test_too_many_errors_are_refused_with_the_bound_they_allow() -> None:
    counts = evidence([100, 200, 300, 400, 500, 600, 700, 800, 900, 1000], [12] * 10, 1000)
    with pytest.raises(OperatingPointError) as refusal:
        risk_threshold(counts, target_risk=0.05)
    assert str(refusal.value) == (
        "A target risk of 0.05 is not supported by the 1,000 calibration images: 12 of the 200 least "
        "doubtful are misclassified, which bounds the risk with 95% confidence by 0.095 only."
    )


def test_accepting_nothing_is_refused() -> None:
    with pytest.raises(OperatingPointError, match="0 of the 0 least doubtful"):
        risk_threshold(evidence([0] * 10, [0] * 10, 1000), target_risk=0.05)


@pytest.mark.parametrize("target_risk", [5e-324, 1e-12])
def test_an_absurdly_small_target_is_refused_like_any_other(target_risk: float) -> None:
    with pytest.raises(OperatingPointError, match="needs at least"):
        risk_threshold(evidence([1000] * 10, [0] * 10, 1000), target_risk)


def test_no_calibration_image_at_all_is_refused() -> None:
    with pytest.raises(OperatingPointError, match="support 1 at best"):
        risk_threshold(evidence([0] * 10, [0] * 10, 0), target_risk=0.05)


@pytest.mark.parametrize("target_risk", [0.0, 1.0, -0.5, math.nan, math.inf])
def test_a_target_outside_the_open_unit_interval_is_refused(target_risk: float) -> None:
    with pytest.raises(OperatingPointError, match="strictly between 0 and 1"):
        risk_threshold(evidence([100] * 10, [0] * 10, 1000), target_risk)


# Trust points


def test_a_trust_point_speaks_the_scores_own_units() -> None:
    counts = evidence(
        [100, 200, 300, 400, 500, 600, 700, 800, 900, 1000],
        [0, 0, 1, 4, 9, 40, 60, 80, 90, 99],
        1000,
        thresholds=-TENTHS[::-1],
    )
    made = choose_trust_point(counts, score="max_probability", direction="lower", target_risk=0.05)
    assert made == TrustPoint("max_probability", "lower", 0.05, threshold=0.6, accepted=0.5)
    assert made.accepts([0.7, 0.6, 0.59]).tolist() == [True, True, False]


@pytest.mark.parametrize("direction", ["higher", "lower"])
def test_a_value_that_is_not_a_finite_number_is_never_trusted(direction: Direction) -> None:
    made = TrustPoint("score", direction, 0.05, threshold=0.0, accepted=0.5)
    assert not made.accepts([math.nan, math.inf, -math.inf]).any()


def test_equal_thresholds_count_the_same_images() -> None:
    thresholds = np.array([0.1, 0.2, 0.3, 0.3, 0.3, 0.6, 0.7, 0.8, 0.9, 1.0])
    counts = evidence([100, 200, 500, 500, 500, 600, 700, 800, 900, 999], [0] * 5 + [500] * 5, 1000, TENTHS, thresholds)
    made = choose_trust_point(counts, score="entropy", direction="higher", target_risk=0.05)
    assert (made.threshold, made.accepted) == (0.3, 0.5)


# What is promised, by simulation. The seeds are fixed; four standard errors are allowed.


def chosen(counts: RiskEvidence, target_risk: float) -> float:
    """The threshold, or 0 (accept nothing, which is safe) where the rule refuses."""
    try:
        return risk_threshold(counts, target_risk)
    except OperatingPointError:
        return 0.0


def looks_good(counts: RiskEvidence, target_risk: float) -> float:
    """The laxest threshold whose error rate on the calibration set is within the target: unsound."""
    good = counts.errors <= target_risk * counts.accepted
    return float(counts.thresholds[good][-1]) if good.any() else 0.0


def passes_alone(counts: RiskEvidence, target_risk: float) -> float:
    """The laxest threshold that passes its own test, as if it were the only one: unsound."""
    pairs = zip(counts.errors, counts.accepted, strict=True)
    good = np.array([binomial_cdf(int(e), int(m), target_risk) <= 0.05 for e, m in pairs])
    return float(counts.thresholds[good][-1]) if good.any() else 0.0


def cliff(doubts: Floats) -> Floats:
    """No errors up to 0.6, then so many that the risk of accepting up to 0.8 is 0.05001, and of all 0.24."""
    return np.select([doubts <= 0.6, doubts <= 0.8], [0.0, 0.05001 * 4], default=1.0)


def slope(doubts: Floats) -> Floats:
    """Errors that grow with doubt; the risk of accepting up to t is 0.1 t³."""
    return 0.4 * doubts**3


def flat(doubts: Floats) -> Floats:
    """Errors whatever the doubt, a hair above a target of 0.05."""
    return np.full_like(doubts, 0.0501)


def rare(doubts: Floats) -> Floats:
    """Errors among the most doubtful tenth only."""
    return np.where(doubts > 0.9, 0.1, 0.0)


def test_the_promise_is_kept_and_nearly_used_up_at_a_cliff() -> None:
    """0.8 is the only unsafe threshold within reach, and by a hair; all before it pass."""
    rng = np.random.default_rng(1)
    target_risk, draws = 0.05, 4_000
    levels = np.array([0.2, 0.4, 0.6, 0.8, 1.0])
    ours, unsound = np.zeros(draws), np.zeros(draws)
    for i in range(draws):
        counts = draw(rng, 2_000, cliff, levels)
        ours[i], unsound[i] = chosen(counts, target_risk), looks_good(counts, target_risk)
    assert 0.03 < (ours >= 0.8).mean() <= 0.05 + 4 * math.sqrt(0.05 * 0.95 / draws)
    assert (unsound >= 0.8).mean() > 0.4, "the simulation can tell a sound rule from an unsound one"


def test_the_promise_is_kept_with_many_thresholds_from_a_fit_split() -> None:
    rng = np.random.default_rng(2)
    target_risk, draws = 0.02, 2_000
    safe_up_to = (target_risk / 0.1) ** (1 / 3)
    ours, unsound = np.zeros(draws), np.zeros(draws)
    for i in range(draws):
        counts = draw(rng, 1_500, slope, HUNDREDTHS, np.quantile(rng.random(1_000), HUNDREDTHS))
        ours[i], unsound[i] = chosen(counts, target_risk), looks_good(counts, target_risk)
    assert (ours > safe_up_to).mean() <= 0.05 + 4 * math.sqrt(0.05 * 0.95 / draws)
    assert (unsound > safe_up_to).mean() > 0.4, "the simulation can tell a sound rule from an unsound one"
    assert ours.mean() > 0.75 * safe_up_to, "the promise is not kept by accepting next to nothing"


def test_a_useless_score_costs_acceptance_but_not_the_promise() -> None:
    """Every threshold is unsafe, so any that is returned breaks the promise."""
    rng = np.random.default_rng(3)
    target_risk, draws = 0.05, 2_000
    ours, unsound = np.zeros(draws), np.zeros(draws)
    for i in range(draws):
        counts = draw(rng, 1_000, flat, TENTHS)
        ours[i], unsound[i] = chosen(counts, target_risk), passes_alone(counts, target_risk)
    assert 0.01 < (ours > 0).mean() <= 0.05 + 4 * math.sqrt(0.05 * 0.95 / draws)
    assert (unsound > 0).mean() > 0.1, "the simulation can tell a sound rule from an unsound one"


@pytest.mark.parametrize(("n", "target_risk"), [(400, 0.01), (1_000, 0.01), (5_000, 0.01), (5_000, 0.005)])
def test_a_good_classifier_is_rarely_refused(n: int, target_risk: float) -> None:
    """With errors only among the most doubtful, a refusal would be bad luck at the start of the walk."""
    rng = np.random.default_rng(4)
    refused = [
        chosen(draw(rng, n, rare, HUNDREDTHS, np.quantile(rng.random(n), HUNDREDTHS)), target_risk) == 0.0
        for _ in range(200)
    ]
    assert np.mean(refused) <= 0.1
