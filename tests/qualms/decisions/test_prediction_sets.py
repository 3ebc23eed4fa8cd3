"""Prediction sets: scores, thresholds and sets against a straightforward implementation in exact arithmetic."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from qualms.bundle.manifest import SetMethod
from qualms.decisions.prediction_sets import SetPoint, choose_set_point, class_scores, label_scores
from qualms.errors import OperatingPointError

LAC = SetMethod()
RAPS = SetMethod(method="raps", penalty=0.02, free_ranks=2)
METHODS = [LAC, RAPS, SetMethod(method="raps", penalty=0), SetMethod(method="raps", penalty=1, free_ranks=1)]


def draw(seed: int, count: int, classes: int = 5) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Probabilities (N, K), some of which are equal, and labels that are drawn from them."""
    rng = np.random.default_rng(seed)
    evidence = rng.gamma(0.5, size=(count, classes)).round(2) + 0.01
    probabilities = (evidence / evidence.sum(axis=1, keepdims=True)).astype(np.float32)
    labels = (rng.random((count, 1)) > np.cumsum(probabilities, axis=1)).sum(axis=1).clip(max=classes - 1)
    return probabilities, labels


def expected_scores(probabilities: NDArray[np.float32], method: SetMethod) -> list[float]:
    """The scores of one image's classes, class by class."""
    if method.method == "lac":
        return [-float(probability) for probability in probabilities]
    ranking = sorted(range(len(probabilities)), key=lambda index: (-probabilities[index], index))
    scores = []
    for index in range(len(probabilities)):
        before = ranking[: ranking.index(index)]
        excess = max(0, len(before) + 1 - method.free_ranks)
        scores.append(math.fsum(float(probabilities[other]) for other in before) + method.penalty * excess)
    return scores


def expected_set(probabilities: NDArray[np.float32], threshold: float, method: SetMethod) -> list[int]:
    scores = np.array(expected_scores(probabilities, method), np.float32)
    members = [index for index, score in enumerate(scores) if score <= np.float32(threshold)]
    return sorted(members, key=lambda index: (-probabilities[index], index))


# Scores


@pytest.mark.parametrize("method", METHODS)
def test_scores_equal_those_of_the_definition(method: SetMethod) -> None:
    probabilities, labels = draw(0, 60)
    scores = class_scores(probabilities, method)
    assert scores.dtype == np.float32
    assert scores.shape == (60, 5)
    for row, image in enumerate(probabilities):
        np.testing.assert_allclose(scores[row], expected_scores(image, method), rtol=1e-6, atol=1e-7)
    assert label_scores(probabilities, labels, method).tolist() == [
        scores[row, label] for row, label in enumerate(labels)
    ]


@pytest.mark.parametrize("method", METHODS[1:])
def test_the_most_probable_class_has_the_raps_score_0(method: SetMethod) -> None:
    probabilities, _ = draw(1, 100)
    scores = class_scores(probabilities, method)
    assert (scores[np.arange(100), probabilities.argmax(axis=1)] == 0).all()
    assert (scores >= 0).all()


def test_the_raps_score_without_penalty_is_the_probability_of_more_probable_classes() -> None:
    scores = class_scores(np.array([[0.2, 0.5, 0.3]], np.float32), SetMethod(method="raps", penalty=0))
    np.testing.assert_allclose(scores, [[0.8, 0, 0.5]], rtol=1e-6)


def test_the_raps_penalty_is_added_for_every_rank_beyond_the_free_ones() -> None:
    method = SetMethod(method="raps", penalty=10, free_ranks=2)
    scores = class_scores(np.array([[0.4, 0.3, 0.2, 0.1]], np.float32), method)
    np.testing.assert_allclose(scores, [[0, 0.4, 10.7, 20.9]], rtol=1e-6)


# Thresholds


@pytest.mark.parametrize("coverage", ["0.5", "0.7", "0.9", "0.95", "0.99", "0.123", "0.001", "0.29"])
@pytest.mark.parametrize("n", [1, 9, 10, 19, 99, 100, 199, 1000])
def test_the_threshold_is_the_exact_finite_sample_quantile(coverage: str, n: int) -> None:
    scores = np.random.default_rng(n).permutation(n).astype(np.float32)
    rank = math.ceil(Fraction(coverage) * (n + 1))
    if rank > n:
        with pytest.raises(OperatingPointError):
            choose_set_point([scores], float(coverage), LAC)
    else:
        assert choose_set_point([scores], float(coverage), LAC).threshold == rank - 1


@pytest.mark.parametrize("coverage", ["0.5", "0.8", "0.9", "0.95", "0.99", "0.999", "0.9999"])
def test_a_coverage_is_refused_with_the_smallest_number_of_images_that_supports_it(coverage: str) -> None:
    needed = math.ceil(Fraction(coverage) / (1 - Fraction(coverage)))
    choose_set_point([np.zeros(needed, np.float32)], float(coverage), LAC)
    with pytest.raises(OperatingPointError) as caught:
        choose_set_point([np.zeros(needed - 1, np.float32)], float(coverage), LAC)
    assert str(caught.value) == (
        f"A coverage of {coverage} needs at least {needed:,} labelled calibration images; there are {needed - 1:,}."
    )
    assert caught.value.parameter == "coverage"


@pytest.mark.parametrize("coverage", [0.0, 1.0, -0.1, 1.5, math.nan, math.inf, -math.inf])
def test_a_coverage_that_is_not_between_0_and_1_is_refused(coverage: float) -> None:
    with pytest.raises(OperatingPointError) as caught:
        choose_set_point([np.zeros(100, np.float32)], coverage, LAC)
    assert str(caught.value) == f"The coverage must lie strictly between 0 and 1, not {coverage}."
    assert caught.value.parameter == "coverage"


def test_with_several_settings_the_threshold_is_the_largest() -> None:
    scores = [np.arange(99, dtype=np.float32) - shift for shift in (20, 0, 50)]
    assert choose_set_point(scores, 0.9, LAC).threshold == 89
    assert choose_set_point(scores[:1], 0.9, LAC).threshold == 69


# Sets


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("coverage", [0.3, 0.6, 0.9, 0.99])
def test_a_set_has_all_classes_up_to_the_threshold_most_probable_first(method: SetMethod, coverage: float) -> None:
    probabilities, labels = draw(2, 400)
    point = choose_set_point([label_scores(probabilities, labels, method)], coverage, method)
    new, _ = draw(3, 80)
    assert point.members(new) == [expected_set(image, point.threshold, method) for image in new]
    contained = point.contains(new)
    assert [np.flatnonzero(row).tolist() for row in contained] == [sorted(members) for members in point.members(new)]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("coverage", [0.5, 0.9, 0.95])
def test_the_set_of_a_calibration_image_has_its_true_class_at_least_as_often_as_the_coverage(
    method: SetMethod, coverage: float
) -> None:
    probabilities, labels = draw(4, 500)
    point = choose_set_point([label_scores(probabilities, labels, method)], coverage, method)
    assert point.contains(probabilities)[np.arange(500), labels].mean() >= coverage


def test_a_set_is_empty_if_no_class_is_as_probable_as_the_threshold() -> None:
    point = SetPoint(LAC, 0.5, -0.6)
    assert point.members(np.array([[0.5, 0.3, 0.2], [0.7, 0.2, 0.1]], np.float32)) == [[], [0]]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.floats(0.01, 0.97), st.sampled_from(METHODS[1:]))
def test_a_set_of_raps_is_never_empty(seed: int, coverage: float, method: SetMethod) -> None:
    probabilities, labels = draw(seed, 60)
    point = choose_set_point([label_scores(probabilities, labels, method)], coverage, method)
    assert all(point.members(draw(seed + 1, 40)[0]))


@pytest.mark.parametrize("method", METHODS)
def test_the_coverage_of_new_images_is_that_of_the_guarantee_on_average(method: SetMethod) -> None:
    population, labels = draw(5, 20_000)
    rng, rates = np.random.default_rng(6), []
    scores = label_scores(population, labels, method)
    for _ in range(300):
        point = choose_set_point([scores[rng.integers(0, 20_000, 60)]], 0.9, method)
        rates.append((scores <= np.float32(point.threshold)).mean())
    assert np.mean(rates) >= 0.9 - 4 * np.std(rates) / math.sqrt(300)
