"""Whitebox: the probes are logistic regressions on taps, and the trees predict the base's errors."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from scipy.special import softmax
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

from qualms_training.paper.inputs import LabelledOutputs, PostHocInputs
from qualms_training.paper.method import NotApplicableError
from qualms_training.paper.methods.trained_heads.whitebox import Whitebox

DrawOutputs = Callable[..., LabelledOutputs]
MakePostHocInputs = Callable[..., PostHocInputs]


@pytest.mark.slow
def test_probes_agree_with_logistic_regression_of_scikit_learn(
    make_post_hoc_inputs: MakePostHocInputs, draw_outputs: DrawOutputs
) -> None:
    inputs = replace(make_post_hoc_inputs(), train=draw_outputs(4000, seed=10, wrong=0.3))
    method = Whitebox(epochs=12, batch=64, lr=5e-3, trees=2)
    method.fit(inputs)
    probabilities = method.probabilities(inputs.fit.outputs)
    for index, tap in enumerate(inputs.fit.outputs.features.taps):
        theirs = LogisticRegression(C=1e4, max_iter=3000).fit(
            inputs.train.outputs.features.taps[index], inputs.train.labels
        )
        assert np.abs(probabilities[:, 4 * index : 4 * index + 4] - theirs.predict_proba(tap)).mean() < 0.03
    np.testing.assert_allclose(probabilities[:, 8:], softmax(inputs.fit.outputs.logits, axis=1))


def test_score_is_the_probability_of_an_error(
    make_post_hoc_inputs: MakePostHocInputs, draw_outputs: DrawOutputs
) -> None:
    """The errors depend on the first tap, so that the base's softmax cannot predict them."""

    def mislabelled(labelled: LabelledOutputs) -> LabelledOutputs:
        predictions = labelled.outputs.predictions
        wrong = labelled.outputs.features.taps[0][:, 0] > 3
        return replace(labelled, labels=np.where(wrong, (predictions + 1) % 4, predictions))

    inputs = make_post_hoc_inputs()
    inputs = replace(
        inputs, validation=mislabelled(draw_outputs(1500, seed=11)), fit=mislabelled(draw_outputs(1500, seed=12))
    )
    method = Whitebox(trees=30)
    size = method.fit(inputs)
    assert 2 * (8 * 4 + 4) + 30 < size <= 2 * (8 * 4 + 4) + 30 * 15  # trees of depth 3
    unseen = mislabelled(draw_outputs(1000, seed=30))
    verdict = method.score(unseen.outputs)
    scores = verdict.scores["wrong_probability"]
    assert ((scores >= 0) & (scores <= 1)).all()
    wrong = unseen.outputs.predictions != unseen.labels
    assert roc_auc_score(wrong, scores) > 0.9
    assert scores.mean() == pytest.approx(wrong.mean(), abs=0.06)
    np.testing.assert_array_equal(verdict.predictions, unseen.outputs.predictions)


def test_a_base_without_errors_is_not_applicable(make_post_hoc_inputs: MakePostHocInputs) -> None:
    inputs = make_post_hoc_inputs()
    right = [replace(part, labels=part.outputs.predictions) for part in (inputs.validation, inputs.fit)]
    with pytest.raises(NotApplicableError, match="no errors"):
        Whitebox(epochs=1).fit(replace(inputs, validation=right[0], fit=right[1]))
