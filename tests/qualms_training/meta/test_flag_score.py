"""The flag score is the sum of a softmax term and of terms for abnormal evidence and distance."""

from pathlib import Path
from typing import Any

import mpmath
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.special import logsumexp, softmax
from scipy.stats import entropy

from qualms_training.errors import DataError
from qualms_training.fitting.feature_cache import Features
from qualms_training.meta.flag_score import (
    LOWEST,
    MIN_ENTROPY,
    MIN_IMAGES,
    ROWS,
    FlagScore,
    generalised_entropy,
    predicted,
)
from qualms_training.paper.inputs import BaseOutputs
from qualms_training.paper.methods.post_hoc.gen import GEN

K, WIDTHS = 5, (8, 12)


def by_table_method(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    """The generalised entropy as the method of the paper's tables computes it, (N,)."""
    outputs = BaseOutputs(Features([], logits.astype(np.float32), Path("nowhere")), np.zeros((len(logits), 1)))
    largest = max(10, -(-logits.shape[1] // 10))
    return GEN(largest=largest).score(outputs).scores["generalised_entropy"]


def sharp_logits(classes: int) -> NDArray[np.float64]:
    """Logits (N, K) from nearly uniform to extremely confident, exact in float32."""
    rng = np.random.default_rng(classes)
    rows = [scale * rng.normal(size=(20, classes)) for scale in (0.01, 1.0, 10.0, 100.0)]
    certain = np.zeros((3, classes))
    certain[:, 1] = 20.0, 200.0, 600.0
    return np.concatenate([*rows, certain]).astype(np.float32).astype(np.float64)


@pytest.mark.parametrize("classes", [2, 10, 100, 101, 1000])
def test_generalised_entropy_is_that_of_the_tables_over_a_tenth_of_the_classes(classes: int) -> None:
    logits = sharp_logits(classes)
    ours = generalised_entropy(predicted(torch.from_numpy(logits)))
    assert ours.shape == (len(logits), 1)
    np.testing.assert_allclose(ours.squeeze(1), by_table_method(logits), rtol=1e-9)


def test_generalised_entropy_of_extremely_confident_logits_agrees_with_mpmath() -> None:
    logits = np.array([[40.0, 0.0, -5.0], [200.0, 0.0, -5.0], [600.0, 0.0, -5.0]])
    ours = generalised_entropy(predicted(torch.from_numpy(logits))).squeeze(1)
    with mpmath.workdps(400):
        for row, value in zip(logits, ours.tolist(), strict=True):
            powers = [mpmath.exp(mpmath.mpf(float(z))) for z in row]
            p = [power / mpmath.fsum(powers) for power in powers]
            expected = mpmath.fsum((q * (1 - q)) ** mpmath.mpf("0.1") for q in p)
            assert value == pytest.approx(float(expected), rel=1e-9)


@pytest.mark.parametrize("gap", [1e-6, 1.0, 40.0, 700.0])
def test_the_predicted_error_keeps_its_digits_for_confident_logits(gap: float) -> None:
    prediction = predicted(torch.tensor([[0.0, gap, 0.0]], dtype=torch.float64))
    with mpmath.workdps(400):
        others = 2 * mpmath.exp(-mpmath.mpf(gap))
        assert prediction.error.item() == pytest.approx(float(others / (1 + others)), rel=1e-12)
    assert prediction.is_top.tolist() == [[False, True, False]]


def test_the_predicted_class_of_equal_logits_is_the_first() -> None:
    prediction = predicted(torch.tensor([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0]], dtype=torch.float64))
    assert prediction.is_top.tolist() == [[False, True, False], [True, False, False]]
    np.testing.assert_allclose(prediction.error.squeeze(1) + prediction.probabilities.amax(dim=1), 1)


class Images:
    """Outputs of the networks for n images, `shift` away from the training data."""

    def __init__(self, n: int, seed: int, shift: float = 0.0, half: bool = False) -> None:
        rng = np.random.default_rng(seed)
        centres = np.random.default_rng(0).normal(size=(K, sum(WIDTHS)))
        self.labels = rng.integers(K, size=n)
        points = 2 * centres[self.labels] + rng.normal(size=(n, sum(WIDTHS))) + shift
        self.logits = (points @ centres.T / 4).astype(np.float32)
        # The range of the meta-model's log α.
        self.log_alpha = (self.logits + rng.normal(size=(n, K))).clip(-10, 12).astype(np.float32)
        split = np.split(points.astype(np.float16 if half else np.float32), [WIDTHS[0]], axis=1)
        self.taps: list[NDArray[Any]] = split

    @property
    def arrays(self) -> tuple[NDArray[np.float32], NDArray[np.float32], list[NDArray[Any]]]:
        return self.logits, self.log_alpha, self.taps


def fitted(images: Images, *, distance: bool = True) -> FlagScore:
    flag_score = FlagScore(WIDTHS, K, len(images.labels), distance=distance)
    train = Images(1000, seed=9)
    flag_score.fit_density(train.taps, train.labels)
    flag_score.fit(*images.arrays)
    return flag_score


def run(flag_score: FlagScore, images: Images) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]:
    logits, log_alpha = (torch.from_numpy(values).double() for values in (images.logits, images.log_alpha))
    precision, taps = log_alpha.exp().sum(dim=1, keepdim=True), [torch.from_numpy(tap).float() for tap in images.taps]
    result: tuple[torch.Tensor | None, torch.Tensor, torch.Tensor] = flag_score(predicted(logits), precision, taps)
    return result


def standardised(fit: NDArray[np.float64], test: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray((test - fit.mean()) / fit.std())


def gated(fit: NDArray[np.float64], test: NDArray[np.float64]) -> NDArray[np.float64]:
    """0 up to one standard deviation above the mean; from there to five, the slope rises to 1 in five steps."""
    z = standardised(fit, test)
    return np.asarray(sum(np.maximum(z - gate, 0) for gate in (1, 2, 3, 4, 5)) / 5)


def log_entropy(images: Images) -> NDArray[np.float64]:
    values = entropy(softmax(images.logits.astype(np.float64), axis=1), axis=1)
    return np.asarray(np.log(np.maximum(values, MIN_ENTROPY)))


def log_generalised_entropy(images: Images) -> NDArray[np.float64]:
    return np.asarray(np.log(np.maximum(by_table_method(images.logits.astype(np.float64)), MIN_ENTROPY)))


def negated_log_precision(images: Images) -> NDArray[np.float64]:
    return np.asarray(-logsumexp(images.log_alpha.astype(np.float64), axis=1))


@pytest.mark.parametrize("shift", [0.0, 3.0, 1000.0])
def test_terms_are_in_standard_deviations_of_the_fit_images_and_sum_to_the_flag_score(shift: float) -> None:
    fit, test = Images(400, seed=1), Images(200, seed=2, shift=shift)
    flag_score = fitted(fit)
    assert flag_score.names == ["softmax", "evidence", "distance"]
    assert flag_score.density is not None
    distances = [
        flag_score.density([torch.from_numpy(tap) for tap in images.taps]).squeeze(1).double().numpy()
        for images in (fit, test)
    ]
    both = [standardised(score(fit), score(test)) for score in (log_entropy, log_generalised_entropy)]
    expected = np.column_stack(
        [
            np.maximum(np.mean(both, axis=0), -LOWEST),
            gated(negated_log_precision(fit), negated_log_precision(test)),
            gated(*distances),
        ]
    )
    distance, terms, total = run(flag_score, test)
    assert distance is not None
    np.testing.assert_allclose(distance.squeeze(1), distances[1], rtol=1e-6)
    np.testing.assert_allclose(terms, expected, rtol=1e-4, atol=1e-4)
    assert total.shape == (200, 1)
    torch.testing.assert_close(total.squeeze(1), terms.sum(dim=1))


def test_ordinary_evidence_and_distance_add_nothing() -> None:
    fit = Images(1000, seed=1)
    _, terms, _ = run(fitted(fit), fit)
    assert (terms[:, 1:] >= 0).all()
    evidence = negated_log_precision(fit)
    ordinary = standardised(evidence, evidence) <= 1
    assert 0.7 < ordinary.mean() < 1
    np.testing.assert_array_equal(terms[ordinary, 1], 0)
    assert (terms[~ordinary, 1] > 0).all()


def test_gated_terms_grow_with_the_slope_of_a_standard_deviation_far_away() -> None:
    flag_score = FlagScore(WIDTHS, K, 400, distance=False)
    rng = np.random.default_rng(0)
    scores = rng.normal(size=(400, 3)) * [1.0, 2.0, 0.5] + [0.0, -1.0, 7.0]
    flag_score.fit_scores(scores)
    deviation = scores[:, 2].std()
    far = np.array([[0.0, -1.0, 7.0 - steps * deviation] for steps in (50.0, 51.0)])
    terms = flag_score.terms(torch.from_numpy(far))
    assert float(terms[1, 1] - terms[0, 1]) == pytest.approx(1)
    assert float(terms[0, 0]) == pytest.approx(float(terms[1, 0]))


def test_certain_predictions_have_a_finite_flag_score() -> None:
    fit, certain = Images(400, seed=1), Images(3, seed=2)
    certain.logits[:] = 0.0
    certain.logits[:, 1] = 100.0, 1000.0, 1e30  # probabilities from 1e-44 to 0
    scores = fitted(fit).of_arrays(*certain.arrays)
    assert np.isfinite(scores).all()
    assert scores[2] <= scores[0]


@pytest.mark.parametrize("images", [5, MIN_IMAGES - 1])
def test_the_error_for_too_few_images_states_the_number_needed(images: int) -> None:
    with pytest.raises(
        DataError, match=f"The fit split has {images} images; the flag score needs {MIN_IMAGES} or more"
    ):
        FlagScore(WIDTHS, K, images)


def test_rounding_errors_of_nearly_constant_probabilities_are_not_amplified() -> None:
    fit = Images(400, seed=1)
    fit.logits *= np.float32(1e-9)  # of an untrained network; the entropies then differ in their last digits only
    flag_score = fitted(fit)
    scores = flag_score.of_arrays(*fit.arrays)
    noise = np.random.default_rng(0).normal(size=fit.logits.shape)
    fit.logits = (fit.logits * (1 + 1e-6 * noise)).astype(np.float32)
    np.testing.assert_allclose(flag_score.of_arrays(*fit.arrays), scores, atol=1e-6)


def test_without_distance_the_flag_score_has_two_terms() -> None:
    fit = Images(400, seed=1)
    with_distance, without = fitted(fit), fitted(fit, distance=False)
    assert without.density is None
    assert without.names == ["softmax", "evidence"]
    distance, terms, total = run(without, fit)
    assert distance is None
    torch.testing.assert_close(terms, run(with_distance, fit)[1][:, :2])
    torch.testing.assert_close(total, terms.sum(dim=1, keepdim=True))


@pytest.mark.parametrize("distance", [True, False])
def test_arrays_of_any_length_and_precision_give_the_flag_score_of_tensors(distance: bool) -> None:
    flag_score = fitted(Images(400, seed=1), distance=distance)
    many = Images(ROWS + 3, seed=2, half=True)  # more rows than one batch
    scores = flag_score.of_arrays(*many.arrays)
    assert scores.dtype == np.float64
    np.testing.assert_allclose(scores, run(flag_score, many)[2].squeeze(1), rtol=1e-6, atol=1e-5)


def test_the_flag_score_of_ood_images_exceeds_that_of_in_distribution_images() -> None:
    flag_score = fitted(Images(400, seed=1))
    known, ood = (flag_score.of_arrays(*Images(400, seed=3, shift=shift).arrays) for shift in (0.0, 4.0))
    assert np.median(ood) > np.quantile(known, 0.95)


def test_a_saved_state_gives_the_same_flag_score() -> None:
    saved, test = fitted(Images(400, seed=1)), Images(100, seed=2)
    loaded = FlagScore(WIDTHS, K, 400)
    loaded.load_state_dict(saved.state_dict())
    np.testing.assert_array_equal(loaded.of_arrays(*test.arrays), saved.of_arrays(*test.arrays))
