"""Each score against pytorch-ood's, and what that leaves open against a computation written another way."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.spatial.distance import cdist
from scipy.special import softmax
from sklearn.covariance import EmpiricalCovariance
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn

from qualms_training.paper.material import Frozen, Head, Known, View
from qualms_training.paper.method import NotApplicableError, PostHoc
from qualms_training.paper.methods.post_hoc.base_softmax import Base
from qualms_training.paper.methods.post_hoc.energy import Energy
from qualms_training.paper.methods.post_hoc.fdbd import FDBD
from qualms_training.paper.methods.post_hoc.gen import GEN
from qualms_training.paper.methods.post_hoc.geometry import Gaussian, unit
from qualms_training.paper.methods.post_hoc.knn import KNN
from qualms_training.paper.methods.post_hoc.mahalanobis import MahalanobisPlusPlus
from qualms_training.paper.methods.post_hoc.rmds import RMDS
from qualms_training.paper.methods.post_hoc.vim import ViM, principal_dimensions

Draw = Callable[..., Known]
Freeze = Callable[..., Frozen]


def tensor(values: NDArray[Any]) -> Tensor:
    return torch.from_numpy(np.asarray(values, dtype=np.float32))


def scored(method: PostHoc, frozen: Frozen, view: View) -> NDArray[Any]:
    """The only score of a method."""
    method.fit(frozen)
    (values,) = method.score(view).scores.values()
    return values


def test_base_is_entropy_and_largest_probability(oracle: ModuleType, freeze: Freeze, draw: Draw) -> None:
    view = draw(50, seed=3).view
    assert Base().fit(freeze()) == 0
    found = Base().score(view)
    logits = tensor(view.logits)
    np.testing.assert_allclose(found.scores["entropy"], oracle.Entropy.score(logits), atol=1e-5)
    np.testing.assert_allclose(found.scores["max_probability"] - 1, oracle.MaxSoftmax.score(logits), atol=1e-6)
    np.testing.assert_array_equal(found.predictions, view.logits.argmax(axis=1))


def test_one_minus_the_largest_probability_does_not_round_to_zero(draw: Draw) -> None:
    view = draw(5, seed=3).view
    view.features.logits[:] = 0
    view.features.logits[:, 1] = 60
    np.testing.assert_allclose(Base().score(view).scores["max_probability"], 3 * np.exp(-60.0), rtol=1e-6)


def test_energy_is_that_of_pytorch_ood(oracle: ModuleType, freeze: Freeze, draw: Draw) -> None:
    view = draw(50, seed=3).view
    np.testing.assert_allclose(
        scored(Energy(), freeze(), view), oracle.EnergyBased.score(tensor(view.logits)), rtol=1e-5
    )


@pytest.mark.parametrize("largest", [2, 100])
def test_generalised_entropy_is_that_of_pytorch_ood(
    oracle: ModuleType, freeze: Freeze, draw: Draw, largest: int
) -> None:
    view = draw(50, seed=3).view
    found = scored(GEN(largest=largest), freeze(), view)
    theirs = oracle.GEN.score(torch.from_numpy(view.logits), gamma=0.1, M=largest)
    probable = softmax(view.logits, axis=1).min(axis=1) > 1e-6  # they keep probabilities off 0 and 1
    np.testing.assert_allclose(found[probable], theirs[probable] * min(largest, 4), rtol=1e-6)
    assert probable.sum() > 20


def test_generalised_entropy_still_tells_certain_images_apart(draw: Draw) -> None:
    view = draw(3, seed=3).view
    view.features.logits[:] = 0
    view.features.logits[:, 1] = [50, 60, 70]
    found = GEN(largest=1).score(view).scores["generalised_entropy"]
    np.testing.assert_allclose(found, (3 * np.exp([-50.0, -60.0, -70.0])) ** 0.1, rtol=1e-6)


def test_neighbours_are_those_of_pytorch_ood(oracle: ModuleType, freeze: Freeze, draw: Draw) -> None:
    frozen, view = freeze(), draw(50, seed=3, shift=1.0).view
    theirs = oracle.KNN(None, k=7).fit_features(
        tensor(frozen.train.view.penultimate), torch.from_numpy(frozen.train.labels)
    )
    found = scored(KNN(k=7), frozen, view)
    np.testing.assert_allclose(np.sqrt(found), theirs.predict_features(tensor(view.penultimate)), atol=1e-3)


def test_mahalanobis_plus_plus_is_that_of_pytorch_ood_on_unit_features(
    oracle: ModuleType, freeze: Freeze, draw: Draw
) -> None:
    frozen, view = freeze(), draw(50, seed=3, shift=1.0).view
    theirs = oracle.Mahalanobis(None).fit_features(
        tensor(unit(frozen.train.view.penultimate)), torch.from_numpy(frozen.train.labels)
    )
    expected = theirs.predict_features(tensor(unit(view.penultimate)))
    found = scored(MahalanobisPlusPlus(), frozen, view)
    np.testing.assert_allclose(found / (2 * len(frozen.train.labels)), expected, rtol=1e-3)


def test_mahalanobis_plus_plus_on_taps_sees_each_of_unit_length(freeze: Freeze, draw: Draw) -> None:
    frozen, view = freeze(), draw(30, seed=3).view
    method = MahalanobisPlusPlus(where="taps")
    before = scored(method, frozen, view)
    view.features.taps[0][:] *= 7  # a power that only a length can hide
    np.testing.assert_allclose(method.score(view).scores["distance"], before, rtol=1e-4)


def test_relative_distance_is_that_of_pytorch_ood(oracle: ModuleType, freeze: Freeze, draw: Draw) -> None:
    frozen, view = freeze(), draw(50, seed=3, shift=1.0).view
    theirs = oracle.RMD(None).fit_features(tensor(frozen.train.view.penultimate), torch.from_numpy(frozen.train.labels))
    expected = theirs.predict_features(tensor(view.penultimate)) * len(frozen.train.labels)
    np.testing.assert_allclose(scored(RMDS(), frozen, view), expected, rtol=1e-2, atol=1e-2)


def test_gaussian_distances_are_those_of_scipy_and_scikit_learn(draw: Draw) -> None:
    known = draw(300, seed=5)
    points = known.view.penultimate.astype(np.float64)
    gaussian = Gaussian.fit(points, known.labels, 4)
    means = np.stack([points[known.labels == label].mean(axis=0) for label in range(4)])
    shared = EmpiricalCovariance(assume_centered=True).fit(points - means[known.labels])
    expected = cdist(points, means, "mahalanobis", VI=shared.get_precision()) ** 2
    np.testing.assert_allclose(gaussian.distances(points), expected, rtol=1e-8)


def test_a_unit_that_never_varies_does_not_break_the_covariance(draw: Draw) -> None:
    known = draw(300, seed=5)
    points = known.view.penultimate.astype(np.float64)
    dead = np.concatenate([points, np.zeros((300, 2))], axis=1)
    without, with_it = (Gaussian.fit(rows, known.labels, 4).distances(rows) for rows in (points, dead))
    np.testing.assert_allclose(with_it, without, rtol=1e-6)


def test_virtual_logit_is_that_of_pytorch_ood(oracle: ModuleType, freeze: Freeze, draw: Draw, head: Head) -> None:
    frozen, view = freeze(), draw(50, seed=3, shift=1.0).view
    theirs = oracle.ViM(None, principal_dimensions(12), tensor(head.weight), tensor(head.bias))
    theirs.fit_features(tensor(frozen.train.view.penultimate), torch.from_numpy(frozen.train.labels))
    expected = theirs.predict_features(tensor(view.penultimate))
    np.testing.assert_allclose(scored(ViM(), frozen, view), expected, rtol=1e-2, atol=1e-2)


def test_principal_dimensions_are_the_papers() -> None:
    assert [principal_dimensions(width) for width in (2048, 768, 512, 84)] == [1000, 512, 256, 42]


def test_virtual_logits_need_a_residual_space(freeze: Freeze) -> None:
    frozen = freeze()
    narrow = Head(frozen.head.weight[:, :1], frozen.head.bias)
    with pytest.raises(NotApplicableError, match="no residual space"):
        ViM().fit(Frozen(**{**vars(frozen), "head": narrow}))


def test_boundary_distance_is_that_of_pytorch_ood(oracle: ModuleType, freeze: Freeze, draw: Draw, head: Head) -> None:
    frozen, view = freeze(), draw(50, seed=3, shift=1.0).view
    layer = nn.Linear(12, 4)
    layer.load_state_dict({"weight": tensor(head.weight), "bias": tensor(head.bias)})
    theirs = oracle.fDBD(nn.Identity(), layer).fit_features(tensor(frozen.train.view.penultimate))
    np.testing.assert_allclose(
        scored(FDBD(), frozen, view), theirs.predict_features(tensor(view.penultimate)), rtol=1e-4
    )


def test_more_neighbours_than_training_images_is_a_reason_and_not_a_figure(freeze: Freeze) -> None:
    with pytest.raises(NotApplicableError, match="k is 401, and there are 400 training images"):
        KNN(k=401).fit(freeze(n=400))
    assert KNN(k=400).fit(freeze(n=400))


@pytest.mark.parametrize("method", [KNN(k=5), MahalanobisPlusPlus(), MahalanobisPlusPlus("taps"), RMDS(), ViM()])
def test_far_from_the_data_is_more_doubtful(method: PostHoc, freeze: Freeze, draw: Draw) -> None:
    near, far = draw(200, seed=3).view, draw(200, seed=4, shift=4.0).view
    known = scored(method, freeze(), near)
    (strange,) = method.score(far).scores.values()
    assert roc_auc_score(np.arange(400) >= 200, np.concatenate([known, strange])) > 0.9
