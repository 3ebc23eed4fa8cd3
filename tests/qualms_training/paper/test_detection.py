"""Detection metrics of verdicts, compared with scikit-learn."""

import numpy as np
import pytest
from sklearn.metrics import average_precision_score, roc_auc_score

from qualms_training.errors import ModelError
from qualms_training.paper.detection import detect, measure
from qualms_training.paper.method import MethodOutput

RNG = np.random.default_rng(0)
LABELS = RNG.integers(3, size=200)


def verdict(n: int, shift: float, wrong: int = 0) -> MethodOutput:
    predictions = LABELS.copy() if n == 200 else np.zeros(n, dtype=np.int64)
    predictions[:wrong] = (predictions[:wrong] + 1) % 3
    scores = np.random.default_rng(n + wrong).normal(size=n) + shift
    scores[:wrong] += 1
    return MethodOutput(predictions, {"score": scores})


def test_metrics_of_ood_sets_and_errors_agree_with_scikit_learn() -> None:
    test, far = verdict(200, 0.0, wrong=30), verdict(100, 1.0)
    base = verdict(200, 0.0, wrong=50).predictions
    measured = measure({"test": test, "far": far}, LABELS, base)
    both = np.concatenate([test.scores["score"], far.scores["score"]])
    assert measured.ood["far"]["score"].auroc == pytest.approx(100 * roc_auc_score(np.arange(300) >= 200, both))
    assert measured.ood["far"]["score"].aupr == pytest.approx(
        100 * average_precision_score(np.arange(300) >= 200, both)
    )
    for errors, count in ((measured.own_errors, 30), (measured.base_errors, 50)):
        wrong = np.arange(200) < count
        assert errors["score"].auroc == pytest.approx(100 * roc_auc_score(wrong, test.scores["score"]))
    assert (measured.error_rate, measured.base_error_rate) == (15.0, 25.0)


def test_detected_is_the_share_beyond_the_score_that_one_percent_of_the_negatives_exceed() -> None:
    negatives, positives = np.arange(1000.0), np.array([0.0, 989.0, 990.0, 2000.0, 2000.0])
    assert detect(negatives, positives).detected == 60.0
    assert detect(np.zeros(1000), np.zeros(5)).detected == 0.0


def test_without_errors_there_are_no_error_detections() -> None:
    measured = measure({"test": verdict(200, 0.0)}, LABELS, LABELS)
    assert (measured.own_errors, measured.base_errors, measured.ood) == ({}, {}, {})


def test_a_column_of_test_images_is_compared_with_its_negatives_only() -> None:
    test = verdict(200, 0.0)
    half = np.arange(200) < 100
    test.scores["score"][~half] += 50
    same = MethodOutput(test.predictions[half], {"score": test.scores["score"][half]})
    verdicts = {"test": test, "itself": same}
    assert measure(verdicts, LABELS, LABELS, {"itself": ~half}).ood["itself"]["score"].auroc == 0
    assert measure(verdicts, LABELS, LABELS, {"itself": half}).ood["itself"]["score"].auroc == 50


def test_non_finite_scores_are_an_error() -> None:
    test = verdict(200, 0.0)
    test.scores["score"][3] = np.nan
    with pytest.raises(ModelError, match=r"'score' has values on 'test' that are not finite"):
        measure({"test": test}, LABELS, LABELS)


def test_without_base_predictions_there_are_no_base_errors() -> None:
    measured = measure({"test": verdict(200, 0.0, wrong=30)}, LABELS, None)
    assert (measured.error_rate, measured.base_error_rate) == (15.0, None)
    assert measured.own_errors
    assert measured.base_errors == {}
