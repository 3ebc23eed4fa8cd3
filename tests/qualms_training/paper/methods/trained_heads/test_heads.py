"""Heads on frozen features, compared with known optima: the meta-model, its ablations and a new last layer."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import softmax
from scipy.stats import dirichlet, entropy
from sklearn.linear_model import LogisticRegression

from qualms_training.fitting.meta_trainer import train_meta
from qualms_training.paper.inputs import LabelledOutputs, PostHocInputs
from qualms_training.paper.methods.score_functions import dirichlet_output, softmax_output
from qualms_training.paper.methods.trained_heads import heads
from qualms_training.paper.methods.trained_heads.ablations import CrossEnt, LastLayer, LinearMeta
from qualms_training.paper.methods.trained_heads.dirichlet_meta import DirichletMeta

DrawOutputs = Callable[..., LabelledOutputs]
MakePostHocInputs = Callable[..., PostHocInputs]


def test_dirichlet_scores_agree_with_scipy_and_are_larger_for_more_uncertainty() -> None:
    z = torch.randn(20, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    verdict, alpha = dirichlet_output(z), z.exp().numpy()
    mean = alpha / alpha.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(verdict.scores["entropy"], entropy(mean, axis=1), rtol=1e-5)
    np.testing.assert_allclose(verdict.scores["max_probability"], 1 - mean.max(axis=1), rtol=1e-5)
    np.testing.assert_allclose(verdict.scores["precision"], -alpha.sum(axis=1), rtol=1e-5)
    np.testing.assert_allclose(
        verdict.scores["differential_entropy"], [dirichlet(row).entropy() for row in alpha], rtol=1e-4, atol=1e-4
    )
    assert set(verdict.scores) == {
        "entropy",
        "max_probability",
        "mutual_information",
        "differential_entropy",
        "precision",
    }
    np.testing.assert_array_equal(verdict.predictions, alpha.argmax(axis=1))


def test_softmax_scores_agree_with_scipy() -> None:
    logits = torch.randn(20, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    verdict, p = softmax_output(logits), softmax(logits.numpy(), axis=1)
    np.testing.assert_allclose(verdict.scores["entropy"], entropy(p, axis=1))
    np.testing.assert_allclose(verdict.scores["max_probability"], 1 - p.max(axis=1))


@pytest.mark.slow
def test_a_linear_meta_model_reaches_the_optimum_of_the_elbo(make_post_hoc_inputs: MakePostHocInputs) -> None:
    """With perfectly separable classes, α is 1 + 1/λ for the class and 1 for the others."""
    inputs = make_post_hoc_inputs(4000, meta__epochs=1, meta__batch=8, meta__lr=0.03)
    labels = np.arange(4000) % 4
    feature = np.zeros((4000, 12), np.float32)
    feature[np.arange(4000), labels] = 1.0
    outputs = replace(inputs.train.outputs, cached_penultimate=feature)
    method = LinearMeta()
    assert method.fit(replace(inputs, train=LabelledOutputs(outputs, labels))) == 4 * 13
    alpha = method.head(outputs).exp().numpy()
    np.testing.assert_allclose(alpha, 1 + 10 * np.eye(4)[labels], rtol=0.05)
    assert method.score(outputs).predictions.tolist() == labels.tolist()


@pytest.mark.slow
def test_a_new_last_layer_agrees_with_logistic_regression(
    make_post_hoc_inputs: MakePostHocInputs, draw_outputs: DrawOutputs
) -> None:
    inputs = replace(
        make_post_hoc_inputs(meta__epochs=1, meta__batch=8, meta__lr=0.02), train=draw_outputs(8000, seed=10, wrong=0.3)
    )
    method = LastLayer()
    assert method.fit(inputs) == 4 * 13
    train = inputs.train
    theirs = LogisticRegression(C=1e4, max_iter=2000).fit(train.outputs.penultimate, train.labels)
    probabilities = softmax(method.head(train.outputs).double().numpy(), axis=1)
    expected = theirs.predict_proba(train.outputs.penultimate)
    assert np.abs(probabilities - expected).mean() < 0.03
    assert method.score(train.outputs).scores["entropy"].mean() == pytest.approx(
        entropy(expected, axis=1).mean(), rel=0.1
    )


@pytest.mark.slow
def test_cross_entropy_trains_the_full_meta_model(
    make_post_hoc_inputs: MakePostHocInputs, draw_outputs: DrawOutputs
) -> None:
    inputs = replace(make_post_hoc_inputs(meta__epochs=1, meta__batch=8), train=draw_outputs(4000, seed=10, wrong=0.0))
    method = CrossEnt()
    assert method.fit(inputs) == DirichletMeta().fit(inputs)
    unseen = draw_outputs(500, seed=30, wrong=0.0)
    verdict = method.score(unseen.outputs)
    assert (verdict.predictions == unseen.labels).mean() > 0.8
    assert set(verdict.scores) == {"entropy", "max_probability"}


def test_share_selects_that_share_of_the_images_by_seed(
    make_post_hoc_inputs: MakePostHocInputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    taps: list[Any] = []
    real = train_meta

    def spy(model: Any, features: Any, labels: Any, *rest: Any, **options: Any) -> Any:
        taps.append(np.asarray(features.taps[0]))
        assert len(labels) == len(features.taps[0])
        return real(model, features, labels, *rest, **options)

    monkeypatch.setattr(heads, "train_meta", spy)
    for seed in (0, 1, 0):
        DirichletMeta(share=0.1).fit(replace(make_post_hoc_inputs(), seed=seed))
    assert [len(tap) for tap in taps] == [40, 40, 40]
    assert not np.array_equal(taps[0], taps[1])
    assert np.array_equal(taps[0], taps[2])


def test_stop_by_misclassification_changes_the_stopping_task_and_score(
    make_post_hoc_inputs: MakePostHocInputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks: list[str] = []
    real = train_meta

    def spy(*arguments: Any, **options: Any) -> Any:
        tasks.append(f"{arguments[4].stop_task} {arguments[4].stop_score}")
        return real(*arguments, **options)

    monkeypatch.setattr(heads, "train_meta", spy)
    DirichletMeta().fit(make_post_hoc_inputs())
    DirichletMeta(stop="misclassification").fit(make_post_hoc_inputs())
    assert tasks == ["ood mutual_information", "misclassification error_probability"]
