"""Be-Bayesian's loss is least at the closed-form optimum, and its scores are those of the network's Dirichlet."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy.special import digamma
from scipy.stats import dirichlet

from qualms_training.paper.material import Pictures
from qualms_training.paper.methods.whole_network.be_bayesian import BeBayesian
from qualms_training.paper.methods.whole_network.networks import outputs

Picture = Callable[..., Pictures]


def test_the_loss_is_the_elbos_by_scipy() -> None:
    alpha = np.random.default_rng(0).uniform(0.5, 20, size=(5, 4))
    labels = np.array([0, 1, 2, 3, 0])
    # KL to the uniform Dirichlet is minus the entropy minus the logarithm of the uniform density, Γ(4) = 6.
    kl = np.array([-dirichlet.entropy(row) - np.log(6) for row in alpha])
    expected = np.mean(digamma(alpha.sum(axis=1)) - digamma(alpha[np.arange(5), labels]) + 0.03 * kl)
    found = BeBayesian(kl_weight=0.03).loss(torch.from_numpy(np.log(alpha)), torch.from_numpy(labels))
    assert float(found) == pytest.approx(expected, rel=1e-9)


def test_the_whole_network_is_trained_towards_evidence_of_one_over_lambda(picture: Picture) -> None:
    pictures, method = picture(n=600), BeBayesian(kl_weight=0.1, epochs=25)
    before = pictures.new_network().state_dict()
    method.fit(pictures)
    for name, value in method.model[0].state_dict().items():
        assert not torch.equal(value, before[name]), name
    alpha = outputs(method.model, pictures.train.shown, pictures.device).exp()
    assert float(alpha.sum(dim=1).median()) == pytest.approx(4 + 1 / 0.1, rel=0.1)
    found = method.score(pictures.train.shown)
    np.testing.assert_allclose(-found.scores["precision"], alpha.sum(dim=1), rtol=1e-5)
    np.testing.assert_allclose(found.scores["max_probability"], 1 - alpha.amax(dim=1) / alpha.sum(dim=1), atol=1e-5)
