"""Probes are logistic regressions on taps, and the decide learns where the base is wrong."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from scipy.special import softmax
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

from qualms_training.paper.material import Frozen, Known
from qualms_training.paper.method import NotApplicableError
from qualms_training.paper.methods.trained_heads.whitebox import Whitebox

Draw = Callable[..., Known]
Freeze = Callable[..., Frozen]


def test_probes_agree_with_scikit_learn(freeze: Freeze, draw: Draw) -> None:
    frozen = replace(freeze(), train=draw(4000, seed=10, wrong=0.3))
    method = Whitebox(epochs=12, batch=64, lr=5e-3, trees=2)
    method.fit(frozen)
    found = method._probabilities(frozen.fit.view)
    for index, tap in enumerate(frozen.fit.view.features.taps):
        theirs = LogisticRegression(C=1e4, max_iter=3000).fit(
            frozen.train.view.features.taps[index], frozen.train.labels
        )
        assert np.abs(found[:, 4 * index : 4 * index + 4] - theirs.predict_proba(tap)).mean() < 0.03
    np.testing.assert_allclose(found[:, 8:], softmax(frozen.fit.view.logits, axis=1))


def test_doubt_is_the_probability_of_an_error(freeze: Freeze, draw: Draw) -> None:
    """Errors are where the first tap says so, which the base's own softmax does not know."""

    def mislabelled(known: Known) -> Known:
        odd = known.view.features.taps[0][:, 0] > 3
        return replace(known, labels=np.where(odd, (known.view.predictions + 1) % 4, known.view.predictions))

    frozen = freeze()
    frozen = replace(frozen, validation=mislabelled(draw(1500, seed=11)), fit=mislabelled(draw(1500, seed=12)))
    method = Whitebox(trees=30)
    kept = method.fit(frozen)
    assert 2 * (8 * 4 + 4) + 30 < kept <= 2 * (8 * 4 + 4) + 30 * 15  # trees of depth 3
    unseen = mislabelled(draw(1000, seed=30))
    found = method.score(unseen.view)
    doubts = found.scores["wrong_probability"]
    assert ((doubts >= 0) & (doubts <= 1)).all()
    wrong = unseen.view.predictions != unseen.labels
    assert roc_auc_score(wrong, doubts) > 0.9
    assert doubts.mean() == pytest.approx(wrong.mean(), abs=0.06)
    np.testing.assert_array_equal(found.predictions, unseen.view.predictions)


def test_a_base_without_errors_leaves_nothing_to_learn(freeze: Freeze) -> None:
    frozen = freeze()
    right = [replace(known, labels=known.view.predictions) for known in (frozen.validation, frozen.fit)]
    with pytest.raises(NotApplicableError, match="no errors"):
        Whitebox(epochs=1).fit(replace(frozen, validation=right[0], fit=right[1]))
