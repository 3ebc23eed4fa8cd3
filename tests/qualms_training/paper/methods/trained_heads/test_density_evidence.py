"""Evidence from density falls with the distance from the training data and keeps the predicted class."""

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray
from sklearn.metrics import roc_auc_score

from qualms_training.paper.inputs import LabelledOutputs, PostHocInputs
from qualms_training.paper.methods.trained_heads.density_evidence import COUNTS, DensityEvidence, best_count

DrawOutputs = Callable[..., LabelledOutputs]
MakePostHocInputs = Callable[..., PostHocInputs]
N, K = 4000, 5


@pytest.fixture
def by_density(make_post_hoc_inputs: MakePostHocInputs) -> DensityEvidence:
    method = DensityEvidence()
    method.fit(make_post_hoc_inputs())
    return method


def test_the_predicted_class_does_not_change(by_density: DensityEvidence, draw_outputs: DrawOutputs) -> None:
    outputs = draw_outputs(60, seed=5).outputs
    np.testing.assert_array_equal(by_density.score(outputs).predictions, outputs.predictions)


def test_evidence_decreases_with_the_distance_from_the_data(
    by_density: DensityEvidence, draw_outputs: DrawOutputs
) -> None:
    known, ood = (by_density.score(draw_outputs(400, seed=3, shift=shift).outputs).scores for shift in (0.0, 4.0))
    assert set(known) == {"entropy", "mutual_information", "differential_entropy", "precision", "max_probability"}
    assert np.median(ood["precision"]) > np.median(known["precision"])  # negated: larger is less evidence
    both = np.concatenate([known["mutual_information"], ood["mutual_information"]])
    assert roc_auc_score(np.arange(800) >= 400, both) > 0.9


def test_no_noisy_copies_are_used(by_density: DensityEvidence, make_post_hoc_inputs: MakePostHocInputs) -> None:
    assert by_density.seen_noise(make_post_hoc_inputs().recipe, "mutual_information") == []


def test_fit_returns_how_many_numbers_are_stored(make_post_hoc_inputs: MakePostHocInputs) -> None:
    inputs = make_post_hoc_inputs()
    assert DensityEvidence().fit(inputs) > sum(tap.shape[1] ** 2 for tap in inputs.train.outputs.features.taps)


def labels_of(probabilities: NDArray[np.float64]) -> NDArray[np.int64]:
    drawn = np.random.default_rng(2).random(len(probabilities))
    return np.asarray((probabilities.cumsum(axis=1) < drawn[:, None]).sum(axis=1))


def test_the_count_maximises_the_likelihood_of_the_labels() -> None:
    """Random labels for a tenth of the images make a certain classifier overconfident, so it gets less evidence."""
    rng = np.random.default_rng(0)
    probabilities, shares = rng.dirichlet(np.full(K, 0.2), size=N), rng.random(N)
    labels = labels_of(probabilities)
    noisy = np.where(rng.random(N) < 0.1, rng.integers(K, size=N), labels)
    chosen = []
    for given in (labels, noisy):

        def likelihood(count: float, given: NDArray[np.int64] = given) -> float:
            alpha = 1 + count * shares[:, None] * probabilities
            return float(np.log(alpha[np.arange(N), given] / alpha.sum(axis=1)).mean())

        count = best_count(probabilities, shares, given)
        assert likelihood(count) == pytest.approx(max(likelihood(value) for value in COUNTS))
        chosen.append(count)
    assert chosen[1] < chosen[0] / 3
