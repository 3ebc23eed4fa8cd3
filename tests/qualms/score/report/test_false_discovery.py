"""Benjamini–Hochberg on conformal p-values: the threshold, its sentence, and the rate by simulation."""

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from qualms.decisions.flag import p_values as conformal
from qualms.errors import OperatingPointError
from qualms.score.report.false_discovery import choose_from_counts, choose_rejections
from qualms.score.report.p_value_counts import PValueCounts


def plain_benjamini_hochberg(p_values: NDArray[np.float64], target: float) -> NDArray[np.bool_]:
    """The definition of the procedure, with sorted p-values."""
    ascending, m = np.sort(p_values), len(p_values)
    passing = [p for i, p in enumerate(ascending, 1) if p <= target * i / m + 1e-12]
    return p_values <= (max(passing) if passing else 0.0)


@pytest.mark.parametrize("n", [3, 99, 1000])
@pytest.mark.parametrize("target", [0.01, 0.1, 0.5])
def test_flags_are_those_of_the_definition_also_with_ties(n: int, target: float) -> None:
    random = np.random.default_rng(n)
    for m in (1, 7, 500):
        calibration = np.sort(random.normal(size=n).round(2))
        scores = np.concatenate([random.normal(size=m), random.normal(4, 1, size=m // 5)]).round(2)
        p = conformal(scores, calibration)
        result = choose_rejections(p, target, n)
        expected = plain_benjamini_hochberg(p, target)
        assert (result.flags(p) == expected).all()
        assert result.rejected == expected.sum()


def test_equal_p_values_are_flagged_together_or_not_at_all() -> None:
    p = np.array([0.01, 0.04, 0.04, 0.04, 0.9])
    assert choose_rejections(p, 0.05, 99).rejected == 4
    assert choose_rejections(p[:3].repeat([1, 1, 8]), 0.05, 99).flags(p).tolist() == [True, True, True, True, False]


def test_a_p_value_exactly_at_its_limit_is_flagged() -> None:
    for m in range(1, 60):
        for flagged in range(1, m + 1):
            p = np.where(np.arange(m) < flagged, 0.29 * flagged / m, 1.0)
            assert choose_rejections(p, 0.29, 10**6).rejected == flagged


def test_p_values_may_be_counted_in_parts() -> None:
    random = np.random.default_rng(0)
    p = random.integers(1, 101, size=200_000) / 100
    p[:5000] = 0.01
    counts = PValueCounts()
    for part in np.split(p, 100):
        counts.add(part)
    assert counts.total == 200_000
    assert len(counts.values) == 100
    assert choose_from_counts(counts, 0.4, 99) == choose_rejections(p, 0.4, 99)


@pytest.mark.parametrize("target", [0.0, 1.0, -0.1, 1.5, math.nan])
def test_a_target_outside_0_and_1_is_refused(target: float) -> None:
    with pytest.raises(OperatingPointError, match="false discovery rate must lie strictly between 0 and 1, not"):
        choose_rejections(np.array([0.5]), target, 99)


@pytest.mark.parametrize("value", [0.0, 1.01, math.nan])
def test_values_that_are_no_p_values_are_refused(value: float) -> None:
    with pytest.raises(ValueError, match="must be above 0 and at most 1"):
        choose_rejections(np.array([0.5, value]), 0.1, 99)


def test_no_images_means_no_flags() -> None:
    result = choose_rejections(np.array([]), 0.1, 99)
    assert (result.rejected, result.threshold) == (0, 0.0)
    assert result.sentence == "No image has a p-value, so none is flagged at a false discovery rate of 10 %."


def test_a_calibration_set_that_can_never_flag_is_named_with_the_number_needed() -> None:
    result = choose_rejections(np.full(50, 1 / 9), 0.1, 8)
    assert (result.possible, result.rejected) == (False, 0)
    assert "1/9, is above 0.1" in result.sentence
    assert (
        "At least 9 calibration images are needed, and 499 to flag a single one of these 50 images." in result.sentence
    )
    assert choose_rejections(np.full(50, 1 / 10), 0.1, 9).rejected == 50
    assert choose_rejections(np.where(np.arange(50) == 0, 1 / 500, 1.0), 0.1, 499).rejected == 1
    assert choose_rejections(np.where(np.arange(50) == 0, 1 / 499, 1.0), 0.1, 498).rejected == 0


def test_a_calibration_set_too_small_for_so_few_ood_images_is_named_with_the_number_needed() -> None:
    p = np.where(np.arange(10_000) < 19, 1 / 5001, 1.0)
    result = choose_rejections(p, 0.1, 5000)
    assert (result.possible, result.fewest, result.at_smallest, result.rejected) == (True, 20, 19, 0)
    assert (
        "fewer than 20 of 10,000 images cannot be flagged, and 19 have the smallest possible p-value, 1/5,001."
        in result.sentence
    )
    assert "To flag 19 of so many, 5,263 calibration images are needed." in result.sentence
    assert choose_rejections(np.where(p < 1, 1 / 5264, 1.0), 0.1, 5263).rejected == 19
    assert choose_rejections(np.where(np.arange(10_000) < 20, 1 / 5001, 1.0), 0.1, 5000).rejected == 20


def test_a_calibration_set_that_is_large_enough_is_not_blamed() -> None:
    sentence = choose_rejections(np.full(55, 0.5), 0.1, 5000).sentence
    assert sentence.endswith(
        "no p-value is small enough among those of 55 images; a single image is flagged if it has at most 0.00182."
    )


def test_the_sentence_says_that_the_control_is_on_average_over_calibration_sets() -> None:
    sentence = choose_rejections(np.array([0.001, 0.5]), 0.1, 999).sentence
    assert sentence.startswith("1 image of 2 flagged (p ≤ 0.001)")
    assert "at most 10 % of the flagged images are in-distribution, on average over calibration sets" in sentence


@pytest.mark.slow
def test_ten_million_p_values_are_handled() -> None:
    p = np.random.default_rng(0).integers(1, 5002, size=10**7) / 5001
    p[: 10**6] = 1 / 5001
    assert choose_rejections(p, 0.1, 5000).rejected >= 10**6


def false_and_true_shares(
    random: np.random.Generator, calibration: NDArray[np.float64], target: float, images: int = 1000
) -> tuple[float, float]:
    """False share among the flagged (0 if none is), and share of the OOD images that are flagged; 10 % are OOD."""
    is_ood = np.arange(images) < images // 10
    scores = random.normal(size=images) + np.where(is_ood, 3.5, 0.0)
    p = conformal(scores, np.sort(calibration))
    flags = choose_rejections(p, target, len(calibration)).flags(p)
    return float((flags & ~is_ood).sum() / max(flags.sum(), 1)), float(flags[is_ood].mean())


@pytest.mark.parametrize("target", [0.05, 0.1, 0.2])
def test_the_mean_false_share_is_at_most_the_target_when_calibration_sets_are_redrawn(target: float) -> None:
    random = np.random.default_rng(18)
    shares = [false_and_true_shares(random, random.normal(size=1000), target) for _ in range(200)]
    false, true = np.mean(shares, axis=0)
    assert false <= target
    assert false > 0.6 * target  # the exact expectation is 0.9·target: the procedure is not needlessly strict
    assert true > 0.5


def test_without_control_a_fixed_false_alarm_rate_gives_more_false_flags() -> None:
    """The reason for the option: 5 % false alarms among 1 % OOD images are mostly false."""
    random = np.random.default_rng(0)
    p = conformal(
        np.concatenate([random.normal(size=990), random.normal(5, 1, size=10)]), np.sort(random.normal(size=5000))
    )
    naive, controlled = p <= 0.05, choose_rejections(p, 0.2, 5000).flags(p)
    assert naive[:990].sum() > 0.5 * naive.sum()
    assert controlled[:990].sum() < 0.5 * controlled.sum()
