"""The joined α has the classifier's calibrated probabilities as its mean, and evidence that falls with the flag score."""

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.special import log_softmax, softmax

from qualms_training.meta.joined_alpha import EVIDENCE_PER_CLASS, MIN_EVIDENCE, TEMPERATURES, JoinedAlpha, temperature
from qualms_training.reporting.evaluation import calibration_error, negative_log_likelihood

FIT = 2000
CLASS_COUNTS = (2, 10, 100, 1000)


def draw_labels(rng: np.random.Generator, probabilities: NDArray[np.float64]) -> NDArray[np.int64]:
    """Labels (N,) drawn from probabilities (N, K)."""
    return np.asarray((probabilities.cumsum(axis=1) < rng.random((len(probabilities), 1))).sum(axis=1)).clip(
        max=probabilities.shape[1] - 1
    )


class Draws:
    """N in-distribution images of a classifier whose softmax is calibrated at temperature `sharpness`."""

    def __init__(self, n: int, classes: int, seed: int, sharpness: float = 2.0) -> None:
        rng = np.random.default_rng(seed)
        true = 3 * rng.normal(size=(n, classes))
        self.labels = draw_labels(rng, softmax(true, axis=1))
        self.logits = (sharpness * true).astype(np.float32)
        self.flag_scores = rng.gamma(3.0, size=n)

    def joined(self, module: JoinedAlpha) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """α (N, K) and α_0 (N,)."""
        alpha, total = module(torch.from_numpy(self.logits).double(), torch.from_numpy(self.flag_scores).unsqueeze(1))
        return alpha.numpy(), total.squeeze(1).numpy()


def fitted(classes: int, sharpness: float = 2.0) -> JoinedAlpha:
    module, images = JoinedAlpha(classes, FIT), Draws(FIT, classes, seed=0, sharpness=sharpness)
    module.fit(images.logits, images.labels, images.flag_scores)
    return module


@pytest.mark.parametrize("classes", CLASS_COUNTS)
def test_alpha_is_one_plus_evidence_times_the_tempered_softmax(classes: int) -> None:
    module, images = fitted(classes), Draws(200, classes, seed=1)
    alpha, total = images.joined(module)
    scaled = images.logits.astype(np.float64) * float(module.inverse_temperature)
    evidence = total - classes
    np.testing.assert_allclose(alpha, 1 + evidence[:, None] * softmax(scaled, axis=1), rtol=1e-12)
    np.testing.assert_allclose(alpha.sum(axis=1), total, rtol=1e-12)


def test_evidence_halves_from_each_quantile_of_the_flag_score_to_the_next() -> None:
    classes, known = 10, Draws(FIT, 10, seed=0).flag_scores
    for halvings in range(7):  # with 2000 images, the last quantile has 2000 / 2**6 images beyond it
        score = torch.tensor([[np.quantile(known, 1 - 0.5**halvings)]], dtype=torch.float64)
        _, total = fitted(classes)(torch.zeros(1, classes, dtype=torch.float64), score)
        expected = EVIDENCE_PER_CLASS * classes * 0.5**halvings + MIN_EVIDENCE
        assert float(total) - classes == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("classes", CLASS_COUNTS)
def test_evidence_decreases_with_the_flag_score_and_stays_above_its_lower_limit(classes: int) -> None:
    module = fitted(classes)
    scores = torch.linspace(-1, 60, 2000, dtype=torch.float64).unsqueeze(1)
    far = torch.tensor([[1e3], [1e9]], dtype=torch.float64)
    _, total = module(torch.zeros(2002, classes, dtype=torch.float64), torch.cat([scores, far]))
    evidence = total.squeeze(1) - classes
    assert (evidence[:1200].diff() < 0).all()
    assert (evidence.diff() <= 0).all()
    assert evidence[0] <= 2 * EVIDENCE_PER_CLASS * classes + MIN_EVIDENCE  # below the smallest score by at most log 2
    np.testing.assert_allclose(evidence[-2:], MIN_EVIDENCE, rtol=1e-9)


@pytest.mark.parametrize("near_tie", [False, True])
@pytest.mark.parametrize("added", [0.0, 10.0, 1e4], ids=["in distribution", "OOD", "far OOD"])
def test_the_largest_alpha_in_float32_is_the_predicted_class(added: float, near_tie: bool) -> None:
    classes, n = 10, 100_000
    module, images = fitted(classes), Draws(n, classes, seed=2)
    images.flag_scores += added
    if near_tie:  # the second largest logit is 1e-4 below the largest
        order = np.argsort(images.logits, axis=1)
        rows = np.arange(n)
        images.logits[rows, order[:, -2]] = images.logits[rows, order[:, -1]] - np.float32(1e-4)
    alpha, _ = images.joined(module)
    np.testing.assert_array_equal(alpha.astype(np.float32).argmax(axis=1), images.logits.argmax(axis=1))


def test_precision_has_few_ties_in_float32() -> None:
    for classes in (2, 10, 100):
        _, total = Draws(10_000, classes, seed=3).joined(fitted(classes))
        assert 10_000 - len(np.unique(total.astype(np.float32))) <= 10


@pytest.mark.parametrize("sharpness", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("classes", [2, 10, 100])
def test_the_mean_of_alpha_is_as_calibrated_as_the_tempered_softmax(classes: int, sharpness: float) -> None:
    module, images = fitted(classes, sharpness), Draws(10_000, classes, seed=4, sharpness=sharpness)
    alpha, total = images.joined(module)
    mean = alpha / total[:, None]
    tempered = softmax(images.logits.astype(np.float64) * float(module.inverse_temperature), axis=1)
    ece, nll = (function(tempered, images.labels) for function in (calibration_error, negative_log_likelihood))
    assert calibration_error(mean, images.labels) <= ece + 0.1
    assert negative_log_likelihood(mean, images.labels) <= nll + 0.0015


@pytest.mark.parametrize("classes", CLASS_COUNTS)
def test_the_shrinkage_of_alpha_costs_no_more_than_its_bound(classes: int) -> None:
    """Compared with p, α / α_0 adds log((K + n) / (1/p + n)) to −log of the true class's probability."""
    module, images = fitted(classes), Draws(5000, classes, seed=5)
    alpha, total = images.joined(module)
    p = softmax(images.logits.astype(np.float64) * float(module.inverse_temperature), axis=1)
    chosen = np.arange(len(p)), images.labels
    ratio = 1 / EVIDENCE_PER_CLASS
    bound = ratio * math.log(1 + 1 / ratio)
    assert bound < 0.001
    assert (np.log(p[chosen]) - np.log(alpha[chosen] / total)).mean() <= bound + ratio
    # The cost is largest for certain and correct predictions. Between the quantiles of the fit images the evidence is
    # interpolated, which adds a little.
    evidence = total - classes
    assert np.log((classes + evidence) / (1 + evidence)).mean() <= 1.2 * (bound + ratio)


def nll_at(logits: NDArray[np.float32], labels: NDArray[np.int64], t: float) -> float:
    scaled = log_softmax(logits.astype(np.float64) / t, axis=1)
    return -float(scaled[np.arange(len(labels)), labels].mean())


@pytest.mark.parametrize("sharpness", [0.2, 1.0, 5.0])
def test_the_temperature_minimises_the_negative_log_likelihood(sharpness: float) -> None:
    images = Draws(2000, 10, seed=6, sharpness=sharpness)
    best = temperature(images.logits, images.labels)
    grid = np.geomspace(*TEMPERATURES, 301)
    losses = [nll_at(images.logits, images.labels, t) for t in grid]
    assert nll_at(images.logits, images.labels, best) <= min(losses) + 1e-9
    assert best == pytest.approx(grid[int(np.argmin(losses))], rel=0.03)
    assert best == pytest.approx(sharpness, rel=0.1)


def test_the_temperature_of_a_classifier_without_errors_stays_in_its_range() -> None:
    logits = np.eye(3, dtype=np.float32)[np.arange(300) % 3]
    lowest, _ = TEMPERATURES
    assert lowest <= temperature(logits, np.arange(300) % 3) < 1.1 * lowest


def test_a_saved_state_gives_the_same_alpha() -> None:
    saved, images = fitted(10), Draws(50, 10, seed=7)
    loaded = JoinedAlpha(10, FIT)
    loaded.load_state_dict(saved.state_dict())
    for ours, theirs in zip(images.joined(loaded), images.joined(saved), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_rounding_errors_of_constant_flag_scores_do_not_change_the_evidence() -> None:
    module, images, rng = JoinedAlpha(10, FIT), Draws(FIT, 10, seed=0), np.random.default_rng(0)
    images.flag_scores = 1e-9 * rng.normal(size=FIT)
    module.fit(images.logits, images.labels, images.flag_scores)
    before = images.joined(module)[1]
    images.flag_scores = 1e-9 * rng.normal(size=FIT)
    np.testing.assert_allclose(images.joined(module)[1], before, rtol=1e-6)
