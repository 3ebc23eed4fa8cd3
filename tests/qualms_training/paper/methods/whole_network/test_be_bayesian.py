"""Be-Bayesian: the loss agrees with scipy, and the scores are those of the network's Dirichlet distribution."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy.special import digamma
from scipy.stats import dirichlet

from qualms_training.paper.inputs import ImageInputs
from qualms_training.paper.methods.whole_network.be_bayesian import BeBayesian
from qualms_training.paper.methods.whole_network.training import outputs

MakeImageInputs = Callable[..., ImageInputs]


def test_loss_is_the_negative_elbo_by_scipy() -> None:
    alpha = np.random.default_rng(0).uniform(0.5, 20, size=(5, 4))
    labels = np.array([0, 1, 2, 3, 0])
    # KL to the uniform Dirichlet is minus the entropy minus the logarithm of the uniform density, Γ(4) = 6.
    kl = np.array([-dirichlet.entropy(row) - np.log(6) for row in alpha])
    expected = np.mean(digamma(alpha.sum(axis=1)) - digamma(alpha[np.arange(5), labels]) + 0.03 * kl)
    loss = BeBayesian(kl_weight=0.03).loss(torch.from_numpy(np.log(alpha)), torch.from_numpy(labels))
    assert float(loss) == pytest.approx(expected, rel=1e-9)


@pytest.mark.slow
def test_training_changes_all_layers_and_reaches_evidence_of_one_over_lambda(
    make_image_inputs: MakeImageInputs,
) -> None:
    inputs, method = make_image_inputs(n=600), BeBayesian(kl_weight=0.1, epochs=25)
    before = inputs.new_network().state_dict()
    method.fit(inputs)
    for name, value in method.model[0].state_dict().items():
        assert not torch.equal(value, before[name]), name
    alpha = outputs(method.model, inputs.train.images, inputs.device).exp()
    assert float(alpha.sum(dim=1).median()) == pytest.approx(4 + 1 / 0.1, rel=0.1)
    verdict = method.score(inputs.train.images)
    np.testing.assert_allclose(-verdict.scores["precision"], alpha.sum(dim=1), rtol=1e-5)
    np.testing.assert_allclose(verdict.scores["max_probability"], 1 - alpha.amax(dim=1) / alpha.sum(dim=1), atol=1e-5)
