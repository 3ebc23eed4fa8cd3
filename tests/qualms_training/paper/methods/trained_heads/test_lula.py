"""LULA changes no mean prediction, and its posterior is the dense one, inverted by brute force."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from qualms_training.paper.material import Frozen, Known
from qualms_training.paper.methods.trained_heads.lula import LULA, KroneckerPosterior

Draw = Callable[..., Known]
Freeze = Callable[..., Frozen]


def test_the_kronecker_posterior_is_the_dense_inverse() -> None:
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


def test_extra_units_change_no_logit(freeze: Freeze, draw: Draw) -> None:
    method, view = LULA(units=8, epochs=1), draw(40, seed=3).view
    assert method.fit(freeze()) == 13 * 8 + 20 * 4 * (12 + 8 + 1)
    logits = method.features(torch.from_numpy(view.penultimate).double()) @ method.mean.T
    np.testing.assert_allclose(logits.numpy(), view.logits, atol=1e-5)


def test_training_the_units_parts_strangers_from_the_data(freeze: Freeze, draw: Draw) -> None:
    near, far = draw(300, seed=3).view, draw(300, seed=4, shift=3.0).view

    def gap(epochs: int) -> float:
        method = LULA(units=16, epochs=epochs, lr=0.02)
        method.fit(freeze())
        return float(method.score(far).scores["entropy"].mean() - method.score(near).scores["entropy"].mean())

    assert gap(epochs=20) > gap(epochs=0) + 0.05


@pytest.mark.parametrize("seed", [0, 1])
def test_a_seed_repeats_itself(freeze: Freeze, draw: Draw, seed: int) -> None:
    view = draw(30, seed=3).view
    found = []
    for _ in range(2):
        method = LULA(units=8, epochs=1)
        method.fit(freeze(seed=seed))
        found.append(method.score(view).scores["max_probability"])
    np.testing.assert_array_equal(found[0], found[1])
