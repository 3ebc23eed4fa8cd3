"""LULA does not change the logits, and its Kronecker posterior equals a dense inverse."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from qualms_training.paper.inputs import LabelledOutputs, PostHocInputs
from qualms_training.paper.methods.trained_heads.lula import LULA, KroneckerPosterior

DrawOutputs = Callable[..., LabelledOutputs]
MakePostHocInputs = Callable[..., PostHocInputs]


def test_kronecker_posterior_equals_the_dense_inverse() -> None:
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(50, 3))
    p = rng.dirichlet(np.ones(4), size=50)
    posterior = KroneckerPosterior.fit(torch.from_numpy(inputs), torch.from_numpy(p), prior=2.5)
    g = np.mean([np.diag(row) - np.outer(row, row) for row in p], axis=0)
    a = np.mean([np.outer(row, row) for row in inputs], axis=0)
    dense = np.linalg.inv(50 * np.kron(g, a) + 2.5 * np.eye(12))
    vectors = np.kron(posterior.output_vectors.numpy(), posterior.input_vectors.numpy())
    ours = vectors @ np.diag(1 / posterior.precision.numpy().ravel()) @ vectors.T
    np.testing.assert_allclose(ours, dense, atol=1e-10)
    drawn = posterior.samples(40_000, torch.Generator().manual_seed(0)).reshape(40_000, 12).numpy()
    np.testing.assert_allclose(np.cov(drawn.T), dense, atol=0.02)


def test_extra_units_do_not_change_the_logits(
    make_post_hoc_inputs: MakePostHocInputs, draw_outputs: DrawOutputs
) -> None:
    method, outputs = LULA(units=8, epochs=1), draw_outputs(40, seed=3).outputs
    assert method.fit(make_post_hoc_inputs()) == 13 * 8 + 20 * 4 * (12 + 8 + 1)
    logits = method.features(torch.from_numpy(outputs.penultimate).double()) @ method.mean.T
    np.testing.assert_allclose(logits.numpy(), outputs.logits, atol=1e-5)


def test_training_the_units_increases_the_entropy_gap_between_ood_and_in_distribution_data(
    make_post_hoc_inputs: MakePostHocInputs, draw_outputs: DrawOutputs
) -> None:
    near, far = draw_outputs(300, seed=3).outputs, draw_outputs(300, seed=4, shift=3.0).outputs

    def gap(epochs: int) -> float:
        method = LULA(units=16, epochs=epochs, lr=0.02)
        method.fit(make_post_hoc_inputs())
        return float(method.score(far).scores["entropy"].mean() - method.score(near).scores["entropy"].mean())

    assert gap(epochs=20) > gap(epochs=0) + 0.05


@pytest.mark.parametrize("seed", [0, 1])
def test_the_same_seed_gives_the_same_scores(
    make_post_hoc_inputs: MakePostHocInputs, draw_outputs: DrawOutputs, seed: int
) -> None:
    outputs = draw_outputs(30, seed=3).outputs
    scores = []
    for _ in range(2):
        method = LULA(units=8, epochs=1)
        method.fit(make_post_hoc_inputs(seed=seed))
        scores.append(method.score(outputs).scores["max_probability"])
    np.testing.assert_array_equal(scores[0], scores[1])
