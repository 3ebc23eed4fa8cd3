"""Evidence from density falls with the distance from the training data and keeps the predicted class."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from qualms_training.meta.dirichlet import dirichlet_scores
from qualms_training.meta.evidence import DensityEvidence

N, K = 4000, 5


@pytest.fixture(scope="module")
def probabilities() -> NDArray[np.float64]:
    return np.random.default_rng(0).dirichlet(np.full(K, 0.2), size=N)


@pytest.fixture(scope="module")
def distances() -> NDArray[np.float64]:
    return np.random.default_rng(1).chisquare(20, size=N)


def labels_of(probabilities: NDArray[np.float64], seed: int = 2) -> NDArray[np.int64]:
    drawn = np.random.default_rng(seed).random(len(probabilities))
    return np.asarray((probabilities.cumsum(axis=1) < drawn[:, None]).sum(axis=1))


@pytest.fixture(scope="module")
def evidence(probabilities: NDArray[np.float64], distances: NDArray[np.float64]) -> DensityEvidence:
    module = DensityEvidence(N)
    module.fit(probabilities, distances, labels_of(probabilities))
    return module


def test_the_predicted_class_does_not_change(
    evidence: DensityEvidence, probabilities: NDArray[np.float64], distances: NDArray[np.float64]
) -> None:
    z = evidence(torch.from_numpy(probabilities), torch.from_numpy(distances).float())
    np.testing.assert_array_equal(z.argmax(dim=1), probabilities.argmax(axis=1))


def test_evidence_falls_with_distance_from_its_maximum_to_zero(evidence: DensityEvidence) -> None:
    uniform = torch.full((4, K), 1 / K, dtype=torch.float64)
    alpha = evidence(uniform, torch.tensor([0.0, 20.0, 40.0, 1e6])).exp()
    precision = alpha.sum(dim=1)
    assert precision[0] == pytest.approx(K + float(evidence.count))
    assert (precision.diff() < 0).all()
    assert precision[-1] == pytest.approx(K)
    epistemic = dirichlet_scores(alpha.log()).mutual_information
    assert (epistemic.diff() > 0).all()


def test_the_median_distance_leaves_half_of_the_evidence(
    evidence: DensityEvidence, distances: NDArray[np.float64]
) -> None:
    uniform = torch.full((1, K), 1 / K, dtype=torch.float64)
    alpha = evidence(uniform, torch.tensor([np.median(distances)], dtype=torch.float32)).exp()
    assert float(alpha.sum()) - K == pytest.approx(float(evidence.count) / 2, rel=0.01)


def test_an_overconfident_classifier_gets_less_evidence(
    probabilities: NDArray[np.float64], distances: NDArray[np.float64]
) -> None:
    """Random labels for a tenth of the images make a certain classifier overconfident."""
    labels, rng = labels_of(probabilities), np.random.default_rng(3)
    noisy = np.where(rng.random(N) < 0.1, rng.integers(K, size=N), labels)
    counts = []
    for given in (labels, noisy):
        module = DensityEvidence(N)
        module.fit(probabilities, distances, given)
        counts.append(float(module.count))
    assert counts[1] < counts[0] / 3
