import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from qualms_training.errors import DataError
from qualms_training.meta.surprisal import LEAST, Surprisal


def fitted(doubts: NDArray[np.float64]) -> Surprisal:
    surprise = Surprisal(doubts.shape[1], len(doubts))
    surprise.fit(doubts)
    return surprise


def test_it_is_the_logarithm_of_one_over_p_for_any_distribution() -> None:
    normal = np.random.default_rng(0).normal(size=(2, 20_000, 3))
    fit, test = np.stack([normal[..., 0], np.exp(3 * normal[..., 1]), normal[..., 2] ** 3], axis=-1)
    found = fitted(fit)(torch.from_numpy(test).float()).numpy()
    for level in (1 / 2, 1 / 8, 1 / 64, 1 / 512):
        beyond = (test >= np.quantile(fit, 1 - level, axis=0)).mean(axis=0)
        np.testing.assert_allclose((found >= -np.log(level)).mean(axis=0), beyond, atol=2 / len(test))


def test_beyond_all_that_was_seen_it_still_grows_as_an_exponential_tail() -> None:
    fit = np.random.default_rng(0).exponential(2.0, size=(50_000, 1))
    far = torch.tensor([[40.0], [80.0]])
    found = fitted(fit)(far).squeeze(1)
    np.testing.assert_allclose(found, far.squeeze(1) / 2, rtol=0.1)


def test_it_never_falls_as_doubt_grows() -> None:
    surprise = fitted(np.random.default_rng(0).gamma(0.3, size=(500, 1)))
    found = surprise(torch.linspace(-1, 50, 2000).unsqueeze(1)).squeeze(1)
    assert (found.diff() >= 0).all()
    assert found[0] == 0


def test_doubts_that_are_all_alike_surprise_only_where_they_differ() -> None:
    surprise = fitted(np.zeros((100, 1)))
    found = surprise(torch.tensor([[-1.0], [0.0], [1.0]])).squeeze(1)
    assert torch.isfinite(found).all()
    assert found[0] == found[1] == 0 < found[2]


def test_too_few_images_are_refused_with_the_number_needed() -> None:
    with pytest.raises(DataError, match=f"The fit split has 5 images; to combine scores it needs {2 * LEAST} or more"):
        Surprisal(1, 5)
