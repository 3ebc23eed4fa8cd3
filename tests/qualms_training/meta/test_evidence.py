import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from qualms_training.meta.dirichlet import scores
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


def test_the_class_stays_what_it_was(
    evidence: DensityEvidence, probabilities: NDArray[np.float64], distances: NDArray[np.float64]
) -> None:
    z = evidence(torch.from_numpy(probabilities), torch.from_numpy(distances).float())
    np.testing.assert_array_equal(z.argmax(dim=1), probabilities.argmax(axis=1))


def test_evidence_falls_from_its_most_to_none_with_distance(evidence: DensityEvidence) -> None:
    opinion = torch.full((4, K), 1 / K, dtype=torch.float64)
    alpha = evidence(opinion, torch.tensor([0.0, 20.0, 40.0, 1e6])).exp()
    precision = alpha.sum(dim=1)
    assert precision[0] == pytest.approx(K + float(evidence.count))
    assert (precision.diff() < 0).all()
    assert precision[-1] == pytest.approx(K)
    epistemic = scores(alpha.log()).mutual_information
    assert (epistemic.diff() > 0).all()


def test_median_distance_leaves_half_of_the_evidence(evidence: DensityEvidence, distances: NDArray[np.float64]) -> None:
    opinion = torch.full((1, K), 1 / K, dtype=torch.float64)
    alpha = evidence(opinion, torch.tensor([np.median(distances)], dtype=torch.float32)).exp()
    assert float(alpha.sum()) - K == pytest.approx(float(evidence.count) / 2, rel=0.01)


def test_an_overconfident_classifier_gets_less_evidence(
    probabilities: NDArray[np.float64], distances: NDArray[np.float64]
) -> None:
    """Labels that are drawn at random for a tenth of the images make certainty a mistake."""
    labels, noise = labels_of(probabilities), np.random.default_rng(3)
    mistaken = np.where(noise.random(N) < 0.1, noise.integers(K, size=N), labels)
    counts = []
    for seen in (labels, mistaken):
        module = DensityEvidence(N)
        module.fit(probabilities, distances, seen)
        counts.append(float(module.count))
    assert counts[1] < counts[0] / 3
