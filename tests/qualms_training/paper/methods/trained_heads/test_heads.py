"""Heads on frozen features: the meta-model, its ablations and a new last layer, each against a known optimum."""

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
from qualms_training.paper.material import Frozen, Known
from qualms_training.paper.methods.trained_heads import heads
from qualms_training.paper.methods.trained_heads.cross_ent import CrossEnt
from qualms_training.paper.methods.trained_heads.dirichlet_meta import Ours
from qualms_training.paper.methods.trained_heads.heads import dirichlet_verdict, softmax_verdict
from qualms_training.paper.methods.trained_heads.last_layer import LastLayer
from qualms_training.paper.methods.trained_heads.linear_meta import LinearMeta

Draw = Callable[..., Known]
Freeze = Callable[..., Frozen]


def test_dirichlet_doubts_are_scipys_and_point_the_right_way() -> None:
    z = torch.randn(20, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found, alpha = dirichlet_verdict(z), z.exp().numpy()
    mean = alpha / alpha.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(found.scores["entropy"], entropy(mean, axis=1), rtol=1e-5)
    np.testing.assert_allclose(found.scores["max_probability"], 1 - mean.max(axis=1), rtol=1e-5)
    np.testing.assert_allclose(found.scores["precision"], -alpha.sum(axis=1), rtol=1e-5)
    np.testing.assert_allclose(
        found.scores["differential_entropy"], [dirichlet(row).entropy() for row in alpha], rtol=1e-4, atol=1e-4
    )
    assert set(found.scores) == {
        "entropy",
        "max_probability",
        "mutual_information",
        "differential_entropy",
        "precision",
    }
    np.testing.assert_array_equal(found.predictions, alpha.argmax(axis=1))


def test_softmax_doubts_are_scipys() -> None:
    logits = torch.randn(20, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found, p = softmax_verdict(logits), softmax(logits.numpy(), axis=1)
    np.testing.assert_allclose(found.scores["entropy"], entropy(p, axis=1))
    np.testing.assert_allclose(found.scores["max_probability"], 1 - p.max(axis=1))


def test_a_linear_meta_model_reaches_the_optimum_of_the_elbo(freeze: Freeze) -> None:
    """Where features tell the classes apart for certain, α is 1 + 1/λ for the class and 1 for the others."""
    frozen = freeze(4000, meta__epochs=1, meta__batch=8, meta__lr=0.03)
    labels = np.arange(4000) % 4
    feature = np.zeros((4000, 12), np.float32)
    feature[np.arange(4000), labels] = 1.0
    view = replace(frozen.train.view, last=feature)
    method = LinearMeta()
    assert method.fit(replace(frozen, train=Known(view, labels))) == 4 * 13
    alpha = method.head.outputs(view).exp().numpy()
    np.testing.assert_allclose(alpha, 1 + 10 * np.eye(4)[labels], rtol=0.05)
    assert method.score(view).predictions.tolist() == labels.tolist()


def test_a_new_last_layer_is_a_logistic_regression(freeze: Freeze, draw: Draw) -> None:
    frozen = replace(freeze(meta__epochs=1, meta__batch=8, meta__lr=0.02), train=draw(8000, seed=10, wrong=0.3))
    method = LastLayer()
    assert method.fit(frozen) == 4 * 13
    known = frozen.train
    theirs = LogisticRegression(C=1e4, max_iter=2000).fit(known.view.penultimate, known.labels)
    found = softmax(method.head.outputs(known.view).double().numpy(), axis=1)
    expected = theirs.predict_proba(known.view.penultimate)
    assert np.abs(found - expected).mean() < 0.03
    assert method.score(known.view).scores["entropy"].mean() == pytest.approx(entropy(expected, axis=1).mean(), rel=0.1)


def test_cross_entropy_trains_the_whole_structure(freeze: Freeze, draw: Draw) -> None:
    frozen = replace(freeze(meta__epochs=1, meta__batch=8), train=draw(4000, seed=10, wrong=0.0))
    method, whole = CrossEnt(), Ours()
    assert method.fit(frozen) == whole.fit(frozen)
    unseen = draw(500, seed=30, wrong=0.0)
    found = method.score(unseen.view)
    assert (found.predictions == unseen.labels).mean() > 0.8
    assert set(found.scores) == {"entropy", "max_probability"}


def test_a_tenth_of_the_data_is_a_tenth_and_the_seeds_own(freeze: Freeze, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    real = train_meta

    def spy(model: Any, features: Any, labels: Any, *rest: Any, **options: Any) -> Any:
        seen.append(np.asarray(features.taps[0]))
        assert len(labels) == len(features.taps[0])
        return real(model, features, labels, *rest, **options)

    monkeypatch.setattr(heads, "train_meta", spy)
    for seed in (0, 1, 0):
        Ours(share=0.1).fit(replace(freeze(), seed=seed))
    assert [len(tap) for tap in seen] == [40, 40, 40]
    assert not np.array_equal(seen[0], seen[1])
    assert np.array_equal(seen[0], seen[2])


def test_stopping_by_errors_asks_for_errors(freeze: Freeze, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    real = train_meta

    def spy(*arguments: Any, **options: Any) -> Any:
        asked.append(f"{arguments[4].stop_task} {arguments[4].stop_score}")
        return real(*arguments, **options)

    monkeypatch.setattr(heads, "train_meta", spy)
    Ours().fit(freeze())
    Ours(stop="misclassification").fit(freeze())
    assert asked == ["ood mutual_information", "misclassification error_probability"]
