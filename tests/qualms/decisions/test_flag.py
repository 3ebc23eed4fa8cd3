import math
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from qualms.bundle.parts import Guarantee
from qualms.bundle.scores import Direction, as_uncertainty
from qualms.decisions.binomial import binomial_cdf
from qualms.decisions.flag import FlagPoint, choose_flag_point, p_values, rank
from qualms.errors import OperatingPointError

GUARANTEES: list[Guarantee] = ["confident", "marginal"]


def point(
    calibration: list[float] | np.typing.NDArray[np.float64],
    target_fpr: float,
    guarantee: Guarantee = "confident",
    direction: Direction = "higher",
) -> FlagPoint:
    """A flag point from raw scores in any order."""
    return choose_flag_point(
        np.sort(as_uncertainty(calibration, direction)),
        score="score",
        direction=direction,
        target_fpr=target_fpr,
        guarantee=guarantee,
    )


# p-values


def test_p_values_count_calibration_images_with_at_least_the_same_uncertainty() -> None:
    calibration = np.array([1.0, 2.0, 2.0, 5.0])
    uncertainty = np.array([0.0, 1.0, 2.0, 3.0, 5.0, 6.0, np.inf])
    assert p_values(uncertainty, calibration).tolist() == [1.0, 1.0, 0.8, 0.4, 0.4, 0.2, 0.2]


@given(
    st.lists(st.integers(-3, 3).map(float), min_size=1, max_size=30),
    st.lists(st.one_of(st.integers(-4, 4).map(float), st.just(math.inf)), max_size=10),
)
def test_p_values_equal_their_definition(calibration: list[float], uncertainty: list[float]) -> None:
    expected = [(1 + sum(c >= u for c in calibration)) / (len(calibration) + 1) for u in uncertainty]
    assert p_values(np.array(uncertainty, dtype=np.float64), np.sort(calibration)).tolist() == expected


# The rank k


@pytest.mark.parametrize(
    ("target_fpr", "n", "k"),
    [
        (0.05, 1_000, 39),
        (0.05, 2_000, 84),
        (0.05, 5_000, 225),
        (0.05, 10_000, 464),
        (0.01, 1_000, 5),
        (0.01, 2_000, 13),
        (0.01, 5_000, 39),
        (0.01, 10_000, 84),
        (0.01, 299, 1),
    ],
)
def test_the_confident_rank_equals_reference_values(target_fpr: float, n: int, k: int) -> None:
    assert rank(n, target_fpr, "confident") == k


@given(st.integers(1, 3_000), st.floats(0.001, 0.999))
def test_the_confident_rank_is_the_largest_with_a_beta_tail_of_at_most_five_percent(n: int, target_fpr: float) -> None:
    try:
        k = rank(n, target_fpr, "confident")
    except OperatingPointError:
        k = 0
    tails = np.asarray(stats.beta.sf(target_fpr, np.arange(1, n + 1), n - np.arange(n)))
    assert k == np.count_nonzero(tails <= 0.05)


@pytest.mark.parametrize(
    ("target_fpr", "n", "k"),
    [
        (0.01, 99, 1),
        (0.01, 198, 1),
        (0.05, 2_000, 100),
        (0.29, 99, 29),
        (1 - 0.9, 9, 1),
        (0.07, 999_999, 70_000),
        (math.nextafter(1, 0), 10, 10),
    ],
)
def test_the_marginal_rank_is_robust_to_rounding(target_fpr: float, n: int, k: int) -> None:
    assert rank(n, target_fpr, "marginal") == k


@pytest.mark.parametrize(("guarantee", "needed"), [("confident", 299), ("marginal", 99)])
def test_a_small_calibration_set_is_refused_with_the_required_size(guarantee: Guarantee, needed: int) -> None:
    with pytest.raises(OperatingPointError) as refusal:
        rank(needed - 1, 0.01, guarantee)
    assert str(refusal.value) == (
        f"A {guarantee} false-alarm rate of 0.01 needs at least {needed} calibration images; there are {needed - 1}."
    )
    assert rank(needed, 0.01, guarantee) == 1


@given(st.integers(2, 999), st.sampled_from(GUARANTEES))
def test_the_required_size_is_the_smallest_accepted_size(per_mille: int, guarantee: Guarantee) -> None:
    target_fpr = per_mille / 1000
    with pytest.raises(OperatingPointError) as refusal:
        rank(0, target_fpr, guarantee)
    match = re.search(r"at least ([\d,]+) calibration", str(refusal.value))
    assert match
    needed = int(match[1].replace(",", ""))
    assert rank(needed, target_fpr, guarantee) >= 1
    with pytest.raises(OperatingPointError):
        rank(needed - 1, target_fpr, guarantee)


@pytest.mark.parametrize("target_fpr", [0.0, 1.0, -0.1, 2.0, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("guarantee", GUARANTEES)
def test_a_target_outside_the_open_unit_interval_is_refused(target_fpr: float, guarantee: Guarantee) -> None:
    with pytest.raises(OperatingPointError, match=f"strictly between 0 and 1, not {target_fpr}"):
        rank(1_000, target_fpr, guarantee)


@pytest.mark.parametrize("target_fpr", [1e-18, 5e-324])
@pytest.mark.parametrize("guarantee", GUARANTEES)
def test_an_extremely_small_target_is_refused(target_fpr: float, guarantee: Guarantee) -> None:
    with pytest.raises(OperatingPointError, match="needs at least"):
        rank(1_000_000, target_fpr, guarantee)


def test_an_unknown_guarantee_is_refused_with_the_accepted_ones() -> None:
    with pytest.raises(OperatingPointError, match="'certain' is unknown; accepted are confident, marginal, by-class"):
        rank(1_000, 0.05, "certain")  # type: ignore[arg-type]


# Flag points


def test_a_flag_point_has_its_parameters_threshold_and_rate_bound() -> None:
    flag = point(np.arange(1_000.0), 0.05)
    assert flag == FlagPoint("score", "higher", 0.05, "confident", 39, 1_000, 961.0)
    assert flag.rate_bound == pytest.approx(float(stats.beta.isf(0.001, 39, 962)), rel=1e-10)
    assert flag.flags([960.0, 961.0, 961.5, math.nan]).tolist() == [False, False, True, True]


def test_the_threshold_is_a_raw_value_of_the_score() -> None:
    flag = point(np.arange(1_000.0), 0.05, direction="lower")
    assert flag.threshold == 38.0
    assert flag.flags([37.0, 38.0, 39.0, math.nan]).tolist() == [True, False, False, True]


@given(
    st.lists(st.integers(-4, 4), min_size=9, max_size=80),
    st.floats(0.1, 0.95),
    st.sampled_from(GUARANTEES),
    st.sampled_from(["higher", "lower"]),
)
def test_flags_are_equivalent_to_small_p_values_even_with_ties(
    scores: list[int], target_fpr: float, guarantee: Guarantee, direction: Direction
) -> None:
    calibration = np.array(scores, dtype=np.float64)
    try:
        flag = point(calibration, target_fpr, guarantee, direction)
    except OperatingPointError:
        return
    values = np.array([*np.arange(-5, 5.5, 0.5), math.nan, math.inf, -math.inf])
    p = p_values(as_uncertainty(values, direction), np.sort(as_uncertainty(calibration, direction)))
    assert flag.flags(values).tolist() == (p <= flag.k / (flag.n + 1)).tolist()


@given(
    st.lists(st.floats(allow_nan=False, allow_infinity=False, width=32), min_size=20, max_size=60),
    st.sampled_from(["higher", "lower"]),
)
def test_flags_of_calibration_scores_are_equivalent_to_small_p_values(
    scores: list[float], direction: Direction
) -> None:
    values = np.array(scores, dtype=np.float32)
    flag = point(values.astype(np.float64), 0.2, "marginal", direction)
    p = p_values(as_uncertainty(values, direction), np.sort(as_uncertainty(values, direction)))
    assert flag.flags(values).tolist() == (p <= flag.k / (flag.n + 1)).tolist()


def test_a_non_finite_threshold_is_refused() -> None:
    calibration = np.r_[np.arange(90.0), np.full(10, math.nan)]
    with pytest.raises(OperatingPointError, match="threshold of 'score' to inf"):
        point(calibration, 0.1, "marginal")
    assert math.isfinite(point(calibration, 0.2, "marginal").threshold)


# Simulations of the guarantees. The seeds are fixed; four standard errors are allowed.


def uniform_rates(
    n: int, target_fpr: float, guarantee: Guarantee, draws: int, seed: int
) -> np.typing.NDArray[np.float64]:
    """True false-alarm rates (draws,) of thresholds from n uniform scores each: P(U > t) = 1 − t."""
    rng = np.random.default_rng(seed)
    return np.array([1 - point(rng.random(n), target_fpr, guarantee).threshold for _ in range(draws)])


@pytest.mark.parametrize(("n", "target_fpr"), [(99, 0.01), (250, 0.05), (100, 0.29)])
def test_the_marginal_rate_is_at_most_the_target_on_average(n: int, target_fpr: float) -> None:
    rates = uniform_rates(n, target_fpr, "marginal", draws=4_000, seed=1)
    error = 4 * rates.std() / math.sqrt(len(rates))
    expected = rank(n, target_fpr, "marginal") / (n + 1)
    assert expected <= target_fpr
    assert abs(rates.mean() - expected) <= error
    assert (rates > target_fpr).mean() > 0.3, "the marginal guarantee holds on average, not for each calibration set"


@pytest.mark.parametrize(("n", "target_fpr"), [(299, 0.01), (500, 0.05), (300, 0.2)])
def test_the_confident_rate_exceeds_the_target_for_at_most_five_percent_of_calibration_sets(
    n: int, target_fpr: float
) -> None:
    draws = 4_000
    misses = (uniform_rates(n, target_fpr, "confident", draws, seed=2) > target_fpr).mean()
    expected = binomial_cdf(rank(n, target_fpr, "confident") - 1, n, target_fpr)
    assert 0.02 < expected <= 0.05, "the setting must be close to the limit of the guarantee"
    assert abs(misses - expected) <= 4 * math.sqrt(expected * (1 - expected) / draws)


@pytest.mark.parametrize("guarantee", GUARANTEES)
def test_both_guarantees_hold_for_heavily_tied_scores(guarantee: Guarantee) -> None:
    rng = np.random.default_rng(3)
    n, target_fpr, draws = 400, 0.05, 3_000
    thresholds = np.array(
        [point(rng.poisson(2.0, n).astype(float), target_fpr, guarantee).threshold for _ in range(draws)]
    )
    rates = stats.poisson.sf(thresholds, 2.0)
    assert len(np.unique(thresholds)) <= 4
    assert rates.mean() <= target_fpr
    if guarantee == "confident":
        assert (rates > target_fpr).mean() <= 0.05 + 4 * math.sqrt(0.05 * 0.95 / draws)


def test_the_guarantee_holds_with_ties_at_the_target_rate() -> None:
    rng = np.random.default_rng(4)
    n, target_fpr, draws = 400, 0.05, 4_000
    top = 0.0501
    uncertain = rng.random((draws, n)) < top
    rates = np.array([top if point(row.astype(float), target_fpr).threshold < 1 else 0.0 for row in uncertain])
    misses = (rates > target_fpr).mean()
    assert 0.01 < misses <= 0.05 + 4 * math.sqrt(0.05 * 0.95 / draws)


def test_the_rate_bound_is_exceeded_for_one_calibration_set_in_a_thousand() -> None:
    rng = np.random.default_rng(5)
    n, draws = 150, 20_000
    flag = point(rng.random(n), 0.05, "marginal")
    thresholds = np.partition(rng.random((draws, n)), n - flag.k, axis=1)[:, n - flag.k]
    exceeded = int((1 - thresholds > flag.rate_bound).sum())
    low, high = stats.binom.interval(0.999, draws, 0.001)
    assert low <= exceeded <= high
