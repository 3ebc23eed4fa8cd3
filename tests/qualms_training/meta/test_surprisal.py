"""Surprisal is −log p under the distribution of the fit images."""

import math

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


def one_column(surprisal: Surprisal, scores: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(surprisal(torch.from_numpy(scores[:, None])).squeeze(1))


def test_surprisal_is_minus_log_p_for_any_distribution() -> None:
    normal = np.random.default_rng(0).normal(size=(2, 20_000, 3))
    fit, test = np.stack([normal[..., 0], np.exp(3 * normal[..., 1]), normal[..., 2] ** 3], axis=-1)
    surprisals = fitted(fit)(torch.from_numpy(test)).numpy()
    for level in (1 / 2, 1 / 8, 1 / 64, 1 / 512):
        beyond = (test >= np.quantile(fit, 1 - level, axis=0)).mean(axis=0)
        np.testing.assert_allclose((surprisals >= -np.log(level)).mean(axis=0), beyond, atol=2 / len(test))


def test_beyond_the_fit_images_surprisal_grows_as_for_an_exponential_tail() -> None:
    fit = np.random.default_rng(0).exponential(2.0, size=(50_000, 1))
    far = np.array([40.0, 80.0, 4000.0])
    np.testing.assert_allclose(one_column(fitted(fit), far), far / 2, rtol=0.1)


def test_surprisal_rises_with_the_score_from_below_the_smallest_to_far_beyond_the_largest() -> None:
    fit = np.random.default_rng(0).gamma(0.3, size=(500, 1))
    first_width = np.median(fit) - fit.min()
    scores = np.linspace(fit.min() - 0.99 * first_width, 50, 2000)
    assert (np.diff(one_column(fitted(fit), scores)) > 0).all()


def test_scores_below_the_smallest_differ_but_take_at_most_0_7_nats_off() -> None:
    fit = np.random.default_rng(0).normal(size=(1000, 1))
    surprisal, smallest = fitted(fit), fit.min()
    assert one_column(surprisal, np.array([smallest])) == pytest.approx(0, abs=1e-12)
    below = one_column(surprisal, smallest - np.array([0.01, 0.02, 0.1]))
    assert (below < 0).all()
    assert (np.diff(below) < 0).all()
    far_below = one_column(surprisal, np.array([-10.0, -1e6]))
    np.testing.assert_allclose(far_below, -math.log(2))


def test_scores_do_not_affect_each_other() -> None:
    rng = np.random.default_rng(0)
    fit, test = rng.gamma([1.0, 5.0, 0.3], size=(300, 3)), rng.gamma([1.0, 5.0, 0.3], size=(50, 3)) * 2
    together = fitted(fit)(torch.from_numpy(test)).numpy()
    for index in range(3):
        alone = one_column(fitted(fit[:, [index]]), test[:, index])
        np.testing.assert_allclose(together[:, index], alone, atol=1e-9)


def test_minus_is_a_constant_minus_the_surprisals() -> None:
    rng = np.random.default_rng(0)
    surprisal, scores = fitted(rng.gamma(1.0, size=(300, 2))), torch.from_numpy(rng.gamma(2.0, size=(50, 2)))
    torch.testing.assert_close(surprisal.minus(scores, 11.5), 11.5 - surprisal(scores))


def test_constant_fit_scores_give_surprisal_only_to_larger_scores() -> None:
    surprisals = one_column(fitted(np.zeros((100, 1))), np.array([-1.0, 0.0, 1.0]))
    assert np.isfinite(surprisals).all()
    assert surprisals[0] == surprisals[1] == 0 < surprisals[2]


def test_a_saved_state_gives_the_same_surprisals() -> None:
    rng = np.random.default_rng(0)
    saved, scores = fitted(rng.gamma(1.0, size=(300, 2))), torch.from_numpy(rng.gamma(2.0, size=(50, 2)))
    loaded = Surprisal(2, 300)
    loaded.load_state_dict(saved.state_dict())
    torch.testing.assert_close(loaded(scores), saved(scores), rtol=0, atol=0)


def test_the_error_for_too_few_images_states_the_number_needed() -> None:
    with pytest.raises(
        DataError, match=f"The fit split has 5 images; to combine scores it needs {2 * MIN_TAIL} or more"
    ):
        Surprisal(1, 5)
