"""Surprisal is −log p under the distribution of the fit images."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from qualms_training.errors import DataError
from qualms_training.meta.surprisal import MIN_TAIL, Surprisal


def fitted(scores: NDArray[np.float64]) -> Surprisal:
    surprisal = Surprisal(scores.shape[1], len(scores))
    surprisal.fit(scores)
    return surprisal


def test_surprisal_is_minus_log_p_for_any_distribution() -> None:
    normal = np.random.default_rng(0).normal(size=(2, 20_000, 3))
    fit, test = np.stack([normal[..., 0], np.exp(3 * normal[..., 1]), normal[..., 2] ** 3], axis=-1)
    surprisals = fitted(fit)(torch.from_numpy(test).float()).numpy()
    for level in (1 / 2, 1 / 8, 1 / 64, 1 / 512):
        beyond = (test >= np.quantile(fit, 1 - level, axis=0)).mean(axis=0)
        np.testing.assert_allclose((surprisals >= -np.log(level)).mean(axis=0), beyond, atol=2 / len(test))


def test_beyond_the_fit_images_surprisal_grows_as_for_an_exponential_tail() -> None:
    fit = np.random.default_rng(0).exponential(2.0, size=(50_000, 1))
    far = torch.tensor([[40.0], [80.0]])
    surprisals = fitted(fit)(far).squeeze(1)
    np.testing.assert_allclose(surprisals, far.squeeze(1) / 2, rtol=0.1)


def test_surprisal_is_monotone_in_the_score() -> None:
    surprisal = fitted(np.random.default_rng(0).gamma(0.3, size=(500, 1)))
    surprisals = surprisal(torch.linspace(-1, 50, 2000).unsqueeze(1)).squeeze(1)
    assert (surprisals.diff() >= 0).all()
    assert surprisals[0] == 0


def test_constant_fit_scores_give_surprisal_only_to_larger_scores() -> None:
    surprisal = fitted(np.zeros((100, 1)))
    surprisals = surprisal(torch.tensor([[-1.0], [0.0], [1.0]])).squeeze(1)
    assert torch.isfinite(surprisals).all()
    assert surprisals[0] == surprisals[1] == 0 < surprisals[2]


def test_the_error_for_too_few_images_states_the_number_needed() -> None:
    with pytest.raises(
        DataError, match=f"The fit split has 5 images; to combine scores it needs {2 * MIN_TAIL} or more"
    ):
        Surprisal(1, 5)
