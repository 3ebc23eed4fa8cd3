"""The tables' flag score and joined α are those of a bundle's modules."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from sklearn.metrics import roc_auc_score

from qualms_training.fitting.feature_cache import Features
from qualms_training.meta.dirichlet import dirichlet_scores
from qualms_training.meta.flag_score import FlagScore, predicted
from qualms_training.meta.joined_alpha import JoinedAlpha
from qualms_training.paper.inputs import BaseOutputs, LabelledOutputs, PostHocInputs
from qualms_training.paper.methods.trained_heads.dirichlet_meta import DirichletMeta
from qualms_training.paper.methods.trained_heads.fused import Fused

DrawOutputs = Callable[..., LabelledOutputs]
MakePostHocInputs = Callable[..., PostHocInputs]


@pytest.fixture
def fused(make_post_hoc_inputs: MakePostHocInputs) -> Fused:
    method = Fused()
    method.fit(make_post_hoc_inputs())
    return method


def test_predictions_are_those_of_the_network_that_predicts(
    make_post_hoc_inputs: MakePostHocInputs, fused: Fused, draw_outputs: DrawOutputs
) -> None:
    outputs = draw_outputs(60, seed=5).outputs
    np.testing.assert_array_equal(fused.score(outputs).predictions, outputs.predictions)
    transfer = Fused()
    transfer.fit(make_post_hoc_inputs(prediction="meta"))
    expected = transfer.head(outputs).argmax(dim=1)
    np.testing.assert_array_equal(transfer.score(outputs).predictions, expected)
    assert (outputs.predictions != expected.numpy()).any()


def between(*sets: BaseOutputs) -> BaseOutputs:
    """The base's outputs for images in the middle of those of several sets."""
    taps: list[NDArray[Any]] = [np.mean(tap, axis=0) for tap in zip(*(one.features.taps for one in sets), strict=True)]
    logits = np.mean([one.logits for one in sets], axis=0).astype(np.float32)
    return BaseOutputs(Features(taps, logits, Path("nowhere")), np.mean([one.penultimate for one in sets], axis=0))


def test_flag_score_and_mutual_information_detect_images_between_the_classes(
    fused: Fused, draw_outputs: DrawOutputs
) -> None:
    known = fused.score(draw_outputs(400, seed=3).outputs).scores
    ood = fused.score(between(*(draw_outputs(400, seed=seed).outputs for seed in range(40, 44)))).scores
    assert set(known) == {
        *("fused", "entropy", "mutual_information", "differential_entropy", "precision", "max_probability"),
    }
    for score in ("fused", "mutual_information", "precision"):
        assert roc_auc_score(np.arange(800) >= 400, np.concatenate([known[score], ood[score]])) > 0.75


def test_scores_equal_those_of_a_bundles_modules_fitted_to_the_same_images(
    make_post_hoc_inputs: MakePostHocInputs, draw_outputs: DrawOutputs
) -> None:
    inputs, outputs = make_post_hoc_inputs(), draw_outputs(40, seed=5).outputs
    method, meta = Fused(), DirichletMeta()
    method.fit(inputs)
    meta.fit(inputs)
    taps, fit = inputs.train.outputs.features.taps, inputs.fit
    flag_score = FlagScore([tap.shape[1] for tap in taps], inputs.classes, len(fit.labels))
    flag_score.fit_density(taps, inputs.train.labels)
    arrays = fit.outputs.features.logits, meta.head(fit.outputs).numpy(), fit.outputs.features.taps
    flag_score.fit(*arrays)
    joined_alpha = JoinedAlpha(inputs.classes, len(fit.labels))
    joined_alpha.fit(fit.outputs.features.logits, fit.labels, flag_score.of_arrays(*arrays))
    logits = torch.from_numpy(outputs.logits)
    features = outputs.features.batch(np.arange(40), torch.device("cpu"))
    with torch.inference_mode():
        precision = meta.head(outputs).double().exp().sum(dim=1, keepdim=True)
        _, _, expected = flag_score(predicted(logits), precision, features)
        alpha, _ = joined_alpha(logits, expected)
    scores = method.score(outputs).scores
    np.testing.assert_allclose(scores["fused"], expected.squeeze(1), rtol=1e-4, atol=1e-4)
    information = dirichlet_scores(alpha.log()).mutual_information
    np.testing.assert_allclose(scores["mutual_information"], information, rtol=1e-3)


def test_noisy_copies_of_the_fit_images_are_not_used(make_post_hoc_inputs: MakePostHocInputs) -> None:
    inputs = make_post_hoc_inputs(meta__stop_task="misclassification")
    method = Fused()
    method.fit(inputs)
    assert method.seen_noise(inputs.recipe, "fused") == []
    assert method.seen_noise(make_post_hoc_inputs().recipe, "fused") == inputs.recipe.meta.stop_noise


def test_fit_returns_how_many_numbers_are_stored(make_post_hoc_inputs: MakePostHocInputs) -> None:
    inputs = make_post_hoc_inputs()
    stored, meta_only = Fused().fit(inputs), DirichletMeta().fit(inputs)
    assert stored - meta_only > sum(tap.shape[1] ** 2 for tap in inputs.train.outputs.features.taps)
