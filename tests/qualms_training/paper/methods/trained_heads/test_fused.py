from collections.abc import Callable

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from qualms_training.paper.material import Frozen, Known
from qualms_training.paper.method import Verdict
from qualms_training.paper.methods.trained_heads.fused import Fused

Draw = Callable[..., Known]
Freeze = Callable[..., Frozen]


def auroc(method: Fused, draw: Draw, score: str, shift: float) -> float:
    known = method.score(draw(400, seed=3).view).scores[score]
    strange = method.score(draw(400, seed=4, shift=shift).view).scores[score]
    return float(roc_auc_score(np.arange(800) >= 400, np.concatenate([known, strange])))


@pytest.fixture
def fused(freeze: Freeze) -> Fused:
    method = Fused()
    method.fit(freeze())
    return method


@pytest.fixture
def by_density(freeze: Freeze) -> Fused:
    method = Fused(evidence="density")
    method.fit(freeze())
    return method


def test_the_class_is_the_bases(fused: Fused, by_density: Fused, draw: Draw) -> None:
    view = draw(60, seed=5).view
    for method in (fused, by_density):
        np.testing.assert_array_equal(method.score(view).predictions, view.predictions)


def test_fused_finds_strangers(fused: Fused, draw: Draw) -> None:
    assert set(fused.score(draw(5, seed=5).view).scores) == {"fused"}
    assert auroc(fused, draw, "fused", shift=3.0) > 0.9


def test_fused_is_what_the_graphs_doubter_says(fused: Fused, draw: Draw) -> None:
    view = draw(40, seed=5).view
    information = torch.from_numpy(fused._all_doubts(view)[:, 1]).float()
    taps = view.features.batch(np.arange(40), torch.device("cpu"))
    with torch.inference_mode():
        _, found = fused.doubter(torch.from_numpy(view.logits).float(), information, taps)
    np.testing.assert_allclose(fused.score(view).scores["fused"], found, rtol=1e-3, atol=1e-4)


def test_evidence_by_density_falls_away_from_the_data(by_density: Fused, draw: Draw) -> None:
    found: Verdict = by_density.score(draw(200, seed=5).view)
    far = by_density.score(draw(200, seed=6, shift=6.0).view)
    assert set(found.scores) == {
        "fused",
        "entropy",
        "mutual_information",
        "differential_entropy",
        "precision",
        "max_probability",
    }
    assert np.median(far.scores["precision"]) > np.median(found.scores["precision"])  # a doubt: less evidence is more
    assert auroc(by_density, draw, "mutual_information", shift=4.0) > 0.9


def test_the_numbers_it_keeps_are_counted(freeze: Freeze) -> None:
    frozen = freeze()
    density = Fused(evidence="density").fit(frozen)
    assert Fused().fit(frozen) > density > sum(tap.shape[1] ** 2 for tap in frozen.train.view.features.taps)
