"""The fused score and evidence from density detect OOD data and keep the base's class."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from qualms_training.meta.dirichlet import dirichlet_scores
from qualms_training.paper.inputs import LabelledOutputs, PostHocInputs
from qualms_training.paper.method import MethodOutput
from qualms_training.paper.methods.trained_heads.fused import Fused

DrawOutputs = Callable[..., LabelledOutputs]
MakePostHocInputs = Callable[..., PostHocInputs]


def auroc(method: Fused, draw_outputs: DrawOutputs, score: str, shift: float) -> float:
    negatives = method.score(draw_outputs(400, seed=3).outputs).scores[score]
    positives = method.score(draw_outputs(400, seed=4, shift=shift).outputs).scores[score]
    return float(roc_auc_score(np.arange(800) >= 400, np.concatenate([negatives, positives])))


@pytest.fixture
def fused(make_post_hoc_inputs: MakePostHocInputs) -> Fused:
    method = Fused()
    method.fit(make_post_hoc_inputs())
    return method


@pytest.fixture
def by_density(make_post_hoc_inputs: MakePostHocInputs) -> Fused:
    method = Fused(evidence="density")
    method.fit(make_post_hoc_inputs())
    return method


def test_predictions_are_the_bases(fused: Fused, by_density: Fused, draw_outputs: DrawOutputs) -> None:
    outputs = draw_outputs(60, seed=5).outputs
    for method in (fused, by_density):
        np.testing.assert_array_equal(method.score(outputs).predictions, outputs.predictions)


def test_fused_score_detects_ood_data(fused: Fused, draw_outputs: DrawOutputs) -> None:
    assert set(fused.score(draw_outputs(5, seed=5).outputs).scores) == {"fused"}
    assert auroc(fused, draw_outputs, "fused", shift=3.0) > 0.9


def test_fused_score_equals_the_output_of_the_exported_module(fused: Fused, draw_outputs: DrawOutputs) -> None:
    outputs = draw_outputs(40, seed=5).outputs
    assert fused.head
    information = dirichlet_scores(fused.head(outputs)).mutual_information.float()
    taps = outputs.features.batch(np.arange(40), torch.device("cpu"))
    with torch.inference_mode():
        _, expected = fused.ood_scores(torch.from_numpy(outputs.logits).float(), information, taps)
    np.testing.assert_allclose(fused.score(outputs).scores["fused"], expected, rtol=1e-3, atol=1e-4)


def test_evidence_from_density_decreases_with_the_distance_from_the_data(
    by_density: Fused, draw_outputs: DrawOutputs
) -> None:
    near: MethodOutput = by_density.score(draw_outputs(200, seed=5).outputs)
    far = by_density.score(draw_outputs(200, seed=6, shift=6.0).outputs)
    assert set(near.scores) == {
        "fused",
        "entropy",
        "mutual_information",
        "differential_entropy",
        "precision",
        "max_probability",
    }
    assert np.median(far.scores["precision"]) > np.median(near.scores["precision"])  # negated: larger is less evidence
    assert auroc(by_density, draw_outputs, "mutual_information", shift=4.0) > 0.9


def test_fit_returns_how_many_numbers_are_stored(make_post_hoc_inputs: MakePostHocInputs) -> None:
    inputs = make_post_hoc_inputs()
    density = Fused(evidence="density").fit(inputs)
    assert Fused().fit(inputs) > density > sum(tap.shape[1] ** 2 for tap in inputs.train.outputs.features.taps)
