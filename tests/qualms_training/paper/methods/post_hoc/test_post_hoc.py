"""Each score compared with pytorch-ood, or with an independent computation where pytorch-ood has none."""

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

from qualms_training.paper.inputs import BaseOutputs, Head, LabelledOutputs, PostHocInputs
from qualms_training.paper.method import NotApplicableError, PostHocMethod
from qualms_training.paper.methods.post_hoc.base_softmax import BaseSoftmax
from qualms_training.paper.methods.post_hoc.energy import Energy
from qualms_training.paper.methods.post_hoc.fdbd import FDBD
from qualms_training.paper.methods.post_hoc.gen import GEN
from qualms_training.paper.methods.post_hoc.geometry import Gaussian, unit
from qualms_training.paper.methods.post_hoc.knn import KNN
from qualms_training.paper.methods.post_hoc.mahalanobis import MahalanobisPlusPlus
from qualms_training.paper.methods.post_hoc.rmds import RMDS
from qualms_training.paper.methods.post_hoc.vim import ViM, principal_dimensions

DrawOutputs = Callable[..., LabelledOutputs]
MakePostHocInputs = Callable[..., PostHocInputs]


def tensor(values: NDArray[Any]) -> Tensor:
    return torch.from_numpy(np.asarray(values, dtype=np.float32))


def scored(method: PostHocMethod, inputs: PostHocInputs, outputs: BaseOutputs) -> NDArray[Any]:
    """The values of a method's only score."""
    method.fit(inputs)
    (values,) = method.score(outputs).scores.values()
    return values


def test_base_scores_agree_with_pytorch_ood(
    oracle: ModuleType, make_post_hoc_inputs: MakePostHocInputs, draw_outputs: DrawOutputs
) -> None:
    outputs = draw_outputs(50, seed=3).outputs
    assert BaseSoftmax().fit(make_post_hoc_inputs()) == 0
    verdict = BaseSoftmax().score(outputs)
    logits = tensor(outputs.logits)
    np.testing.assert_allclose(verdict.scores["entropy"], oracle.Entropy.score(logits), atol=1e-5)
    np.testing.assert_allclose(verdict.scores["max_probability"] - 1, oracle.MaxSoftmax.score(logits), atol=1e-6)
    np.testing.assert_array_equal(verdict.predictions, outputs.logits.argmax(axis=1))


def test_one_minus_the_largest_probability_does_not_round_to_zero(draw_outputs: DrawOutputs) -> None:
    outputs = draw_outputs(5, seed=3).outputs
    outputs.features.logits[:] = 0
    outputs.features.logits[:, 1] = 60
    np.testing.assert_allclose(BaseSoftmax().score(outputs).scores["max_probability"], 3 * np.exp(-60.0), rtol=1e-6)


def test_energy_agrees_with_pytorch_ood(
    oracle: ModuleType, make_post_hoc_inputs: MakePostHocInputs, draw_outputs: DrawOutputs
) -> None:
    outputs = draw_outputs(50, seed=3).outputs
    np.testing.assert_allclose(
        scored(Energy(), make_post_hoc_inputs(), outputs), oracle.EnergyBased.score(tensor(outputs.logits)), rtol=1e-5
    )


@pytest.mark.parametrize("largest", [2, 100])
def test_generalised_entropy_agrees_with_pytorch_ood(
    oracle: ModuleType, make_post_hoc_inputs: MakePostHocInputs, draw_outputs: DrawOutputs, largest: int
) -> None:
    outputs = draw_outputs(50, seed=3).outputs
    values = scored(GEN(largest=largest), make_post_hoc_inputs(), outputs)
    theirs = oracle.GEN.score(torch.from_numpy(outputs.logits), gamma=0.1, M=largest)
    probable = softmax(outputs.logits, axis=1).min(axis=1) > 1e-6  # pytorch-ood clips probabilities near 0 and 1
    np.testing.assert_allclose(values[probable], theirs[probable] * min(largest, 4), rtol=1e-6)
    assert probable.sum() > 20


def test_generalised_entropy_does_not_round_to_zero_for_certain_images(draw_outputs: DrawOutputs) -> None:
    outputs = draw_outputs(3, seed=3).outputs
    outputs.features.logits[:] = 0
    outputs.features.logits[:, 1] = [50, 60, 70]
    values = GEN(largest=1).score(outputs).scores["generalised_entropy"]
    np.testing.assert_allclose(values, (3 * np.exp([-50.0, -60.0, -70.0])) ** 0.1, rtol=1e-6)


def test_nearest_neighbour_distance_agrees_with_pytorch_ood(
    oracle: ModuleType, make_post_hoc_inputs: MakePostHocInputs, draw_outputs: DrawOutputs
) -> None:
    inputs, outputs = make_post_hoc_inputs(), draw_outputs(50, seed=3, shift=1.0).outputs
    theirs = oracle.KNN(None, k=7).fit_features(
        tensor(inputs.train.outputs.penultimate), torch.from_numpy(inputs.train.labels)
    )
    values = scored(KNN(k=7), inputs, outputs)
    np.testing.assert_allclose(np.sqrt(values), theirs.predict_features(tensor(outputs.penultimate)), atol=1e-3)


def test_mahalanobis_plus_plus_agrees_with_pytorch_ood_on_unit_features(
    oracle: ModuleType, make_post_hoc_inputs: MakePostHocInputs, draw_outputs: DrawOutputs
) -> None:
    inputs, outputs = make_post_hoc_inputs(), draw_outputs(50, seed=3, shift=1.0).outputs
    theirs = oracle.Mahalanobis(None).fit_features(
        tensor(unit(inputs.train.outputs.penultimate)), torch.from_numpy(inputs.train.labels)
    )
    expected = theirs.predict_features(tensor(unit(outputs.penultimate)))
    values = scored(MahalanobisPlusPlus(), inputs, outputs)
    np.testing.assert_allclose(values / (2 * len(inputs.train.labels)), expected, rtol=1e-3)


def test_mahalanobis_plus_plus_scales_each_tap_to_unit_length(
    make_post_hoc_inputs: MakePostHocInputs, draw_outputs: DrawOutputs
) -> None:
    inputs, outputs = make_post_hoc_inputs(), draw_outputs(30, seed=3).outputs
    method = MahalanobisPlusPlus(where="taps")
    before = scored(method, inputs, outputs)
    outputs.features.taps[0][:] *= 7
    np.testing.assert_allclose(method.score(outputs).scores["distance"], before, rtol=1e-4)


def test_relative_distance_agrees_with_pytorch_ood(
    oracle: ModuleType, make_post_hoc_inputs: MakePostHocInputs, draw_outputs: DrawOutputs
) -> None:
    inputs, outputs = make_post_hoc_inputs(), draw_outputs(50, seed=3, shift=1.0).outputs
    theirs = oracle.RMD(None).fit_features(
        tensor(inputs.train.outputs.penultimate), torch.from_numpy(inputs.train.labels)
    )
    expected = theirs.predict_features(tensor(outputs.penultimate)) * len(inputs.train.labels)
    np.testing.assert_allclose(scored(RMDS(), inputs, outputs), expected, rtol=1e-2, atol=1e-2)


def test_gaussian_distances_agree_with_scipy_and_scikit_learn(draw_outputs: DrawOutputs) -> None:
    labelled = draw_outputs(300, seed=5)
    points = labelled.outputs.penultimate.astype(np.float64)
    gaussian = Gaussian.fit(points, labelled.labels, 4)
    means = np.stack([points[labelled.labels == label].mean(axis=0) for label in range(4)])
    shared = EmpiricalCovariance(assume_centered=True).fit(points - means[labelled.labels])
    expected = cdist(points, means, "mahalanobis", VI=shared.get_precision()) ** 2
    np.testing.assert_allclose(gaussian.distances(points), expected, rtol=1e-8)


def test_constant_features_do_not_change_gaussian_distances(draw_outputs: DrawOutputs) -> None:
    labelled = draw_outputs(300, seed=5)
    points = labelled.outputs.penultimate.astype(np.float64)
    extended = np.concatenate([points, np.zeros((300, 2))], axis=1)
    without, with_constant = (Gaussian.fit(rows, labelled.labels, 4).distances(rows) for rows in (points, extended))
    np.testing.assert_allclose(with_constant, without, rtol=1e-6)


def test_virtual_logit_agrees_with_pytorch_ood(
    oracle: ModuleType, make_post_hoc_inputs: MakePostHocInputs, draw_outputs: DrawOutputs, head: Head
) -> None:
    inputs, outputs = make_post_hoc_inputs(), draw_outputs(50, seed=3, shift=1.0).outputs
    theirs = oracle.ViM(None, principal_dimensions(12), tensor(head.weight), tensor(head.bias))
    theirs.fit_features(tensor(inputs.train.outputs.penultimate), torch.from_numpy(inputs.train.labels))
    expected = theirs.predict_features(tensor(outputs.penultimate))
    np.testing.assert_allclose(scored(ViM(), inputs, outputs), expected, rtol=1e-2, atol=1e-2)


def test_principal_dimensions_are_the_papers() -> None:
    assert [principal_dimensions(width) for width in (2048, 768, 512, 84)] == [1000, 512, 256, 42]


def test_virtual_logit_without_a_residual_space_is_not_applicable(make_post_hoc_inputs: MakePostHocInputs) -> None:
    inputs = make_post_hoc_inputs()
    narrow = Head(inputs.head.weight[:, :1], inputs.head.bias)
    with pytest.raises(NotApplicableError, match="no residual space"):
        ViM().fit(PostHocInputs(**{**vars(inputs), "head": narrow}))


def test_boundary_distance_agrees_with_pytorch_ood(
    oracle: ModuleType, make_post_hoc_inputs: MakePostHocInputs, draw_outputs: DrawOutputs, head: Head
) -> None:
    inputs, outputs = make_post_hoc_inputs(), draw_outputs(50, seed=3, shift=1.0).outputs
    layer = nn.Linear(12, 4)
    layer.load_state_dict({"weight": tensor(head.weight), "bias": tensor(head.bias)})
    theirs = oracle.fDBD(nn.Identity(), layer).fit_features(tensor(inputs.train.outputs.penultimate))
    np.testing.assert_allclose(
        scored(FDBD(), inputs, outputs), theirs.predict_features(tensor(outputs.penultimate)), rtol=1e-4
    )


def test_more_neighbours_than_training_images_is_not_applicable(make_post_hoc_inputs: MakePostHocInputs) -> None:
    with pytest.raises(NotApplicableError, match="k is 401, and there are 400 training images"):
        KNN(k=401).fit(make_post_hoc_inputs(n=400))
    assert KNN(k=400).fit(make_post_hoc_inputs(n=400))


@pytest.mark.parametrize("method", [KNN(k=5), MahalanobisPlusPlus(), MahalanobisPlusPlus("taps"), RMDS(), ViM()])
def test_data_far_from_the_training_data_get_higher_scores(
    method: PostHocMethod, make_post_hoc_inputs: MakePostHocInputs, draw_outputs: DrawOutputs
) -> None:
    near, far = draw_outputs(200, seed=3).outputs, draw_outputs(200, seed=4, shift=4.0).outputs
    negatives = scored(method, make_post_hoc_inputs(), near)
    (positives,) = method.score(far).scores.values()
    assert roc_auc_score(np.arange(400) >= 200, np.concatenate([negatives, positives])) > 0.9
